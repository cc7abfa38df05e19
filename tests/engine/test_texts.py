"""Admission to the engine: short texts overtake long ones, and every queue is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from support.endless_template_server import ASKED
from support.engine_loop import ScriptedRunner, deltas_of, engine_on, params
from support.fake_engine import FakeEngine
from support.folders import SUPPORT
from support.gated_runner import Gated, gated_server
from support.http_server import HELLO, error_of, http_client, session, wait_for_health
from support.toy_tokenizers import byte_level_backend, wrap
from support.waiting import LIMIT_S, until

from minisgl.engine import AsyncEngine
from minisgl.engine.texts import ALWAYS_TAKEN_CHARS, NUM_SLOW, PLACE_BYTES, SHORT_BYTES, Texts
from minisgl.errors import (
    EngineStoppedError,
    HostMemoryError,
    QueueFullError,
    StepError,
    TextTooLongError,
)
from minisgl.request import FinishReason
from minisgl.text.rendering import EndlessTemplateError, Renderer, render
from minisgl.text.template_facts import TemplateFacts
from minisgl.text.tokenizer import MAX_SHORT_CHARS, Tokenizer

CHAT = "/v1/chat/completions"
ENDLESS_SERVER = SUPPORT / "endless_template_server.py"
LONG = "x" * (SHORT_BYTES + 1)
MIDDLING = "x" * (MAX_SHORT_CHARS + 1)


class FakeRenderer(Renderer):
    """Renders at once, in this process; what says "stuck" is slow, and then lasts until closed."""

    def start(self) -> None:
        pass

    def render(self, call: bytes) -> str:
        arguments = json.loads(call)
        if arguments["conversations"][0][0]["content"] == "stuck":
            if self.processor_seconds:
                raise EndlessTemplateError(self.processor_seconds)
            self._closed.wait(LIMIT_S)
        return render(arguments)


class GatedTokenizer(Tokenizer):
    """Long texts take until the gate is open. A token is a character."""

    def __init__(self) -> None:
        super().__init__(wrap(byte_level_backend(), "{{ messages[0].content }}"))
        self.gate = threading.Event()
        self.begun: list[int] = []  # lengths of the long texts
        self.error: Exception | None = None

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) > SHORT_BYTES:
            self.begun.append(len(text))
            assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return [1] * len(text)


@pytest.fixture
def tokenizer() -> Iterator[GatedTokenizer]:
    made = GatedTokenizer()
    yield made
    made.gate.set()


@contextlib.asynccontextmanager
async def texts_of(
    tokenizer: Tokenizer,
    *,
    num_places: int = 1000,
    max_seq_len: int = 1 << 20,
    make_renderer: Callable[..., Renderer] = FakeRenderer,
) -> AsyncIterator[Texts]:
    texts = Texts(
        tokenizer, max_seq_len=max_seq_len, num_places=num_places, make_renderer=make_renderer
    )
    yield texts
    texts.close(EngineStoppedError("closed"))
    await asyncio.to_thread(texts.join)


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- who waits for whom ---------------------------------------------------------------------------


async def test_short_texts_and_chats_are_tokenized_before_long_ones(
    tokenizer: GatedTokenizer,
) -> None:
    async with texts_of(tokenizer) as texts:
        long = [asyncio.ensure_future(texts.encode(LONG)) for _ in range(24)]
        long += [asyncio.ensure_future(texts.chat(say(LONG), False, {})) for _ in range(24)]
        await until(lambda: tokenizer.begun)
        assert len(await texts.chat(say("Hello"), False, {})) == len("Hello")
        assert len(await texts.encode(MIDDLING)) == len(MIDDLING)
        assert len(await texts.encode("Hello")) == len("Hello")
        assert len(tokenizer.begun) == 1  # so that one alone takes its memory
        assert not any(future.done() for future in long)
        tokenizer.gate.set()
        assert {len(ids) for ids in await asyncio.gather(*long)} == {len(LONG)}


async def test_shorter_long_texts_go_first_without_starving_longer_ones(
    tokenizer: GatedTokenizer,
) -> None:
    async with texts_of(tokenizer, num_places=10_000) as texts:
        first = asyncio.ensure_future(texts.encode(LONG))
        await until(lambda: tokenizer.begun)
        sizes = [1 << 20, 1 << 17, 1 << 15]
        waiting = [asyncio.ensure_future(texts.encode("x" * size)) for size in sizes]
        waiting.append(asyncio.ensure_future(texts.encode("y" * sizes[1])))
        await asyncio.sleep(0)
        # What came long ago is not passed any more.
        line = texts._long_texts
        next(task for task in line._waiting if task.number == 2).priority -= 3600
        line._waiting.sort()
        tokenizer.gate.set()
        await asyncio.gather(first, *waiting)
        assert tokenizer.begun == [len(LONG), sizes[0], sizes[2], sizes[1], sizes[1]]


async def test_other_chats_proceed_while_endless_templates_render(
    tokenizer: GatedTokenizer,
) -> None:
    async with texts_of(tokenizer) as texts:
        num = 3 * NUM_SLOW
        stuck = [asyncio.ensure_future(texts.chat(say("stuck"), False, {})) for _ in range(num)]
        await asyncio.sleep(0)
        for text in ("Hello", LONG[:SHORT_BYTES], "Hello"):
            assert len(await texts.chat(say(text), False, {})) == len(text)
        assert not any(future.done() for future in stuck)
        assert len(texts._short._idle) == 1
        assert len(texts._slow_renderings._busy) == NUM_SLOW
        texts.close(EngineStoppedError("closed"))
        for future in stuck:
            with pytest.raises(EngineStoppedError):
                await future


class SometimesEndless(GatedTokenizer):
    """With a template that does not end for what says "endless"."""

    def __init__(self) -> None:
        super().__init__()
        loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        endless = "{% if messages[0].content == 'endless' %}" + loop + "{% endif %}"
        self._tokenizer.chat_template = endless + "{{ messages[0].content }}"


async def test_chats_pass_six_whose_template_does_not_end() -> None:
    tokenizer = SometimesEndless()
    async with texts_of(tokenizer, make_renderer=partial(Renderer, 3600)) as texts:
        endless = [asyncio.ensure_future(texts.chat(say("endless"), False, {})) for _ in range(6)]
        await asyncio.sleep(0)
        for text in ("Hello", "Good morning"):
            assert len(await texts.chat(say(text), False, {})) == len(text)
        assert not any(future.done() for future in endless)
        texts.close(EngineStoppedError("closed"))
        for future in endless:
            with pytest.raises(EngineStoppedError):
                await future


async def test_endless_templates_for_which_nobody_waits_are_ended() -> None:
    tokenizer = SometimesEndless()
    async with texts_of(tokenizer, make_renderer=partial(Renderer, 3600)) as texts:
        line = texts._slow_renderings
        endless = [asyncio.ensure_future(texts.chat(say("endless"), False, {})) for _ in range(6)]
        await until(lambda: len(line._busy) == NUM_SLOW)
        for future in endless:
            future.cancel()
        await until(lambda: not line._busy and not line._waiting)
        assert texts._num_taken == 0
        assert len(await texts.chat(say("Hello"), False, {})) == len("Hello")


async def test_the_processes_of_clients_that_left_serve_others() -> None:
    """To start a process takes a second, and many where others keep the processors busy."""
    made: list[Renderer] = []

    def make_renderer(**options: Any) -> Renderer:
        made.append(Renderer(3600, **options))
        return made[-1]

    async with texts_of(SometimesEndless(), make_renderer=make_renderer) as texts:
        line = texts._slow_renderings
        for _ in range(2):
            leaving = [
                asyncio.ensure_future(texts.chat(say("endless"), False, {}))
                for _ in range(NUM_SLOW)
            ]
            await until(lambda: len(line._busy) == NUM_SLOW)
            for future in leaving:
                future.cancel()
            await until(lambda: len(line._idle) == NUM_SLOW)
        assert len(made) == 1 + NUM_SLOW  # with that of short texts


async def test_the_template_of_a_client_that_leaves_is_ended() -> None:
    async with gated_server() as gated, client_of(gated) as client:
        tokenizer, texts = gated.engine.tokenizer, gated.engine._intake.texts
        assert tokenizer is not None
        tokenizer._tokenizer.chat_template = SometimesEndless()._tokenizer.chat_template
        line = texts._slow_renderings
        line._make_worker = partial(Renderer, 3600)
        for path in (CHAT, "/tokenize"):
            asked = asyncio.ensure_future(client.post(path, json={"messages": say("endless")}))
            await until(lambda: line._busy)
            asked.cancel()
            await until(lambda: not line._busy and not texts._num_taken)


async def test_what_is_slow_to_render_gets_its_time(tokenizer: GatedTokenizer) -> None:
    class SlowRenderer(FakeRenderer):
        def render(self, call: bytes) -> str:
            if self.processor_seconds:
                raise EndlessTemplateError(self.processor_seconds)
            return super().render(call)

    async with texts_of(tokenizer, make_renderer=SlowRenderer) as texts:
        tokenizer.gate.set()
        for text in ("Hello", LONG):
            assert len(await texts.chat(say(text), False, {})) == len(text)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    every = Tokenizer(wrap(byte_level_backend(), template), "toy")
    async with texts_of(every, make_renderer=SlowRenderer) as texts:
        found = await texts.template_facts()
        assert found == TemplateFacts(takes_systems=True, system_anywhere=True)


# -- how much may wait ----------------------------------------------------------------------------


async def test_the_amount_of_waiting_text_is_limited(tokenizer: GatedTokenizer) -> None:
    async with texts_of(tokenizer, num_places=8) as texts:
        big = "x" * (20 * PLACE_BYTES)  # alone it may come, whatever the limit
        first = asyncio.ensure_future(texts.encode(big))
        await until(lambda: tokenizer.begun)
        with pytest.raises(QueueFullError, match="try again later"):
            await texts.encode(LONG)
        with pytest.raises(QueueFullError):
            await texts.chat(say("Hello"), False, {})
        assert await texts.encode("Hello")  # at once, so it waits nowhere
        tokenizer.gate.set()
        await first
        many = [asyncio.ensure_future(texts.encode(MIDDLING)) for _ in range(9)]
        results = await asyncio.gather(*many, return_exceptions=True)
        assert [type(result) for result in results] == [list] * 8 + [QueueFullError]
        assert await texts.encode(LONG)


async def test_conversations_that_wait_for_images_leave_the_places_to_texts(
    tokenizer: GatedTokenizer,
) -> None:
    seen = asyncio.Event()

    async def change(text: str) -> str:
        await seen.wait()
        return text

    async with texts_of(tokenizer, num_places=4) as texts:
        waiting = [asyncio.ensure_future(texts.chat(say("a"), False, {}, change)) for _ in range(4)]
        await until(lambda: texts._changing.num_taken == 4)
        assert len(await texts.chat(say("Hello"), False, {})) == len("Hello")
        with pytest.raises(QueueFullError, match="with images"):
            await texts.chat(say("a"), False, {}, change)
        settled = asyncio.ensure_future(texts.settle())
        assert not any(task.done() for task in waiting)
        seen.set()
        assert await asyncio.gather(*waiting) == [[1]] * 4
        await settled
        assert texts._num_taken == texts._changing.num_taken == texts._num_inside == 0


async def test_a_full_tokenization_queue_is_a_429_with_retry_after() -> None:
    async with gated_server(max_running_requests=1, max_queued_requests=1) as gated:
        gate = threading.Event()
        encode = gated.engine.tokenizer._encode_long  # type: ignore[union-attr]

        def slow(text: str, add_special_tokens: bool) -> list[int]:
            assert gate.wait(LIMIT_S)
            return encode(text, add_special_tokens)

        gated.engine.tokenizer._encode_long = slow  # type: ignore[union-attr, method-assign]
        async with client_of(gated) as client:
            body = {"prompt": "x" * 20_000, "max_tokens": 1}
            asked = [
                asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in "abc"
            ]
            done, others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            gate.set()
            answer = done.pop().result()
            assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"
            for other in await asyncio.gather(*others):
                assert other.status_code == 400  # it has too many tokens


def client_of(gated: Gated) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}")


# -- what cannot fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("any_length", [False, True])
async def test_a_length_that_cannot_fit_is_refused_before_encoding(
    tokenizer: GatedTokenizer, any_length: bool
) -> None:
    async with texts_of(tokenizer, max_seq_len=5000) as texts:
        too_long = "x" * (ALWAYS_TAKEN_CHARS + 1)
        with pytest.raises(TextTooLongError, match="at most 1048576 are taken") as caught:
            await texts.encode(too_long, any_length=any_length)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(TextTooLongError) as caught:
            await texts.chat(say(too_long), any_length, {})
        assert caught.value.param == "messages"
        assert not tokenizer.begun
        tokenizer.gate.set()
        assert len(await texts.encode(too_long[:-1], any_length=any_length)) == ALWAYS_TAKEN_CHARS


async def test_a_text_of_15_mib_is_refused_without_being_tokenized() -> None:
    async with gated_server() as gated, client_of(gated) as client:
        tokenizer = gated.engine.tokenizer
        assert tokenizer is not None

        def never(*_: object, **__: object) -> list[int]:
            raise AssertionError("it was encoded")

        tokenizer._encode_long = never  # type: ignore[method-assign]
        digits = "0123456789" * (3 << 19)
        context = gated.engine.capacity.max_seq_len
        for path, fields, param in (
            ("/v1/completions", {"prompt": digits}, "prompt"),
            (CHAT, {"messages": say(digits)}, "messages"),
        ):
            error = error_of(await client.post(path, json=fields))
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert f"sequences of {context} tokens" in error["message"]
        error = error_of(await client.post("/tokenize", json={"prompt": digits}))
        assert error["code"] == "context_length_exceeded"


# -- the end --------------------------------------------------------------------------------------


async def test_draining_waits_for_texts_that_are_being_tokenized() -> None:
    async with gated_server() as gated, client_of(gated) as client:
        gate, encode = threading.Event(), gated.engine.tokenizer.encode  # type: ignore[union-attr]

        def slow(text: str, **options: Any) -> list[int]:
            if len(text) > MAX_SHORT_CHARS:
                assert gate.wait(LIMIT_S)
            return encode(text, **options)

        gated.engine.tokenizer.encode = slow  # type: ignore[union-attr, method-assign]
        body = {"prompt": "The quick brown fox. " * 220, "max_tokens": 3, "ignore_eos": True}
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: gated.engine._intake.texts._num_taken)
        draining = asyncio.ensure_future(gated.engine.drain(60))
        await asyncio.sleep(0.05)
        assert not draining.done()
        gate.set()
        answer = await asked
        await draining
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert (await client.post("/v1/completions", json=body)).status_code == 503


def test_an_endless_template_blocks_neither_signals_nor_requests(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    options = json.dumps({"port": port, "drain_timeout": 0.5})
    with session(str(ENDLESS_SERVER), options) as process:
        wait_for_health(process, url, 200)
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{url}{CHAT}", json={"messages": HELLO}))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        assert process.stderr is not None
        log = ""
        while log.count(ASKED) < len(asking):  # one of them runs; nothing depends on how far it is
            log += process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join()
        log += process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 0
    assert [answer.status_code for answer in answers] == [503, 503]
    assert {error_of(answer)["type"] for answer in answers} == {"service_unavailable"}
    assert "Traceback" not in log


# -- memory that runs out -------------------------------------------------------------------------


async def test_running_out_of_memory_at_submission_is_a_503_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(answer_length=3)

    async def short(*_: object, **__: object) -> list[int]:
        raise MemoryError

    async with http_client(engine) as client:
        body = {"messages": HELLO}
        with monkeypatch.context() as patched:
            patched.setattr(engine, "encode_chat", short)
            answer = await client.post(CHAT, json=body)
        assert answer.status_code == 503
        error = error_of(answer)
        assert (error["type"], error["code"]) == ("service_unavailable", "out_of_memory")
        assert "short of memory" in error["message"]
        assert (await client.post(CHAT, json=body)).status_code == 200


async def test_running_out_of_memory_while_encoding_fails_that_request_alone(
    tokenizer: GatedTokenizer,
) -> None:
    tokenizer.error = MemoryError()
    async with texts_of(tokenizer) as texts:
        for _ in range(5):
            with pytest.raises(MemoryError):
                await texts.encode(MIDDLING)
        tokenizer.error = None
        assert await texts.encode(MIDDLING)


async def test_running_out_of_memory_while_detokenizing_fails_that_request_alone() -> None:
    async with engine_on(ScriptedRunner(4), tokenizer=True) as engine:
        streams = [engine.submit([n, 1], params(ignore_eos=True)) for n in range(3)]
        last = engine.submit([5, 1], params(1, ignore_eos=True))  # its token ends it
        for stream in (streams[1], last):
            stream.detokenizer = Short()  # type: ignore[assignment]
        for stream in (streams[1], last):
            with pytest.raises(HostMemoryError):
                await deltas_of(stream)
        for stream in (streams[0], streams[2]):
            assert sum(len(delta.token_ids) for delta in await deltas_of(stream)) == 20
        assert engine.failure is None
        assert engine.stats().num_used_pages == 0


async def test_a_stop_string_in_what_was_held_back_to_the_end_is_the_reason_of_the_end() -> None:
    async with engine_on(ScriptedRunner(4), tokenizer=True) as engine:
        stream = engine.submit([5, 1], params(2, ignore_eos=True))
        stream.detokenizer = HoldsBack()  # type: ignore[assignment]
        last = (await deltas_of(stream))[-1]
        assert last.finish_reason == FinishReason.STOP and last.stop_reason == "###"
        assert last.num_output_tokens == 2


class HoldsBack:
    """A detokenizer that finds a stop string at the end alone, as of one that began a tool call."""

    stopped: str | None = None

    def push(self, token_id: int) -> str:
        return ""

    def flush(self, *, natural: bool) -> str:
        self.stopped = "###"
        return "text"


class Short:
    """A detokenizer that has no memory."""

    stopped = None

    def push(self, token_id: int) -> str:
        raise MemoryError

    flush = push


async def test_running_out_of_memory_in_a_step_fails_its_requests_and_the_engine_continues() -> (
    None
):
    runner = ScriptedRunner(4)
    runner.collect_errors[2] = MemoryError()
    async with engine_on(runner) as engine:
        with pytest.raises(HostMemoryError):
            await deltas_of(engine.submit([1], params(ignore_eos=True)))
        assert not issubclass(HostMemoryError, StepError)
        assert engine.failure is None
        assert await deltas_of(engine.submit([1], params(3, ignore_eos=True)))


async def test_running_out_of_memory_in_the_engine_loop_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_on(ScriptedRunner(4)) as engine:
        stream = engine.submit([1], params(ignore_eos=True))

        def short() -> None:
            raise MemoryError

        monkeypatch.setattr(engine._scheduler, "plan", short)
        with pytest.raises(EngineStoppedError, match="host ran out of memory"):
            await deltas_of(stream)
        assert isinstance(engine, AsyncEngine) and engine.failure is not None
