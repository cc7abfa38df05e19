"""The loop of `minisgl chat`: read a line, answer it, until the person leaves."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from importlib import metadata

from minisgl.errors import MinisglError
from minisgl.text.thinking import Split

from .answer import Answer
from .commands import TABLE, Session, Then, run_command
from .model import ChatModel, ContextFullError
from .quotes import QUOTES, as_command, is_open, unquoted

COMMANDS = {name: command.does for name, command in TABLE.items()}
NOTHING = "The model answers nothing."
MAKE_ROOM = "/undo or /reset makes room; /save first keeps the conversation."


def banner(model: ChatModel) -> str:
    return " · ".join((f"minisgl {metadata.version('minisgl')}", *model.facts))


class Repl:
    """One conversation at a time, in an event loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._face = session.face
        self._was_interrupted = False

    async def run(self) -> int:
        """Returns how many questions and commands failed."""
        with self._face.talking():
            while (typed := await self._read()) is not None:
                then = self._take(typed)
                if then is Then.LEAVE:
                    break
                if then is Then.ANSWER:
                    await self._answer()
        return self._session.num_failed

    def _take(self, typed: str) -> Then:
        if is_open(typed):  # of a pipe that has come to its end
            self._session.refuse(f"What begins with {QUOTES} has to end with {QUOTES}.")
            return Then.READ
        if (command := as_command(typed)) is not None:
            return run_command(self._session, *command)
        if not (question := unquoted(typed)).strip():
            return Then.READ
        self._session.conversation.ask(question)
        return Then.ANSWER

    async def _read(self) -> str | None:
        interrupted, self._was_interrupted = self._was_interrupted, False
        return await self._face.read(interrupted=interrupted)

    async def _answer(self) -> None:
        answer = Answer(asked_at=time.perf_counter())
        task = asyncio.create_task(self._stream(answer))
        with on_interrupt(task.cancel):
            await asyncio.wait([task])
        self._was_interrupted = task.cancelled()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MinisglError):
            raise error  # the face is gone, or we are wrong
        session = self._session
        # What came is part of the conversation, whether or not it came to its end.
        if answer.has_come:
            session.conversation.answer(answer.message, answer.num_context_tokens)
            session.tally.add(answer)
            self._face.note(answer.summary())
        if remark := self._remark_on(answer, error):
            self._face.say(remark)
        if error is not None or not answer.has_come:
            session.num_failed += 1
        if not answer.has_come:
            if session.conversation.give_up():
                self._face.say("The answer before is kept.")
            else:
                self._face.note("/retry asks again.")

    async def _stream(self, answer: Answer) -> None:
        session = self._session
        deltas = session.model.reply(session.conversation.messages, session.sampling)
        with self._face.answering():
            try:
                async with aclosing(deltas):
                    async for delta in deltas:
                        self._show(answer.add(delta, time.perf_counter()))
            finally:
                self._show(answer.flush())

    def _show(self, split: Split) -> None:
        if split.thinking:
            self._face.think(split.thinking)
        if split.text:
            self._face.write(split.text)

    def _remark_on(self, answer: Answer, error: MinisglError | None) -> str | None:
        """What the person has to know about the end of an answer, if anything."""
        limit = self._session.model.max_seq_len
        if isinstance(error, ContextFullError):
            is_first = not self._session.conversation.turns
            return f"{error} {'A shorter question may fit.' if is_first else MAKE_ROOM}"
        if error is not None:
            return str(error)
        if answer.fills(limit):
            return f"The context of {limit:,} tokens is full. {MAKE_ROOM}"
        if not answer.has_come:
            return "Stopped before an answer came." if self._was_interrupted else NOTHING
        return None


@contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `action` while the context is open, and does what it did before afterwards.

    Once more, while that has not helped, it raises KeyboardInterrupt wherever the program is.
    """
    loop = asyncio.get_running_loop()
    was_pressed = False

    def interrupt(*_: object) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True
        loop.call_soon_threadsafe(action)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
