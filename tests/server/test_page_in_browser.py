"""The pages in a real browser, against a server with scripted answers.

One browser, and one server for most. A page's own context keeps the tests apart.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect
from support.browser import EXECUTABLE, PageEngine, browser, grave_faults, opened
from support.fake_engine import FakeEngine
from support.http_server import serving_process, wait_for_health
from support.image_checkpoints import colourful, encoded
from support.seeing_engine import PAD, SeeingEngine, seeing_engine
from support.serving import Served, served

from minisgl.kvcache.snapshots import SnapshotStats
from minisgl.request import PARAMETERS
from minisgl.router.metrics import join_pages
from minisgl.scheduler.runs import DraftCounters
from minisgl.server.history import SECONDS
from minisgl.server.requests.request_types import SHARED_FIELDS
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

# Gives a file to an element as the clipboard or the mouse do.
GIVE_FILE = """([event, place, holder, bytes]) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(bytes)], `${event}.png`, { type: "image/png" }));
    const given = new Event(event, { bubbles: true, cancelable: true });
    Object.defineProperty(given, holder, { value: data });
    document.querySelector(place).dispatchEvent(given);
}"""
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
    found.snapshots = found.drafts = None
    found.texts.clear()
    found.streams.clear()
    yield found
    server.on_loop(found.let_go)


@pytest.fixture
def page(chromium: Browser, server: Served[PageEngine], engine: PageEngine) -> Iterator[Page]:
    with opened(chromium, server.url) as found:
        yield found


QUESTION = [{"role": "user", "content": "Unheard"}]
PART = {"role": "assistant", "content": "An ans"}
NOTHING = {"role": "assistant", "content": ""}


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def attach(page: Page, name: str, content: bytes) -> None:
    file: Any = {"name": name, "mimeType": "text/plain", "buffer": content}
    page.locator("#attachments").set_input_files(file)


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
    text = f"{RICH}\n\n{FORMULAS}\n\n{DRAWN}\n\n"
    text += f"- a\n\n  b\n- c\n\n1. x\n\n**bold\n\n{HOSTILE}\n\n```\nopen\n\nfence"
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
    expect(page.locator(".body .text")).to_contain_text("o")
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


def test_a_cut_answer_keeps_its_figures_and_a_failed_question_its_place(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    engine.answers, engine.hold_after = ["one two three four five six seven"], 3
    ask(page, "Count!")
    expect(page.locator(".body .text")).to_contain_text("o")
    page.keyboard.press("Escape")
    expect(page.get_by_text("You stopped this answer.")).to_be_visible()
    expect(page.locator(".answer .tools span")).to_contain_text(re.compile(r"^[1-9] tokens"))
    expect(page.locator(".answer .tools")).not_to_contain_text("NaN")
    expect(page.locator("#meter")).to_contain_text("of 100,000 tokens")
    server.on_loop(engine.let_go)

    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Unheard")
    expect(page.locator(".notice").last).to_contain_text("The server does not answer.")
    expect(page.get_by_text("connection was lost")).to_have_count(0)
    expect(page.locator("#meter")).to_contain_text("of 100,000 tokens")  # of the last answer
    page.unroute_all()
    engine.answers = ["Heard."]
    ask(page, "Another one")
    answered(page, 3)
    expect(page.locator(".question > div:first-child")).to_have_text(
        ["Count!", "Unheard", "Another one"]
    )
    expect(page.locator(".notice")).to_contain_text(["You stopped", "does not answer"])
    assert "Unheard" not in engine.texts[-1]  # the model sees complete turns
    assert "Count!" in engine.texts[-1]
    page.reload()
    expect(page.locator(".notice")).to_contain_text(["You stopped", "does not answer"])


def test_settings_say_what_is_allowed_and_have_all_samplers_of_the_server(
    page: Page, engine: PageEngine
) -> None:
    page.get_by_title("Settings").click()
    page.get_by_text("More sampling").click()
    temperature = page.get_by_label("Temperature", exact=True)
    hint = page.locator("#temperature-hint")
    expect(hint).to_have_text("0 to 2; 0 takes the likeliest token")
    for typed in ("3", "warm"):
        temperature.fill(typed)
        expect(hint).to_contain_text("Allowed: 0 to 2. Until then the model's own default is used.")
        expect(temperature).to_have_attribute("aria-invalid", "true")
    temperature.fill("0.5")
    expect(temperature).to_have_attribute("aria-invalid", "false")

    declared: dict[str, dict[str, Any]] = page.evaluate("SAMPLING")
    scores = {"logprobs", "logprob_token_ids", "prompt_logprobs", "return_routed_experts"}
    shared = {*SHARED_FIELDS} - scores
    assert declared.keys() == {
        *shared,
        *("max_tokens", "thinking_token_budget", "include_stop_str_in_output"),
    }
    for name, parameter in PARAMETERS.items():
        if name in declared and name != "max_tokens":
            bounds = declared[name]
            assert parameter.low <= bounds["min"] < bounds["max"] <= parameter.high, name
            is_whole = parameter.kind is int
            assert (bounds["kind"] == "count") == is_whole
            if name != "seed":
                assert (bounds["min"], bounds["max"]) == (parameter.low, parameter.high)
    values: dict[str, tuple[str, Any]] = {
        "Min p": ("0.1", 0.1),
        "Top n sigma": ("1.5", 1.5),
        "Repetition penalty": ("1.1", 1.1),
        "Seed": ("-1", None),
        "Stop": ("never\nsuch a\\nline", ("never", "such a\nline")),
        "Stop token ids": ("3, 5", (3, 5)),
        "Logit bias": ('{"7": -5}', {7: -5}),
        "Bad words": ("never said", ("never said",)),
    }
    for label, (typed, _) in values.items():
        page.get_by_label(label, exact=True).fill(typed)
    expect(page.locator("#seed-hint")).to_contain_text("Allowed: a whole number, at least 0.")
    page.get_by_label("Ignore eos").select_option("off")
    page.get_by_role("button", name="Close").click()
    ask(page, "hello")
    answered(page)
    params = engine.streams[-1].params
    for label, (_, value) in values.items():
        assert getattr(params, label.lower().replace(" ", "_")) == value
    assert params.temperature == 0.5
    page.get_by_title("Settings").click()  # what is set is shown again
    expect(page.get_by_label("Stop", exact=True)).to_have_value("never\nsuch a\\nline")
    expect(page.get_by_label("Logit bias")).to_have_value('{"7":-5}')
    assert grave_faults(page, within="#settings") == []


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
    expect(page.get_by_text("The page was left before the answer was complete.")).to_be_visible()
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


def test_an_earlier_question_is_edited_and_both_branches_are_kept(
    page: Page, engine: PageEngine
) -> None:
    engine.answers = ["One.", "Two.", "Other one.", "Other one again."]
    for count, question in enumerate(("First?", "Second?"), 1):
        ask(page, question)
        answered(page, count)
    questions, answers = page.locator(".question > div:first-child"), page.locator(".body .text")
    page.get_by_title("Edit").first.click()
    expect(page.locator("#editing")).to_contain_text("earlier question")
    ask(page, "First, otherwise?")
    expect(answers).to_have_text(["Other one."])
    assert "Second?" not in engine.texts[-1]
    assert "First?" not in engine.texts[-1]
    answered(page)
    page.get_by_title("Answer again").click()
    expect(answers).to_have_text(["Other one again."])
    answered(page)
    of_question, of_answer = page.locator(".question .branches"), page.locator(".answer .branches")
    expect(of_question).to_have_text("2\u2009/\u20092")
    of_answer.get_by_title("Previous version").click()
    expect(answers).to_have_text(["Other one."])
    of_question.get_by_title("Previous version").click()
    expect(questions).to_have_text(["First?", "Second?"])
    expect(answers).to_have_text(["One.", "Two."])
    expect(of_question.get_by_title("Previous version")).to_be_disabled()
    page.reload()
    expect(answers).to_have_text(["One.", "Two."])
    of_question.get_by_title("Next version").click()
    expect(answers).to_have_text(["Other one."])
    of_answer.get_by_title("Next version").click()
    expect(answers).to_have_text(["Other one again."])
    ask(page, "And now?")  # goes on in the branch that is shown
    answered(page, 2)
    assert "Other one again." in engine.texts[-1]
    assert "Two." not in engine.texts[-1]
    assert grave_faults(page, within="#log") == []


def test_an_answer_that_was_cut_goes_on_where_it_ended(page: Page, engine: PageEngine) -> None:
    page.get_by_title("Settings").click()
    page.get_by_label("Max tokens").fill("9")
    page.keyboard.press("Escape")
    engine.answers = ["one two three four five six seven eight nine", " and the rest."]
    ask(page, "Count!")
    expect(page.get_by_text("it reached the limit of tokens")).to_be_visible()
    answered(page)
    begun = page.locator(".body .text").text_content()
    assert begun
    page.get_by_title("Settings").click()
    page.get_by_label("Max tokens").fill("")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".body .text")).to_have_text(f"{begun} and the rest.")
    answered(page)
    assert engine.texts[-1].endswith(f"<|im_start|>assistant\n{begun}")
    expect(page.locator(".notice")).to_have_count(0)
    count = 9 + len(engine.tokenizer.encode(" and the rest.")) + 1
    expect(page.locator(".answer .tools")).to_contain_text(f"{count} tokens")
    assert [message["role"] for message in stored(page)[0]["messages"]] == ["user", "assistant"]


def test_text_files_go_with_a_question(page: Page, engine: PageEngine, tmp_path: Path) -> None:
    notes, picture = tmp_path / "notes.md", tmp_path / "picture.bin"
    notes.write_text("# Grün\n```\ncode\n```\n")
    picture.write_bytes(b"\x89PNG\x00\xff")
    page.locator("#attachments").set_input_files([notes, picture])
    expect(page.locator("#banner")).to_contain_text("picture.bin is no text")
    expect(page.locator("#attached")).to_contain_text("notes.md · 20 characters")
    page.locator("#attachments").set_input_files(tmp_path / "notes.md")
    page.get_by_role("button", name="Remove notes.md").last.click()
    expect(page.locator("#attached > span")).to_have_count(1)
    ask(page, "What is it?")
    answered(page)
    expect(page.locator("#attached")).to_be_hidden()
    assert "notes.md:\n````\n# Grün\n```\ncode\n```\n````\n\nWhat is it?" in engine.texts[-1]
    page.locator(".attachment summary").click()
    expect(page.locator(".attachment pre")).to_contain_text("# Grün")
    expect(page.locator(".question > div:first-child")).to_have_text("What is it?")
    page.get_by_title("Edit").click()
    expect(page.locator("#attached")).to_contain_text("notes.md")


@pytest.fixture(scope="module")
def seeing() -> Iterator[Served[SeeingEngine]]:
    with served(seeing_engine) as found:
        yield found


def photo(width: int, height: int) -> bytes:
    """A PNG that does not compress."""
    return encoded(colourful(width, height))


def test_images_go_with_a_question(
    chromium: Browser, seeing: Served[SeeingEngine], tmp_path: Path
) -> None:
    """Pasted, dropped and chosen; small ones as they are, large ones made smaller."""
    engine, small = seeing.engine, photo(60, 40)
    url = f"data:image/png;base64,{b64encode(small).decode()}"
    engine.answers = ["I see."]
    with opened(chromium, seeing.url) as page:
        expect(page.get_by_title("Attach images and text files")).to_be_visible()
        file = [{"name": "cat.png", "mimeType": "image/png", "buffer": small}]
        page.locator("#attachments").set_input_files(file)
        preview = page.locator("#attached img")
        expect(preview).to_have_attribute("src", url)
        expect(page.locator("#attached")).to_contain_text("cat.png · ")
        for event, place, holder in (
            ("paste", "#prompt", "clipboardData"),
            ("drop", "#chat", "dataTransfer"),
        ):
            page.evaluate(GIVE_FILE, [event, place, holder, [*small]])
        expect(preview).to_have_count(3)
        assert grave_faults(page, "#composer") == []
        page.get_by_role("button", name="Remove cat.png").first.click()
        page.get_by_role("button", name="Remove drop.png").click()
        expect(preview).to_have_count(1)
        ask(page, "What is it?")
        answered(page)
        assert [source.data for source in engine.sources[-1]] == [small]
        assert f"user\n{PAD}What is it?<|im_end|>" in engine.texts[-1]
        expect(page.get_by_role("img", name="paste.png")).to_be_visible()
        expect(page.locator("#attached")).to_be_hidden()
        assert grave_faults(page, "#log") == []
        large = photo(2000, 1000)
        file = [{"name": "large.png", "mimeType": "image/png", "buffer": large}]
        page.locator("#attachments").set_input_files(file)
        expect(preview).to_have_count(1)
        page.get_by_role("button", name="Send", exact=True).click()
        answered(page, 2)
        # The conversation keeps the first one.
        first, second = engine.sources[-1]
        reduced = Image.open(io.BytesIO(second.data))
        assert first.data == small and (reduced.format, reduced.size) == ("JPEG", (1536, 768))
        page.reload()
        expect(page.get_by_role("img", name="large.png")).to_be_visible()
        page.get_by_title("Edit").first.click()
        expect(preview).to_have_attribute("src", url)
        page.keyboard.press("Escape")
        page.get_by_title("More").first.click()
        with page.expect_download() as downloading:
            page.get_by_text("Export as a file").click()
        saved = tmp_path / "chat.json"
        downloading.value.save_as(saved)
        assert conversation_file.read(str(saved)).turns[0].images == (url,)
        page.evaluate("localStorage.clear()")
        page.reload()
        page.locator("#file").set_input_files(saved)
        expect(page.get_by_role("img", name="image 1").first).to_have_attribute("src", url)
        broken = [{"name": "broken.png", "mimeType": "image/png", "buffer": small[:40]}]
        page.locator("#attachments").set_input_files(broken)
        expect(page.locator("#banner")).to_contain_text("broken.png cannot be read as an image")


def test_a_model_that_takes_text_only_gets_no_images(page: Page) -> None:
    expect(page.get_by_title("Attach text files")).to_be_visible()
    file: Any = {"name": "cat.png", "mimeType": "image/png", "buffer": photo(9, 9)}
    page.locator("#attachments").set_input_files(file)
    expect(page.locator("#banner")).to_contain_text(
        "cat.png cannot be attached: this model takes text only"
    )
    expect(page.locator("#attached")).to_be_hidden()


def test_a_file_whose_encoding_is_guessed_goes_with_a_question(
    page: Page, engine: PageEngine
) -> None:
    text = "Grüße aus Köln,\r\n\tà bientôt.\r\n"
    attach(page, "notes.txt", text.encode("latin-1"))
    expect(page.locator("#attached")).to_contain_text(f"notes.txt · {len(text)} characters")
    expect(page.locator("#banner")).to_contain_text("not in UTF-8, and was read as Latin-1")
    ask(page, "What is it?")
    answered(page)
    assert text.strip() in engine.texts[-1]


@pytest.fixture(scope="module")
def reader(chromium: Browser, server: Served[PageEngine]) -> Iterator[Page]:
    """A page for what does not change it."""
    with opened(chromium, server.url) as found:
        yield found


def text_of(page: Page, content: bytes) -> dict[str, str] | None:
    """The text of a file, and the encoding that was guessed; None if it is no text."""
    found: dict[str, str] | None = page.evaluate(
        "bytes => textOf(Uint8Array.from(bytes))", [*content]
    )
    return found


@pytest.mark.parametrize(
    ("encoding", "guess"),
    [
        *(("utf-8-sig", None), ("utf-16", None), ("utf-16-le", None), ("utf-16-be", None)),
        *(("latin-1", "Latin-1"), ("cp1252", "Latin-1")),
    ],
)
def test_text_files_are_read_in_the_encodings_that_editors_write(
    encoding: str, guess: str | None, reader: Page
) -> None:
    text = "Grüße aus Köln,\r\n\tà bientôt.\r\n"
    assert text_of(reader, text.encode(encoding)) == {"text": text, "guess": guess}


@pytest.mark.parametrize("text", ["élan", "niño", "20 °C", "ÉLAN", "£5", "é"])
def test_a_word_in_latin_1_is_read_as_that(text: str, reader: Page) -> None:
    assert text_of(reader, text.encode("latin-1")) == {"text": text, "guess": "Latin-1"}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text",
    [
        "日本",
        "我们的服务器在北京，今天的天气很好。\n你好！",
        "カタカナとひらがな 123、漢字。",
        "안녕하세요, 세계!",
        "Привет, мир! Как дела?",
        "Καλημέρα κόσμε",
        "שלום עולם",
    ],
)
def test_utf_16_without_a_mark_is_read_in_any_script(
    text: str, encoding: str, reader: Page
) -> None:
    found = text_of(reader, text.encode(encoding))
    assert found is not None and found["text"] == text


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
        b"\x7fELF\x02\x01\x01\x00" + bytes(8) + b"\x03\x00>\x00",
        b"\xff\xd8\xff\xe0\x10JFIF\x01",
        b"\xff\xfe\x00\xd8a\x00",  # a surrogate alone
        "x".encode("utf-32"),
        bytes(range(1, 32)) * 9,
    ],
    ids=["png", "elf", "jpeg", "surrogate", "utf-32", "controls"],
)
def test_what_is_no_text_is_not_read(content: bytes, reader: Page) -> None:
    assert text_of(reader, content) is None


def test_all_conversations_have_menus_and_travel_together(
    page: Page, server: Served[PageEngine], engine: PageEngine, tmp_path: Path
) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    titles = page.locator("#chats a")
    for count in (1, 2):
        page.keyboard.press("Control+k")
        expect(page.locator(".answer")).to_have_count(0)  # the conversation before has left
        ask(page, f"Question {count}")
        answered(page)
    page.get_by_title("Menu of Question 1").click()  # not the one that is shown
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("The first")
    page.keyboard.press("Enter")
    expect(titles.filter(has_text="The first")).to_have_count(1)
    page.get_by_title("Edit").click()
    ask(page, "Question 2, edited")
    answered(page)
    page.get_by_title("Menu of The first").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as a file").click()
    assert download.value.suggested_filename == "The-first.json"

    def choose(action: str) -> None:
        page.locator("#all").click()
        page.get_by_role("button", name=action).click()

    with page.expect_download() as download:
        choose("Export all conversations")
    saved = tmp_path / "all.json"
    download.value.save_as(saved)
    page.get_by_title("Menu of The first").click()
    page.get_by_role("button", name="Delete the conversation").click()
    expect(titles).to_have_text(["Question 2, edited"])
    expect(page.locator(".body .text")).to_have_text("Hello!")  # it is still shown
    choose("Delete all conversations")
    expect(titles).to_have_count(0)
    assert stored(page) == []
    page.locator("#file").set_input_files(saved)
    expect(page.locator("#banner")).to_contain_text("2 conversations were imported")
    expect(titles).to_have_text(["Question 2, edited", "The first"])
    titles.first.click()
    page.get_by_title("Previous version").click()  # branches came along
    expect(page.locator(".question > div:first-child")).to_have_text(["Question 2"])

    page.get_by_label("Theme").select_option("dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for path in ("", "/docs"):
        page.goto(f"{server.url}{path}")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    page.evaluate("localStorage.setItem('minisgl.theme', 'light')")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


FORMULAS = r"""
The roots are $x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}$, for \(a \ne 0\), and:

