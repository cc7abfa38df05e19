"""Rendering of chat templates ends, whatever the template does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minisgl.errors import EngineStoppedError, InvalidRequestError
from minisgl.subprocesses import send
from minisgl.text.rendering import (
    EndlessTemplateError,
    Renderer,
    encode_call,
    render,
)

pytestmark = pytest.mark.usefixtures("started_workers")

HELLO = [{"role": "user", "content": "Hello, ünïcödé 👍🏽!"}]


def call_of(template: str, **options: Any) -> dict[str, Any]:
    return {"conversations": [HELLO], "chat_template": template, **options}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    assert renderer.wait() == 0  # once its pipes are closed, as they are when we die


def rendered(renderer: Renderer, template: str, **options: Any) -> str:
    return renderer.render(encode_call(call_of(template, **options)))


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return city


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", {}),
        ("{{ tools | tojson }}{{ n }}", {"tools": [weather], "n": np.int64(3)}),
        ("{{ documents[0].text }}", {"documents": [{"text": "a", "other": object()}]}),
        ("{{ 'x' if add_generation_prompt else 'y' }}", {"add_generation_prompt": True}),
    ],
)
def test_a_rendered_chat_equals_that_of_transformers(
    renderer: Renderer, template: str, options: dict[str, Any]
) -> None:
    assert rendered(renderer, template, **options) == render(call_of(template, **options))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "renderer", [Renderer(0.5), Renderer(3600, processor_seconds=0.5, niceness=1)]
)
def test_a_template_that_does_not_end_is_ended_and_the_next_one_rendered_at_once(
    renderer: Renderer,
) -> None:
    renderer.start()
    process = renderer._process
    for template in (
        ENDLESS,
        "{{ 1 | round(1000000000, 'floor') }}",  # a product, of which no thread can be rid
    ):
        with pytest.raises(EndlessTemplateError, match=r"did not end within 0\.5 s") as caught:
            rendered(renderer, template)
        assert caught.value.param == "messages"
        assert rendered(renderer, "{{ 1 + 1 }}") == "2"
    assert renderer._process is process  # what took time to load is still loaded
    assert renderer.wait() == 0


def test_an_interrupted_rendering_ends_at_once_and_each_call_keeps_its_own_answer() -> None:
    renderer = Renderer(3600)
    renderer.interrupt()  # nothing has begun
    assert rendered(renderer, "{{ 1 + 1 }}") == "2"
    process = renderer._process
    for number in range(20):
        renderer.interrupt()  # between two renderings it ends neither
        assert rendered(renderer, "{{ n }}", n=number) == f"{number}"
    for _ in range(2):
        ended = threading.Event()

        def interrupt(ended: threading.Event = ended) -> None:
            while not ended.wait(0.01):
                renderer.interrupt()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(EndlessTemplateError):
            rendered(renderer, ENDLESS)
        ended.set()
        interrupting.join()
        assert rendered(renderer, "{{ 1 + 1 }}") == "2"
    assert renderer._process is process
    assert renderer.wait() == 0


def test_closing_ends_a_template_that_does_not_end() -> None:
    renderer = Renderer(600)
    assert rendered(renderer, "{{ 1 + 1 }}") == "2"
    process = renderer._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    send(process.stdin, encode_call(call_of(ENDLESS)))
    renderer.close()
    assert process.stdout.read() == b""  # it comes when nobody has the pipe open any more
    assert renderer.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 100000000000 }}", "takes more than 1024 MiB of memory"),
        ("{{ (range(99999) | list * 99999) | length }}", "takes more than 1024 MiB of memory"),
        ("{{ 'a' * n }}", "makes more than 64 MiB"),
        ("{{ raise_exception('no, ' + 'x' * 9000) }}", r"no, x{996}$"),
        ("{{ raise_exception('\\ud800') }}", r"\?$"),
        ("{% for %}", r"syntax error in line 1: .*xpected"),
    ],
)
def test_a_template_that_exceeds_limits_or_raises_is_a_request_error(
    renderer: Renderer, template: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        rendered(renderer, template, n=70_000_000)
    assert rendered(renderer, "{{ 1 + 1 }}") == "2"


def test_messages_that_are_not_valid_text_are_refused_before_rendering() -> None:
    with pytest.raises(InvalidRequestError, match="handed to the chat template"):
        encode_call(call_of("", odd="\ud800"))


def test_a_killed_rendering_process_is_replaced_and_a_closed_one_is_not() -> None:
    renderer = Renderer()
    renderer.start()
    assert renderer._process is not None
    renderer._process.kill()
    renderer._process.wait()
    assert rendered(renderer, "{{ 1 + 1 }}") == "2"
    renderer.close()
    with pytest.raises(EngineStoppedError):
        rendered(renderer, "")
    assert renderer.wait() == -signal.SIGKILL
