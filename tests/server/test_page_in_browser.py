"""The pages in a real browser, against a server with scripted answers.

One browser, and one server for most. A page's own context keeps the tests apart.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support.browser import EXECUTABLE, PageEngine, browser, grave_faults, opened
from support.fake_engine import FakeEngine
from support.http_server import serving_process, wait_for_health
from support.serving import Served, served

from minisgl.router.metrics import join_pages
from minisgl_cli.chat import conversation_file
from minisgl_cli.chat.conversation import Conversation, Turn

pytestmark = pytest.mark.skipif(
    EXECUTABLE is None, reason="there is no browser: scripts/tools/browser.sh installs one"
)

Open = Callable[..., contextlib.AbstractContextManager[Page]]

RICH = """\
## A heading

Some *emphasis*, **weight** and `code`, with [a link](https://example.org/a_(b)).

1. one
   - nested
2. two

| name | value |
|:--|--:|
| a | 1 |

```python
def f(x):  # a comment
    return "text"
```

> quoted

The end."""

HOSTILE = (
    """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">

[click](javascript:window.hacked=1) [also](JaVaScRiPt:1) [data](data:text/html,x) ![i](http://x/y)

<b onclick="window.hacked = 1">bold</b> \u202eright to left\u202c \u2067 unclosed

```html
<script>window.hacked = 1</script>
```

| <script>window.hacked = 1</script> |
|---|
| **bold |

"""
    + "[" * 3000
    + "*" * 3001
    + " `" * 1000
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[Served[PageEngine]]:
    async def start() -> PageEngine:
        return PageEngine()

    with served(start) as found:
        yield found


@pytest.fixture
def engine(server: Served[PageEngine]) -> Iterator[PageEngine]:
    """The engine of the server, with nothing scripted."""
    found = server.engine
    found.answers, found.run, found.hold_after, found.num_running = ["Hello!"], 1, None, 0
    found.texts.clear()
    found.streams.clear()
    yield found
    server.on_loop(found.let_go)


@pytest.fixture
def page(chromium: Browser, server: Served[PageEngine], engine: PageEngine) -> Iterator[Page]:
    with opened(chromium, server.url) as found:
        yield found


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, count: int = 1) -> None:
    """Wait until there are `count` complete answers."""
    expect(page.locator(".answer")).to_have_count(count)
    expect(page.locator(".answer[aria-busy=false]")).to_have_count(count)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def stored(page: Page) -> list[dict[str, Any]]:
    values = page.evaluate(
        "Object.entries(localStorage).filter(([key]) => key.startsWith('minisgl.chat.'))"
    )
    return [json.loads(value) for _, value in values]


def chat_of(questions: int, answer: str = "An answer.", **fields: Any) -> dict[str, Any]:
    messages = []
    for index in range(questions):
        messages.append({"role": "user", "content": f"Question {index}"})
        messages.append({"role": "assistant", "content": answer, "ended": "stop"})
    chat = {"id": "long", "title": "", "model": "", "system": "", "sampling": {}, "thinking": ""}
    return {**chat, "schema": "", "tools": "", "messages": messages, "changed": 1, **fields}


def store(page: Page, chat: dict[str, Any]) -> None:
    entry = [f"minisgl.chat.{chat['id']}", json.dumps(chat)]
    page.evaluate("([key, value]) => localStorage.setItem(key, value)", entry)


# -- a conversation -------------------------------------------------------------------------------


def test_an_answer_streams_and_ends_as_markdown_with_its_figures(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    engine.answers, engine.hold_after = [RICH], 60
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    ask(page, "Show me <b>everything</b>")
    expect(page.locator(".answer h4")).to_have_text("A heading")
    expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    server.on_loop(engine.let_go)
    answered(page)
    answer = page.locator(".answer")
    assert page.locator(".question > div").first.inner_text() == "Show me <b>everything</b>"
    for selector, text in (
        ("em", "emphasis"),
        ("strong", "weight"),
        ("p code", "code"),
        ("ol > li > ul > li", "nested"),
        ("td.end", "1"),
        ("pre .k >> nth=0", "def"),
        ("pre .c", "# a comment"),
        ("blockquote", "quoted"),
    ):
        assert answer.locator(selector).inner_text() == text
    assert answer.locator("a").get_attribute("href") == "https://example.org/a_(b)"
    code = 'def f(x):  # a comment\n    return "text"\n'
    assert answer.locator("pre").text_content() == code
    facts = answer.locator(".tools span").inner_text()
    assert "tokens · first after" in facts
    assert "of the prompt cached" in facts
    assert "of 100,000 tokens" in page.locator("#meter").inner_text()
    assert page.title() == "Show me <b>everything</b> · minisgl"


def test_text_that_comes_in_any_pieces_looks_as_it_does_at_once(page: Page) -> None:
    text = f"{RICH}\n\n- a\n\n  b\n- c\n\n1. x\n\n**bold\n\n{HOSTILE}\n\n```\nopen\n\nfence"
    different = page.evaluate(
        """text => {
            const whole = new MarkdownView();
            whole.set(text, true);
            let seed = 1;
            const random = () => (seed = (seed * 48271) % 0x7fffffff) / 0x7fffffff;
            for (let round = 0; round < 4; round++) {
                const view = new MarkdownView(), ends = [];
                for (let end = 0; end < text.length;) {
                    end = Math.min(text.length, end + 1 + Math.floor(random() ** 4 * 400));
                    ends.push(end);
                    view.set(text.slice(0, end), false);
                }
                view.set(text, true);
                if (!view.element.isEqualNode(whole.element)) return ends;
            }
        }""",
        text,
    )
    assert different is None


def test_a_stopped_answer_stays_and_is_asked_again_or_its_question_edited(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    engine.answers, engine.hold_after = ["one two three four five six seven"], 3
    ask(page, "Count!")
    expect(page.locator(".body .text")).to_contain_text("o")
    page.keyboard.press("Escape")
    expect(page.get_by_text("You stopped this answer.")).to_be_visible()
    assert "o" in page.locator(".body .text").inner_text()
    assert [message["role"] for message in stored(page)[0]["messages"]] == ["user", "assistant"]

    server.on_loop(engine.let_go)
    page.get_by_title("Answer again").click()
    expect(page.locator(".body .text")).to_have_text("one two three four five six seven")
    answered(page)

    page.get_by_title("Edit").click()
    assert page.get_by_label("Your message").input_value() == "Count!"
    page.keyboard.press("Escape")
    assert page.get_by_label("Your message").input_value() == ""
    page.get_by_title("Edit").click()
    engine.answers = ["eins zwei"]
    ask(page, "Count in German!")
    expect(page.locator(".body .text")).to_have_text("eins zwei")
    answered(page)
    assert [message["content"] for message in stored(page)[0]["messages"]] == [
        "Count in German!",
        "eins zwei",
    ]


def test_a_question_stopped_before_its_answer_comes_back_to_be_edited(
    page: Page, engine: PageEngine
) -> None:
    engine.hold_after = 0
    ask(page, "Too early")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Editing your last question")).to_be_visible()
    assert page.get_by_label("Your message").input_value() == "Too early"


def test_conversations_survive_a_reload_and_are_searched_renamed_and_deleted(
    page: Page, engine: PageEngine
) -> None:
    engine.answers = ["Paris.", "Rome, surely.", "A third."]
    ask(page, "The capital of France?")
    answered(page)
    page.keyboard.press("Control+k")
    expect(page.locator("#hello")).to_be_visible()
    ask(page, "And of Italy?")
    answered(page)
    page.reload()
    expect(page.locator(".body .text")).to_have_text("Rome, surely.")
    expect(page.locator("#chats a")).to_have_count(2)

    page.get_by_label("Search conversations").fill("paris")  # in an answer
    expect(page.locator("#chats a")).to_have_text(["The capital of France?"])
    page.locator("#chats a").click()
    expect(page.locator(".body .text")).to_have_text("Paris.")
    page.get_by_label("Search conversations").fill("")

    page.get_by_label("Title").fill("France")
    page.keyboard.press("Enter")
    expect(page.locator("#chats a").filter(has_text="France")).to_have_count(1)
    ask(page, "Next question")
    answered(page, 2)
    assert "The capital of France?" in engine.texts[-1]
    assert "Paris." in engine.texts[-1]

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_title("More").click()
    page.get_by_role("button", name="Delete the conversation").click()
    expect(page.locator("#chats a")).to_have_text(["And of Italy?"])
    page.reload()
    expect(page.locator("#chats a")).to_have_text(["And of Italy?"])


def test_what_has_come_survives_a_reload_in_the_middle(page: Page, engine: PageEngine) -> None:
    engine.answers, engine.hold_after = ["one two three four five six"], 5
    ask(page, "Count!")
    expect(page.locator(".body .text")).to_contain_text("one")
    page.reload()
    expect(page.locator(".question")).to_have_count(1)
    expect(page.get_by_text("The connection was lost")).to_be_visible()
    assert "one" in page.locator(".body .text").inner_text()


def test_conversations_travel_to_the_chat_in_the_terminal_and_back(
    page: Page, engine: PageEngine, tmp_path: Path
) -> None:
    engine.answers = ["<think>\nHm.\n</think>\n\nParis."]
    ask(page, "The capital of France?")
    answered(page)
    with page.expect_download() as download:
        page.get_by_title("More").click()
        page.get_by_role("button", name="Export as a file").click()
    exported = tmp_path / download.value.suggested_filename
    assert exported.name == "The-capital-of-France-.json"
    download.value.save_as(exported)
    read = conversation_file.read(str(exported))
    assert [(turn.question, turn.answer) for turn in read.turns] == [
        ("The capital of France?", "Paris.")
    ]

    conversation = Conversation("Be brief.", [Turn("Why?", "<think>\nSo.\n</think>\n\nBecause.")])
    written = str(tmp_path / "written.json")
    conversation_file.write(written, conversation, {"temperature": 0.5}, "fake")
    page.locator("#file").set_input_files(written)
    expect(page.locator(".body .text").last).to_have_text("Because.")
    expect(page.locator("details.thinking summary")).to_have_text("Thought")
    expect(page.locator("#chosen")).to_have_text("system prompt · temperature")
    ask(page, "And then?")
    answered(page, 2)
    assert "Be brief." in engine.texts[-1]
    assert engine.streams[-1].params.temperature == 0.5

    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"messages": [{"role": "robot", "content": 1}]}')
    page.locator("#file").set_input_files(wrong)
    expect(page.locator("#banner")).to_contain_text("wrong.json cannot be read")


def test_a_full_storage_is_said_and_loses_nothing_that_is_shown(
    page: Page, engine: PageEngine
) -> None:
    page.evaluate(
        """() => { for (let size = 1 << 22; size; size >>= 1)
            try { for (;;) localStorage.setItem(`x${localStorage.length}`, "x".repeat(size)); }
            catch {} }"""
    )
    ask(page, "hello")
    answered(page)
    expect(page.locator("#banner")).to_contain_text("storage is full")
    expect(page.locator(".body .text")).to_have_text("Hello!")
    with page.expect_download():
        page.get_by_title("More").click()
        page.get_by_role("button", name="Export as a file").click()


# -- hostile and large ----------------------------------------------------------------------------


def test_hostile_text_is_shown_as_text(page: Page, engine: PageEngine) -> None:
    engine.answers, engine.run = [HOSTILE], 7
    ask(page, "<script>window.hacked = 1</script>")
    answered(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#log :is(script, img, b)").count() == 0
    hrefs = page.locator("#log a").evaluate_all("links => links.map(link => link.href)")
    assert hrefs == ["http://x/y"]
    text = page.locator(".body .text").inner_text()
    assert "<script>window.hacked = 1</script>" in text
    assert "[click](javascript:window.hacked=1)" in text
    # The marks end with their paragraph: what is after it is in order.
    assert page.locator("#title").input_value() == "<script>window.hacked = 1</script>"
    page.reload()
    expect(page.locator(".answer")).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_a_line_of_a_megabyte_is_shown_in_pieces_while_the_page_takes_input(
    chromium: Browser,
) -> None:
    async def start() -> FakeEngine:
        return FakeEngine(repeat=4096, answer_length=256)

    with served(start) as found, opened(chromium, found.url) as page:
        ask(page, "a long line")
        page.get_by_label("Your message").fill("typed meanwhile")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        lengths = page.locator(".body .text > *").evaluate_all(
            "pieces => pieces.map(piece => piece.textContent.length)"
        )
        assert sum(lengths) == 1 << 20
        assert max(lengths) <= 8000
        assert page.get_by_label("Your message").input_value() == "typed meanwhile"


def test_of_300_messages_only_those_in_sight_are_laid_out(page: Page, engine: PageEngine) -> None:
    store(page, chat_of(150, RICH))
    page.goto(f"{page.url.partition('#')[0]}#/chat/long")
    page.reload()
    expect(page.locator(".answer")).to_have_count(150)
    expect(page.get_by_text("Question 149", exact=True)).to_be_in_viewport()
    laid_out = page.evaluate(
        """[...document.querySelectorAll('.body .text')]
            .filter(found => found.checkVisibility({contentVisibilityAuto: true})).length"""
    )
    assert 0 < laid_out < 20
    ask(page, "One more")
    answered(page, 151)
    expect(page.locator(".body .text").last).to_be_in_viewport()


def test_a_frame_of_a_stream_renders_the_last_block_only(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    paragraphs = ["A paragraph."] * 40
    begun = "\n\n".join(paragraphs[:30])
    engine.answers = ["\n\n".join(paragraphs) + " More."]
    engine.hold_after = len(engine.tokenizer.encode(begun, add_special_tokens=False))
    ask(page, "hello")
    # All that comes before the engine goes on is drawn: so no frame is left that would draw anew.
    expect(page.locator(".answer p")).to_have_text(paragraphs[:30])
    page.evaluate("document.querySelectorAll('.answer p').forEach((p, i) => { p.mark = i; })")
    server.on_loop(engine.let_go)
    answered(page)
    marks = page.evaluate("[...document.querySelectorAll('.answer p')].map(p => p.mark ?? -1)")
    # The last line was incomplete, so it could still have joined the paragraph before it.
    assert marks == [*range(28), *[-1] * 12]


# -- what models do -------------------------------------------------------------------------------


def test_thinking_is_folded_and_counted(page: Page, engine: PageEngine) -> None:
    engine.answers = ["<think>\nLet me *think*.\n</think>\n\nDone."]
    ask(page, "Think!")
    answered(page)
    summary = page.locator("details.thinking summary")
    expect(summary).to_contain_text("Thought for")
    expect(summary).to_contain_text("tokens")
    expect(page.get_by_text("Let me think.")).to_be_hidden()
    summary.click()
    expect(page.get_by_text("Let me think.")).to_be_visible()
    assert page.locator(".body .text").inner_text() == "Done."
    page.get_by_title("Settings").click()
    page.get_by_label("Thinking").select_option("off")
    page.keyboard.press("Escape")
    ask(page, "Do not think!")
    answered(page, 2)
    assert engine.template_options["enable_thinking"] is False


def test_an_answer_held_to_a_schema_is_shown_as_json(page: Page, engine: PageEngine) -> None:
    engine.answers = ['{"city":"Köln","size":12345678901234567890}']
    page.get_by_title("Settings").click()
    schema = page.get_by_label("Answer in JSON of this schema")
    schema.fill('{"type": "object"')
    assert "no JSON" in schema.evaluate("field => field.validationMessage")
    page.get_by_role("button", name="Close").click()
    ask(page, "A city!")  # opens them again
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    assert engine.streams == []
    properties = {"city": {"type": "string"}, "size": {"type": "integer"}}
    schema.fill(json.dumps({"type": "object", "properties": properties}))
    page.get_by_label("Max tokens").fill("500")
    page.get_by_role("button", name="Close").click()
    ask(page, "A city!")
    answered(page)
    [stream] = engine.streams
    assert stream.matcher is not None
    assert stream.params.max_tokens == 500
    shown = page.locator(".answer .code pre").text_content()
    assert shown == '{\n  "city": "Köln",\n  "size": 12345678901234567890\n}'


def test_a_tool_call_is_shown_and_takes_its_result(page: Page, engine: PageEngine) -> None:
    engine.answers = [f"I look.\n{CALL}", "It rains."]
    page.get_by_title("Settings").click()
    page.get_by_label("Tools that the model may call").fill(json.dumps([WEATHER]))
    page.keyboard.press("Escape")
    ask(page, "The weather in Köln?")
    call = page.get_by_role("region", name="Call of get_weather")
    expect(call.locator("pre")).to_have_text('{\n  "city": "Köln"\n}')
    call.get_by_label("Its result").fill("rain, 11 °C")
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator(".body .text").last).to_have_text("It rains.")
    answered(page, 2)
    assert "<tool_response>rain, 11 °C</tool_response>" in engine.texts[-1]
    expect(call.locator("pre").last).to_have_text("rain, 11 °C")


# -- the server and its troubles ------------------------------------------------------------------


def test_the_key_is_asked_for_again_until_it_is_right_and_kept_for_the_tab(
    chromium: Browser,
) -> None:
    async def start() -> PageEngine:
        return PageEngine()

    with served(start, api_key=("secret",)) as found, opened(chromium, found.url) as page:
        found.engine.answers = ["Hello!"]
        dialog = page.get_by_role("dialog", name="This server asks for a key")
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not accept this key")
        dialog.get_by_label("Key").fill("secret")
        dialog.get_by_role("button", name="Continue").click()
        expect(page.get_by_label("Model", exact=True)).to_have_value("fake")
        ask(page, "hello")
        answered(page)
        page.reload()
        expect(page.get_by_label("Model", exact=True)).to_have_value("fake")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        page.goto(f"{found.url}/docs")
        expect(page.get_by_role("heading", name="/v1/chat/completions")).to_be_visible()
        with opened(chromium, f"{found.url}/docs") as docs:  # a tab that has no key
            docs.get_by_label("Key").fill("secret")
            docs.get_by_role("button", name="Show").click()
            expect(docs.get_by_role("heading", name="/v1/chat/completions")).to_be_visible()


def test_a_server_that_restarts_in_the_middle_loses_nothing_that_had_come(
    chromium: Browser, port: int, tmp_path: Path
) -> None:
    endless = {"interval": 0.05, "ends_after": str(tmp_path / "never")}
    with serving_process(endless, port=port) as (first, _):
        url = f"http://127.0.0.1:{port}"
        wait_for_health(first, url, 200)
        with opened(chromium, url) as page:
            ask(page, "The alphabet, please")
            expect(page.locator(".body .text")).to_contain_text("abc")
            first.kill()
            first.wait()
            expect(page.get_by_text("The connection was lost")).to_be_visible()
            expect(page.locator("#banner")).to_contain_text("does not answer")
            expect(page.locator(".body .text")).to_contain_text("abc")
            with serving_process({"answer_length": 3}, port=port):
                expect(page.locator("#banner")).to_be_hidden()
                page.get_by_title("Answer again").click()
                expect(page.locator(".body .text")).to_have_text("abc")
                answered(page)


def test_the_progress_of_loading_is_shown_until_the_model_is_there(chromium: Browser) -> None:
    async def nothing() -> None:
        return None

    with served(nothing) as found:
        found.state.load("reading weights", 0.4)
        with opened(chromium, found.url) as page:
            banner = page.locator("#banner")
            expect(banner).to_contain_text("The model is still loading (reading weights, 40 %).")
            expect(banner.get_by_role("progressbar")).to_have_js_property("value", 0.4)
            engine = found.on_loop(PageEngine)
            engine.answers = ["Hello!"]
            found.on_loop(lambda: found.state.start(engine))
            expect(banner).to_be_hidden()
            ask(page, "hello")
            answered(page)


def test_a_model_that_makes_vectors_says_so_instead_of_taking_questions(chromium: Browser) -> None:
    async def start() -> FakeEngine:
        return FakeEngine(task="embed")

    with served(start) as server, opened(chromium, server.url) as page:
        expect(page.get_by_text("makes vectors of texts: see /v1/embeddings")).to_be_visible()
        expect(page.get_by_label("Your message")).to_be_hidden()
        expect(page.get_by_role("button", name="What is minisgl?")).to_be_hidden()
        assert grave_faults(page) == []


def test_a_refused_request_says_why_and_can_be_tried_again(page: Page, engine: PageEngine) -> None:
    page.get_by_title("Settings").click()
    page.get_by_label("Answer in JSON of this schema").fill('{"type": "nonsense"}')
    page.keyboard.press("Escape")
    ask(page, "hello")
    expect(page.locator(".notice")).to_contain_text("nonsense")
    page.get_by_title("Settings").click()
    page.get_by_label("Answer in JSON of this schema").fill("")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".body .text")).to_have_text("Hello!")


def test_the_second_view_draws_the_metrics_while_they_change(
    page: Page, engine: PageEngine
) -> None:
    ask(page, "hello")
    answered(page)
    engine.num_running = 1
    page.clock.install()
    page.clock.pause_at(time.time() + 60)  # so that the first sample is the only one
    page.get_by_role("link", name="Server at work").click()
    expect(page.get_by_text("fake on minisgl")).to_be_visible()
    requests = page.locator(".card").filter(has_text="Requests").first
    expect(requests.locator("dd").first).to_have_text("1")
    kv = page.locator(".card").filter(has_text="KV cache")
    expect(kv.locator("dd")).to_have_text("76 %")
    path = requests.locator("path.line0")
    expect(path).to_have_attribute("d", "M150 0.00")
    engine.num_running = 0
    page.clock.resume()
    expect(path).to_have_attribute("d", re.compile(r"^M\d+.* 0\.00L150 100\.00$"))
    expect(requests.locator("dd").first).to_have_text("0")
    page.go_back()
    expect(page.locator(".body .text")).to_have_text("Hello!")


def test_the_second_view_sums_over_replicas(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    def two(route: Route) -> None:
        pages.append(urlopen(f"{server.url}/metrics").read())
        body = join_pages({"0": pages[0], "1": pages[-1]}, "replica")
        route.fulfill(content_type="text/plain", body=body)

    pages: list[bytes] = []
    page.route("**/metrics", two)
    engine.num_running = 3
    page.get_by_role("link", name="Server at work").click()
    expect(page.get_by_text("fake on minisgl")).to_be_visible()
    requests = page.locator(".card").filter(has_text="Requests").first
    expect(requests.locator("dd").first).to_have_text("6")
    expect(page.locator(".card").filter(has_text="KV cache").locator("dd")).to_have_text("76 %")
    asked = page.request.post(
        f"{server.url}/v1/completions", data={"prompt": "hello", "max_tokens": 1}
    )
    assert asked.ok
    first = page.locator(".card").filter(has_text="first token")
    expect(first.locator("dd").first).to_have_text(re.compile("ms$"))
    page.unroute_all(behavior="ignoreErrors")  # of a poll that is under way at the end
    engine.num_running = 0


def test_rates_of_the_second_view_count_on_where_a_replica_starts_again(page: Page) -> None:
    def metrics(**tokens: int) -> bytes:
        """Of replicas by their name; each token took one or ten seconds, half of them each."""
        name = "minisgl_step_seconds_bucket"
        pages = {
            replica: (
                "# TYPE minisgl_generated_tokens counter\n"
                f"minisgl_generated_tokens_total {count}.0\n"
                f'{name}{{le="1.0"}} {count / 2}\n{name}{{le="10.0"}} {count}.0\n'
                f'{name}{{le="+Inf"}} {count}.0\nminisgl_running_requests 2.0\n'
            ).encode()
            for replica, count in tokens.items()
        }
        return join_pages(pages, "replica")

    samples = [
        metrics(a=1000, b=500),
        metrics(a=1100, b=500),
        metrics(b=510),  # the other one is being started again
        metrics(a=4, b=510),
        metrics(a=24, b=510),
    ]
    read: Any = page.evaluate(
        "texts => texts.map(readMetrics)", [sample.decode() for sample in samples]
    )
    grown = [each["sums"]["generated_tokens"] for each in read]
    assert [count - grown[0] for count in grown] == [0, 100, 110, 114, 134]
    assert [each["sums"]["running_requests"] for each in read] == [4, 4, 2, 4, 4]
    for share, seconds in ((0.5, 1), (0.99, 9.82)):
        found = page.evaluate(
            "([now, then, share]) => quantile('step_seconds', share)(now, then)",
            [read[3], read[2], share],
        )
        assert found == pytest.approx(seconds)


# -- everybody ------------------------------------------------------------------------------------


def test_a_phone_has_one_column_with_the_conversations_on_demand(
    chromium: Browser, server: Served[PageEngine], engine: PageEngine
) -> None:
    engine.answers = [
        RICH + "\n\n" + "x" * 500 + "\n\n" + "|" + " wide column |" * 9 + "\n" + "|-" * 9 + "|\n"
    ]
    with opened(chromium, server.url, viewport={"width": 360, "height": 640}) as page:
        ask(page, "A question that is longer than the narrow title can show, " + "y" * 100)
        answered(page)
        for hash in ("", "#/server"):
            page.goto(f"{server.url}/{hash}" if hash else page.url)
            width = page.evaluate(
                """Math.max(...[...document.querySelectorAll("#main, #main *")]
                    .filter(found => !found.closest(".table, .code, [hidden]"))
                    .map(found => found.getBoundingClientRect().right))"""
            )
            assert width <= 361
        expect(page.get_by_label("Search conversations")).to_be_hidden()
        page.get_by_title("Conversations").click()
        page.locator("#chats a").click()
        expect(page.get_by_label("Search conversations")).to_be_hidden()
        expect(page.locator(".answer")).to_be_visible()
        assert page.get_by_role("button", name="Send", exact=True).bounding_box()["x"] < 330  # type: ignore[index]


def test_the_keyboard_reaches_everything(page: Page, engine: PageEngine) -> None:
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answered(page)
    assert stored(page)[0]["messages"][0]["content"] == "one\ntwo"
    expect(page.get_by_label("Your message")).to_be_focused()
    page.get_by_role("button", name="New conversation").focus()
    focused = "(({id, title, textContent}) => id || title || textContent)(document.activeElement)"
    names = [page.evaluate(focused)]
    for _ in range(14):
        page.keyboard.press("Tab")
        names.append(page.evaluate(focused))
    order = [
        *("new", "search", "one", "to-server", "API reference", "title", "model"),
        *("open-settings", "More", "scroller", "Copy", "Edit", "Copy", "Answer again", "prompt"),
    ]
    assert names == order
    page.get_by_title("Settings").click()
    page.keyboard.press("Escape")
    expect(page.get_by_title("Settings")).to_be_focused()


def test_axe_finds_no_grave_fault(
    chromium: Browser, server: Served[PageEngine], engine: PageEngine
) -> None:
    engine.answers = [f"<think>\nHm.\n</think>\n\n{RICH}\n{CALL}"]
    with opened(chromium, server.url) as page:
        store(page, chat_of(1, tools=json.dumps([WEATHER])))
        page.goto(f"{server.url}/#/chat/long")
        page.reload()
        ask(page, "Show me everything")
        answered(page, 2)
        assert grave_faults(page) == []
        page.emulate_media(color_scheme="dark")
        assert grave_faults(page, rules=["color-contrast"]) == []
        page.get_by_title("Settings").click()
        assert grave_faults(page, within="#settings") == []
        page.keyboard.press("Escape")
        page.goto(f"{server.url}/#/server")
        expect(page.get_by_text("fake on minisgl")).to_be_visible()
        assert grave_faults(page, within="#server") == []
        page.goto(f"{server.url}/docs")
        expect(page.get_by_role("heading", name="/metrics")).to_be_visible()
        expect(page.get_by_label("Key")).to_be_hidden()  # this server asks for none
        assert page.get_by_text("at least 1 item,").count()
        assert not page.get_by_text("at least 1 items").count()
        page.locator("summary").last.click()
        many = "section:nth-of-type(-n+5)"  # of the same kind
        page.locator(many).evaluate_all("found => found.forEach(section => section.remove())")
        assert grave_faults(page) == []