$$
\sum_{i=1}^{n} i^2
= \frac{n(n+1)(2n+1)}{6}
- 3x
$$

\[ A = \begin{pmatrix} a & b \\ \alpha & \mathbb{R} \end{pmatrix},
\quad f'(x) = \lim_{h \to 0} \sqrt[3]{x} \]

- in an item: $\hat{y}_{i,j}^{(k)} \in \left[0, \infty\right)$ and $|x| \leq \text{some bound}$

It costs $5 and $6, or US$7 and $8.50; a fee of $5 is less than the $ that 6$ are. \$9 $

Unknown: $\nonsense{x}$ and \(\frac{1\) and $a^b^c$. `$x$`

Hostile: $\text{<img src=x onerror="window.hacked = 1">}$ $\href{javascript:1}{x}$ $<script>$
"""


def test_formulas_are_drawn_and_what_is_not_known_stays_as_it_was_written(
    page: Page, engine: PageEngine
) -> None:
    engine.answers, engine.run = [FORMULAS], 3
    ask(page, "Formulas, please")
    answered(page)
    text = page.locator(".body .text")
    assert text.locator("mfrac").count() == 2
    first = text.locator("math").first
    assert first.locator("mfrac msqrt msup").text_content() == "b2"
    assert first.text_content() == "x=−b±b2−4ac2a"
    display = text.locator("math[display=block]")
    expect(display).to_have_count(2)
    assert display.first.locator("munderover").text_content() == "∑i=1n"
    assert display.first.text_content() == "∑i=1ni2=n(n+1)(2n+1)6−3x"
    assert display.last.locator("mtd").all_text_contents() == ["a", "b", "α", "ℝ"]
    assert display.last.locator("mroot").text_content() == "x3"
    assert display.last.locator("munder").text_content() == "limh→0"
    expect(text.locator("li math")).to_have_count(2)
    assert text.locator("li msubsup").text_content() == "yˆi,j(k)"
    above, below = (display.locator(f"mfrac > :nth-child({n})").bounding_box() for n in (1, 2))
    assert above is not None
    assert below is not None
    assert above["y"] + above["height"] <= below["y"]  # it is drawn
    shown = text.inner_text()
    for kept in (
        "It costs $5 and $6, or US$7 and $8.50; a fee of $5 is less than the $ that 6$ are. $9 $",
        r"Unknown: $\nonsense{x}$ and \(\frac{1\) and $a^b^c$. $x$",
        r"$\href{javascript:1}{x}$",
    ):
        assert kept in shown
    assert page.evaluate("window.hacked") is None
    assert text.locator("a, img, script").count() == 0
    assert grave_faults(page, within=".body") == []


TABLE = r"""
| name | $|x|$ |
|---|---|
| $|a_1|$ | \(P(A|B)\) *c* |
| $5 | $6 |
a \| b | $$|d| + |e|$$
| f | g | h |
"""


def test_a_formula_with_strokes_stays_in_its_cell(page: Page, engine: PageEngine) -> None:
    engine.answers, engine.run = [TABLE], 3
    ask(page, "A table, please")
    answered(page)
    cells = page.locator(".body :is(th, td)")
    expect(cells.locator("math")).to_have_count(4)
    assert [text.replace("∣", "|") for text in cells.all_text_contents()] == [
        *("name", "|x|", "|a1|", "P(A|B) c", "$5", "$6", "a | b", "|d|+|e|", "f", "g"),
    ]


DRAWN = r"""
\[ \begin{aligned} f(x) &= (x+1)^2 \\ g &= x \end{aligned} \]

$$ a = b \tag{1} $$

$$ 17 \equiv 3 \pmod{7} $$

$$ \begin{array}{c|c} 1 & 2 \\ \hline 3 & 4 \end{array} $$

$$ \sum_{\substack{0<i \\ j<n}} x $$

$$ A \xrightarrow{\text{a long label}} B $$

$$ \frac{\cancel{x}y}{\cancel{x}} \cancelto{0}{z} $$

$$ a \not= b \not\in C, y' = \pmb{v} $$

```math
\sqrt{\pi}
```

- in a list

  ```math
  \label{of:it} E = m c^2
  ```

\begin{gather*}
a_1 \\
- *b*
\end{gather*}

\[ u \\ v \]

```math
\nonsense{x}
```

Cut: \(a_1 * b_1 \\ * c"""


def test_formulas_are_drawn_as_latex_draws_them(page: Page, engine: PageEngine) -> None:
    engine.answers, engine.run = [DRAWN], 5
    ask(page, "Formulas, please")
    answered(page)
    displays = page.locator("math[display=block]")
    expect(displays).to_have_count(12)
    aligned, tagged, pmod, array, below, arrow, cancelled, negated, *others = displays.all()

    def edges(found: Locator) -> list[tuple[float, float]]:
        boxes: list[dict[str, float]] = found.evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().toJSON())"
        )
        return [(box["left"], box["right"]) for box in boxes]

    left, right = (edges(aligned.locator(f"mtd:nth-child({n}) > *")) for n in (1, 2))
    assert left[0][1] == pytest.approx(left[1][1], abs=1)  # different widths, one edge
    assert left[0][0] < left[1][0] - 9
    assert right[0][0] == pytest.approx(right[1][0], abs=1)
    assert edges(tagged.locator(".tml-tag"))[0][1] == pytest.approx(edges(tagged)[0][1], abs=2)
    assert pmod.text_content() == "17≡3(mod7)"
    lines = "(all, side) => all.map(each => getComputedStyle(each)[`border${side}Style`])"
    for side, drawn in (("Right", "solid none solid none"), ("Bottom", "solid solid none none")):
        assert array.locator("mtd").evaluate_all(lines, side) == drawn.split()
    assert below.locator("munder mtd").all_text_contents() == ["0<i", "j<n"]
    expect(arrow.locator("mover > mo:has-text('→')")).to_have_attribute("stretchy", "true")
    assert arrow.locator("mover mtext").text_content() == "a\u00a0long\u00a0label"
    strokes = cancelled.locator(".tml-cancel")
    expect(strokes).to_have_count(3)
    for stroke in strokes.all():
        assert "polygon" in stroke.evaluate("each => getComputedStyle(each).clipPath")
    assert unicodedata.normalize("NFC", negated.text_content() or "") == "a≠b∉C,y′=𝒗"
    expect(others.pop().locator("mtr")).to_have_text(["u", "v"])
    fenced, item, bare = (other.text_content() for other in others)
    assert (fenced, item, bare) == ("π", "E=mc2", "a1−∗b∗")
    expect(page.locator(".body pre")).to_have_text("\\nonsense{x}\n")
    expect(page.locator(".body p").last).to_have_text("Cut: \\(a_1 * b_1 \\\\ * c")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_formulas_can_be_read_on_any_paper(
    scheme: str, chromium: Browser, server: Served[PageEngine], engine: PageEngine
) -> None:
    colours = ("black", "white", "yellow", "blue", "red", "lime", "gray")
    engine.answers = [" ".join(f"$\\color{{{colour}}} x$" for colour in colours)]
    with opened(chromium, server.url, color_scheme=scheme) as page:
        ask(page, "Colours, please")
        answered(page)
        contrasts = page.locator(".body mi").evaluate_all(
            """all => {
                const context = document.createElement("canvas").getContext("2d");
                const light = color => {
                    context.fillStyle = color;
                    context.fillRect(0, 0, 1, 1);
                    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data]
                        .map(each => ((each / 255 + 0.055) / 1.055) ** 2.4);
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
                };
                const paper = light(getComputedStyle(document.body).backgroundColor);
                return all.map(each => light(getComputedStyle(each).color) / paper)
                    .map(ratio => Math.max(ratio, 1 / ratio));
            }"""
        )
        assert len(contrasts) == len(colours)
        assert min(contrasts) > 3


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


NO_FORMULAS = [
    *(r"\mathrm{\\}", r"\text{a \\ b}", r"\boxed{\\}"),  # browsers break no line there
    *(r"a \above 999em b", r"\genfrac{}{}{999pt}{}{a}{b}", r"\hspace{999em} x"),
    *(r"\frac", "x_", "{", "}", r"\left(", r"\begin{pmatrix}", r"\end{x}", "&", r"\sqrt["),
    *("{" * 900, "x^" * 900, r"\sqrt{" * 500 + "x" + "}" * 500),
    *(r"\constructor", r"\begin{constructor}x\end{constructor}", "x" * 4001),
    r"\left(" * 300 + r"\right)" * 300,
    r"\def\a{\a\a}\a",
    r"x\\\gdef\a#1{#1#1}\a{\a{x}}",
    r"\newcommand{\a}{x}\a",
    r"\let\a\frac \a12",
    r"\begin{alignat}{999999999}x\end{alignat}",
    r"\begin{alignat*}{9\relax99999999}x\end{alignat*}",
    r"\begin{alignedat}9{99999999}x\end{alignedat}\frac",
    "\\begin{align%\nat}{999999999}x\\end{alignat}",
    r"\@firstoftwo\begin{matrix}{alignat}{999999999}x\end{alignat}",
    r"\begin{align\@firstofone{at}}{999999999}x\end{alignat}",
    r"\href{javascript:window.hacked=1}{x}",
    r"\url{javascript:window.hacked=1}",
    r"\includegraphics{http://x/y.png}",
    r"\class{solid}{x}",
    r"\id{send}{x}",
    r"\style{position:fixed}{x}",
    r"\data{act=deleteAll}{x}",
]


def test_hostile_formulas_are_no_formulas(page: Page) -> None:
    drawn = "sources => sources.filter(source => [true, false].some(how => formulaOf(source, how)))"
    assert page.evaluate(drawn, NO_FORMULAS) == []
    harmless = (r"\label{send} x", r"\ref{send}", r"x \eqref{send}", r"\text{<b onclick=a>}")
    for source in (*harmless, r"\tag{<script>} x"):
        html = page.evaluate("source => formulaOf(source, true).outerHTML", source)
        assert not re.search(r"<(b|script|a)\b|\bid=", html)
    for size in ("99em", "-99em", "9999em", "-9999em", "9999999px"):
        for formula in (
            rf"\rule{{{size}}}{{{size}}}",
            rf"\raisebox{{{size}}}{{x}}",
            rf"\kern{size}",
        ):
            height, width = page.evaluate(
                """source => {
                    const paragraph = make("p", {}, formulaOf(source, false));
                    $("log").replaceChildren(paragraph);
                    const { height } = paragraph.getBoundingClientRect();
                    return [height, $("scroller").scrollWidth - $("scroller").clientWidth];
                }""",
                formula,
            )
            assert (height <= 3300, width) == (True, 0)


def test_no_command_of_formulas_grows_with_its_nesting_or_breaks_the_policy(page: Page) -> None:
    """Each command that the source of Temml names, around itself, in any of its arguments."""
    names, large = page.evaluate(
        r"""() => {
            const source = [...document.scripts].map(script => script.textContent).join("");
            const found = [...source.matchAll(/"\\\\([A-Za-z@]+\*?)"/g)].map(([_, name]) => name);
            const names = [...new Set(found)], large = [];
            const inside = ["{@}", "{x}{@}", "{@}{x}", "[@]{x}", "{x}{x}{@}"];
            for (const [name, around] of names.flatMap(name => inside.map(form => [name, form]))) {
                let formula = "x";
                for (let depth = 0; depth < 10; depth++) {
                    formula = `\\${name}${around.replace("@", () => formula)}`;
                }
                const element = formulaOf(formula, true);
                if (!element) continue;
                document.body.append(element);
                if (element.querySelectorAll("*").length > 400) large.push(formula);
                element.remove();
            }
            return [names, large];
        }"""
    )
    assert len(names) > 1000
    assert {"frac", "cancelto", "llap", "pmb", "sideset"} <= {*names}
    assert large == []


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
    page.get_by_label("Thinking", exact=True).select_option("off")
    page.keyboard.press("Escape")
    ask(page, "Do not think!")
    answered(page, 2)
    assert engine.template_options["enable_thinking"] is False


def test_an_answer_held_to_a_schema_is_shown_as_json(page: Page, engine: PageEngine) -> None:
    engine.answers = ['{"city":"Köln","size":12345678901234567890}']
    page.get_by_title("Settings").click()
    schema = page.get_by_label("Answer in JSON of this schema")
    schema.fill('{"type": "object"')
    expect(page.locator("#schema-hint")).to_contain_text("no JSON")
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


def test_each_conversation_has_the_adapter_that_was_chosen_for_it(chromium: Browser) -> None:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=3, adapters=("sql", "poems"))

    with served(start) as server, opened(chromium, server.url) as page:
        chooser = page.get_by_label("Model", exact=True)
        expect(chooser).to_have_text("fakesqlpoems")
        chooser.select_option("sql")
        ask(page, "First")
        answered(page)
        page.get_by_role("button", name="New conversation").click()
        chooser.select_option("fake")
        ask(page, "Second")
        answered(page)
        page.get_by_role("link", name="First").click()
        expect(chooser).to_have_value("sql")
        ask(page, "More")
        answered(page, 2)
        assert [each.adapters for each in server.engine.submitted] == [["sql"], [], ["sql"]]


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


def test_what_a_notice_offers_can_be_read_on_a_phone(
    chromium: Browser, server: Served[PageEngine], engine: PageEngine
) -> None:
    with opened(chromium, server.url, viewport={"width": 390, "height": 800}) as page:
        page.route("**/v1/chat/completions", lambda route: route.abort())
        store(page, chat_of(1, messages=[{"role": "user", "content": "Unheard"}]))
        store(page, chat_of(1, id="cut", messages=[*QUESTION, {**PART, "ended": "length"}]))
        store(page, chat_of(1, id="wrong", messages=[*QUESTION, {**NOTHING, "error": "x " * 300}]))
        for name, button in (("long", "Try again"), ("cut", "Continue"), ("wrong", "Try again")):
            page.goto(f"{server.url}/#/chat/{name}")
            page.reload()
            found = page.locator(".notice").get_by_role("button", name=button)
            lines = found.evaluate(
                "each => { const range = new Range(); range.selectNodeContents(each);"
                " return range.getClientRects().length; }"
            )
            assert lines == 1
            assert found.evaluate("each => each.getBoundingClientRect().right") < 390


def test_the_second_view_draws_the_metrics_while_they_change(
    page: Page, engine: PageEngine
) -> None:
    ask(page, "hello")
    answered(page)
    engine.num_running, engine.drafts = 1, DraftCounters()
    page.clock.install()
    page.clock.pause_at(time.time() + 60)  # so that the first sample is the only one
    page.get_by_role("link", name="Server at work").click()
    expect(page.get_by_text("fake on minisgl")).to_be_visible()
    requests = page.locator(".card").filter(has_text="Requests").first
    expect(requests.locator("dd").first).to_have_text("1")
    kv = page.locator(".card").filter(has_text="KV cache")
    expect(kv.locator("dd").first).to_have_text("76 %")
    snapshots = kv.locator("dl > div").nth(1)
    expect(snapshots).to_be_hidden()
    guesses = page.locator(".card").filter(has_text="Guessed tokens")
    expect(guesses).to_be_hidden()
    path = requests.locator("path.line0")
    expect(path).to_have_attribute("d", "M150 0.00")
    engine.num_running, engine.snapshots = 0, SnapshotStats(4, 1)
    engine.drafts = DraftCounters(num_rows=9, num_drafted=8, num_accepted=6)
    page.clock.resume()
    expect(path).to_have_attribute("d", re.compile(r"^M\d+.* 0\.00L150 100\.00$"))
    expect(requests.locator("dd").first).to_have_text("0")
    expect(snapshots).to_have_text("of the snapshots of states25 %")
    expect(guesses.locator("dl > div")).to_have_text("of the guesses75 %")
    page.go_back()
    expect(page.locator(".body .text")).to_have_text("Hello!")


def test_the_second_view_sums_over_replicas(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    def two(route: Route) -> None:
        pages.append(urlopen(f"{server.url}/metrics").read())
        body = join_pages(({"0": pages[0], "1": pages[-1]}, "replica"))
        route.fulfill(content_type="text/plain", body=body)

    pages: list[bytes] = []
    page.route("**/metrics", two)
    engine.num_running = 3
    page.get_by_role("link", name="Server at work").click()
    expect(page.get_by_text("fake on minisgl")).to_be_visible()
    requests = page.locator(".card").filter(has_text="Requests").first
    expect(requests.locator("dd").first).to_have_text("6")
    kv = page.locator(".card").filter(has_text="KV cache")
    expect(kv.locator("dd").first).to_have_text("76 %")
    asked = page.request.post(
        f"{server.url}/v1/completions", data={"prompt": "hello", "max_tokens": 1}
    )
    assert asked.ok
    first = page.locator(".card").filter(has_text="first token")
    expect(first.locator("dd").first).to_have_text(re.compile("ms$"))
    page.unroute_all(behavior="ignoreErrors")  # of a poll that is under way at the end
    engine.num_running = 0


def history_of(minutes: int, **replicas: Callable[[int], dict[str, float]]) -> dict[str, Any]:
    """/metrics/history of so many minutes until now; of each replica the values at each sample."""
    now = int(time.time() // SECONDS)
    slots = list(range(now - 60 * minutes // SECONDS, now))
    series = {
        name: {
            f"minisgl_{figure}": [values(index)[figure] for index in range(len(slots))]
            for figure in values(0)
        }
        for name, values in replicas.items()
    }
    of = {name: {"slots": slots, "series": series[name]} for name in series}
    return {"seconds": SECONDS, "replicas": of}


def test_the_second_view_has_the_last_hour_and_each_replica_and_says_values_under_the_pointer(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    def figures(number: int) -> Callable[[int], dict[str, float]]:
        return lambda index: {
            "running_requests": 400.0 if index == 100 else number,  # one peak
            "queued_requests": 0.0,
            "token_usage_ratio": 0.5,
            "generated_tokens_total": 150.0 * number * index,
        }

    def two(route: Route) -> None:
        page_of = urlopen(f"{server.url}/metrics").read()
        roles = "".join(
            f'minisgl_router_replica_role{{router="0",replica="{each}",role="{role}"}} 1.0\n'
            for each, role in (("0", "prefill"), ("1", "decode"))
        )
        joined = join_pages(({"0": page_of, "1": page_of}, "replica"))
        route.fulfill(content_type="text/plain", body=joined + roles.encode())

    history = history_of(60, **{"0": figures(2), "1": figures(3)})
    page.route("**/metrics", two)
    page.route("**/metrics/history", lambda route: route.fulfill(json=history))
    page.get_by_role("link", name="Server at work").click()
    requests = page.locator(".card").filter(has_text="Requests now")
    line, axis = requests.locator("path.line0"), requests.locator(".axis")
    expect(axis).to_have_text("last 1 hourup to 10; a peak of 800 is cut")
    assert str(line.get_attribute("d")).count("L") >= 230
    expect(
        page.locator(".card").filter(has_text="Tokens per second mean over 15 s")
    ).to_be_visible()

    plot = requests.locator(".plot")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    told = requests.locator(".told")
    expect(told).to_have_text(re.compile(r"^\d\d:\d\d:\d\d · running 5 · waiting 0$"))
    page.mouse.move(0, 0)
    expect(told).to_have_text("")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(told).to_contain_text("running")

    table = page.locator("#replicas")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table.locator("tbody tr").nth(1)).to_contain_text("prefill")
    table.get_by_role("button", name="Replica 1").click()
    expect(axis).to_contain_text("up to 5; a peak of 400 is cut")
    tokens = page.locator(".card").filter(has_text="Tokens per second")
    box = tokens.locator(".plot").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    expect(tokens.locator(".told")).to_contain_text("generated 30 ·")  # 450 in 15 s
    page.get_by_label("Shown").select_option("5 minutes")
    expect(axis).to_have_text(re.compile("^last 5 minutesup to 5$"))
    assert grave_faults(page, within="#server") == []
    page.unroute_all(behavior="ignoreErrors")


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
        return join_pages((pages, "replica"))

    samples = [
        metrics(a=1000, b=500),
        metrics(a=1100, b=500),
        metrics(b=510),  # the other one is being started again
        metrics(a=4, b=510),
        metrics(a=24, b=510),
    ]
    read: Any = page.evaluate(
        "texts => texts.map((text, time) => readSample(seriesOf(text), time).of[''])",
        [sample.decode() for sample in samples],
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
    for _ in range(17):
        page.keyboard.press("Tab")
        names.append(page.evaluate(focused))
    order = [
        *("new", "all", "search", "one", "Menu of one", "to-server", "API reference", "theme"),
        *("title", "model", "open-settings", "more", "scroller", "Copy", "Edit", "Copy"),
        *("Answer again", "prompt"),
    ]
    assert names == order
    page.get_by_title("Settings").click()
    page.keyboard.press("Escape")
    expect(page.get_by_title("Settings")).to_be_focused()


def test_the_reference_explains_fields_and_tries_endpoints_out(
    page: Page, server: Served[PageEngine], engine: PageEngine
) -> None:
    page.goto(f"{server.url}/docs")
    chat = page.locator("[id='post/v1/chat/completions']")
    temperature = chat.locator("dt", has_text=re.compile("^temperature$")).locator("+ dd")
    expect(temperature).to_contain_text("at least 0, at most 2")
    expect(temperature).to_contain_text("0 takes the likeliest token; more makes others likelier.")
    expect(temperature).to_contain_text("Default: that of the checkpoint, or 1.")
    expect(temperature).to_contain_text('Example: "temperature": 0.7')
    fields = chat.locator("> dl > dd")
    expect(fields.locator("> p:first-of-type")).to_have_count(fields.count())  # each has words

    chat.get_by_text("Try it").click()
    body = chat.get_by_label("Body of POST /v1/chat/completions")
    asked = json.loads(body.input_value())
    body.fill(json.dumps({**asked, "messages": [{"role": "user", "content": "It's me"}]}))
    expect(chat.get_by_label("The same with curl")).to_contain_text(f"{server.url}/v1/chat")
    expect(chat.get_by_label("The same with curl")).to_contain_text("It'\\''s me")
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("status")).to_contain_text("Status 200")
    expect(chat.get_by_label("Answer", exact=True)).to_contain_text('"content": "Hello!"')
    body.fill("{")
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("status")).to_contain_text("Status 400")
    model = page.locator("[id='get/v1/models/{name}']")
    model.get_by_text("Try it").click()
    model.get_by_label("name", exact=True).fill("fake")
    engine.hold_after = 1
    model.get_by_role("button", name="Send").click()
    expect(model.get_by_label("Answer", exact=True)).to_contain_text('"max_model_len": 100000')
    stored = page.locator("[id='get/v1/responses/{id}']")
    stored.get_by_text("Try it").click()
    stored.get_by_label("id", exact=True).fill("resp_1")
    expect(stored.get_by_label("The same with curl")).to_have_text(
        f"curl '{server.url}/v1/responses/resp_1'"
    )
    stored.get_by_label("starting_after", exact=True).fill("3")
    stored.get_by_role("button", name="Send").click()
    expect(stored.get_by_label("Answer", exact=True)).to_contain_text("starting_after: is only")
    body.fill(json.dumps({**asked, "stream": True}))
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_label("Answer", exact=True)).to_contain_text("data: {")
    chat.get_by_role("button", name="Stop").click()
    expect(chat.get_by_role("status")).to_contain_text("Stopped")
    server.on_loop(engine.let_go)
    chat.locator("> dl").evaluate("list => list.remove()")  # many of the same kind
    assert grave_faults(page, within="[id='post/v1/chat/completions']") == []


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
        expect(page.get_by_role("heading", name="GET/metrics", exact=True)).to_be_visible()
        expect(page.get_by_label("Key")).to_be_hidden()  # this server asks for none
        assert page.get_by_text("at least 1 item,").count()
        assert not page.get_by_text("at least 1 items").count()
        page.locator("summary").last.click()
        many = "section:not(:nth-last-of-type(-n+8))"  # of the same kind
        page.locator(many).evaluate_all("found => found.forEach(section => section.remove())")
        assert grave_faults(page) == []
