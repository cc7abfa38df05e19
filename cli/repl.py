"""The loop of `minisgl chat`: read a line, answer it, until the person leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import metadata

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ContextLengthError, MinisglError, UnsupportedModelError
from minisgl.models.hub import DEMO_NOTE
from minisgl.request import FinishReason

from .answer import Answer
from .conversation import ChatTokenizer, Conversation
from .terminal import Face

COMMANDS = {
    "/help": "lists the commands",
    "/reset": "forgets the conversation and starts a new one",
    "/exit": "leaves, as Ctrl-D does",
}
INTERRUPTED = 130  # the exit code that a shell expects after Ctrl-C
START_ANEW = "/reset starts a new conversation."


async def talk(config: EngineConfig, face: Face) -> int:
    """Loads the engine, runs the loop, closes the engine. Raises MinisglError if it cannot load.

    Returns how many questions got no answer.
    """
    try:
        with face.busy("Loading the model") as show:

            def progress(phase: str, share: float) -> None:
                show(f"{phase.capitalize()} {share:.0%}" if share else phase.capitalize())

            engine = await AsyncEngine.start(config, progress)
    except asyncio.CancelledError:
        # A thread that loads weights cannot be ended, and joining it would take minutes.
        os._exit(INTERRUPTED)
    async with engine:
        if engine.tokenizer is None:
            raise UnsupportedModelError(f"{engine.model_name} has no tokenizer to chat with.")
        for line in banner(engine, is_demo=not config.model):
            face.note(line)
        return await Repl(engine, engine.tokenizer, face).run()


def banner(engine: AsyncEngine, *, is_demo: bool) -> Iterator[str]:
    config = engine.config
    backends = dict.fromkeys((config.attn_prefill, config.attn_decode))
    facts = (
        f"minisgl {metadata.version('minisgl')}",
        engine.model_name,
        config.dtype,
        f"on {config.device}",
        f"attention {','.join(backends)}",
        f"context {engine.capacity.max_seq_len} tokens",
    )
    yield " · ".join(facts)
    if is_demo:
        yield DEMO_NOTE
    yield "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."


class Repl:
    """One conversation at a time with one engine, in the engine's event loop."""

    def __init__(self, engine: AsyncEngine, tokenizer: ChatTokenizer, face: Face) -> None:
        self._engine = engine
        self._face = face
        self._conversation = Conversation(tokenizer)
        self._num_unanswered = 0

    async def run(self) -> int:
        """Returns how many questions got no answer."""
        while (line := await self._face.read()) is not None:
            words = line.split()
            if words and words[0].startswith("/"):
                if words == ["/exit"]:
                    break
                self._obey(words)
            elif words:
                await self._reply_to(line)
        return self._num_unanswered

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["/help"]:
                for name, does in COMMANDS.items():
                    self._face.say(f"{name:8}{does}")
                self._face.say("Ctrl-C  stops an answer")
            case ["/reset"]:
                self._conversation.reset()
                self._face.note("A new conversation.")
            case [name, *_] if name in COMMANDS:
                self._face.say(f"{name} stands alone.")
            case [name, *_]:
                near = get_close_matches(name, COMMANDS, n=1)
                hint = f"Did you mean {near[0]}? " if near else ""
                self._face.say(f"There is no command {name}. {hint}/help lists the commands.")

    async def _reply_to(self, question: str) -> None:
        try:
            prompt = self._conversation.ask(question)
        except MinisglError as error:
            self._num_unanswered += 1
            self._face.say(str(error))
            return
        answer = Answer(num_prompt_tokens=len(prompt), asked_at=time.perf_counter())
        task = asyncio.create_task(self._stream(prompt, answer))
        with on_interrupt(task.cancel):
            await asyncio.wait([task])
        if not task.cancelled() and isinstance(task.exception(), OSError):
            await task  # the face is gone
        # What came is part of the conversation, whether or not it came to its end.
        if answer.token_ids:
            self._conversation.answer(prompt, answer.token_ids, answer.text)
            self._face.end_answer()
            self._face.note(answer.summary())
        else:
            self._num_unanswered += 1
            self._conversation.take_back()
        if remark := self._remark_on(prompt, answer, task):
            self._face.say(remark)

    async def _stream(self, prompt: list[int], answer: Answer) -> None:
        stream = self._engine.submit(prompt, self._engine.defaults.sampling())
        try:
            async for delta in stream:
                answer.add(delta, time.perf_counter())
                self._face.write(delta.text)
        finally:
            stream.abort()

    def _remark_on(self, prompt: list[int], answer: Answer, task: asyncio.Task[None]) -> str | None:
        """What the person has to know about the end of an answer, if anything."""
        limit = self._engine.capacity.max_seq_len
        if task.cancelled():
            return None if answer.token_ids else "Stopped; the question is forgotten."
        match task.exception():
            case ContextLengthError():
                return (
                    f"The conversation with this question has {len(prompt)} tokens, which is more "
                    f"than the context of {limit} holds. {START_ANEW}"
                )
            case MinisglError() as error:
                return str(error)
            case BaseException() as error:
                raise error
        full = len(prompt) + len(answer.token_ids) >= limit
        if answer.finish_reason is FinishReason.LENGTH and full:
            return f"The context of {limit} tokens is full. {START_ANEW}"
        return None


@contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `action` while the context is open, and does what it did before afterwards."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, action)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
