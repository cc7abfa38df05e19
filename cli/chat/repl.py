"""The loop of `minisgl chat`: reads a line, answers it, until the user leaves."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

from minisgl import __version__
from minisgl.errors import MinisglError

from .commands import TABLE, NextAction, Session, run_command
from .json_format import JsonIndenter
from .model import ChatModel, ContextFullError
from .reply_record import ReplyRecord, Shown
from .text_format import QUOTES, as_command, is_open, shortened, unquoted

COMMANDS = {name: command.does for name, command in TABLE.items()}
NOTHING = "The model answers nothing."
CUT = "The answer was cut at the limit of its length, max_tokens."
CUT_CALL = "The answer ended inside of a tool call, which is left out."
MAKE_ROOM = "/undo or /reset makes room; /save first keeps the conversation."


def banner(model: ChatModel) -> str:
    return " · ".join((f"minisgl {__version__}", *model.facts))


class Repl:
    """Runs one conversation at a time, in an event loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ui = session.ui
        self._was_interrupted = False
        self._asks_once = False  # there are no commands

    async def run(self) -> int:
        """Runs until the user leaves. Returns the number of failed questions and commands."""
        while (typed := await self._read()) is not None:
            then = await self._take(typed)
            if then is NextAction.LEAVE:
                break
            if then is NextAction.ANSWER:
                await self._answer()
        return self._session.num_failed

    async def ask(self, question: str) -> int:
        """Answers one question. Returns the number of failures. Raises KeyboardInterrupt if Ctrl-C
        has stopped the answer."""
        self._session.conversation.ask(question)
        self._asks_once = True
        await self._answer()
        if self._was_interrupted:
            raise KeyboardInterrupt
        return self._session.num_failed

    async def _take(self, typed: str) -> NextAction:
        if is_open(typed):  # a pipe has ended inside of quotes
            self._session.refuse(f"What begins with {QUOTES} has to end with {QUOTES}.")
            return NextAction.READ
        if (command := as_command(typed)) is not None:
            return await run_command(self._session, *command)
        conversation = self._session.conversation
        if not typed.strip() or not ((text := unquoted(typed)).strip() or conversation.open_calls):
            return NextAction.READ
        if not conversation.open_calls:
            conversation.ask(text)
            return NextAction.ANSWER
        conversation.add_result(text)
        return NextAction.READ if conversation.open_calls else NextAction.ANSWER

    async def _read(self) -> str | None:
        interrupted, self._was_interrupted = self._was_interrupted, False
        if calls := self._session.conversation.open_calls:
            self._ui.note(f"Type the result of {shortened(calls[0]['function']['name'], 80)}.")
        return await self._ui.read(interrupted=interrupted)

    async def _answer(self) -> None:
        answer = ReplyRecord(asked_at=time.perf_counter())
        task = asyncio.create_task(self._stream(answer))
        with on_interrupt(task.cancel) as was_pressed:
            await asyncio.wait([task])
            self._was_interrupted = was_pressed()  # perhaps when the answer had just ended
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MinisglError):
            raise error  # the terminal or pipe is gone, or this is a bug
        session = self._session
        if answer.has_come:
            session.answers.append(answer)
            self._ui.note(answer.summary())
        has_come = answer.has_come and not answer.is_cut_call
        if has_come and answer.calls:
            session.conversation.steps.append(answer.call_message)
        elif has_come:  # a partial answer is part of the conversation, too
            session.conversation.answer(answer.message, answer.num_context_tokens)
        if remark := self._remark_on(answer, error):
            self._ui.say(remark)
        if error is not None or not has_come or answer.is_cut:
            session.num_failed += 1
        if not has_come:
            if session.conversation.give_up():
                self._ui.say("The answer before is kept.")
            elif not self._asks_once:
                self._ui.note("/retry asks again.")

    async def _stream(self, answer: ReplyRecord) -> None:
        session = self._session
        deltas = session.model.reply(session.conversation.messages, session.sampling, session.rules)
        layout = None if session.rules.schema is None else JsonIndenter()
        with self._ui.answering():
            try:
                async with aclosing(deltas):
                    async for delta in deltas:
                        self._show(answer.add(delta, time.perf_counter()), layout)
            finally:
                self._show(answer.flush(), layout)

    def _show(self, shown: Shown, layout: JsonIndenter | None) -> None:
        if shown.thinking:
            self._ui.think(shown.thinking)
        if shown.text and layout is None:
            self._ui.write(shown.text)
        elif shown.text and layout is not None and (text := layout.feed(shown.text)):
            self._ui.code(text, "json")
        if shown.calls:
            self._ui.code(shown.calls, "python")

    def _remark_on(self, answer: ReplyRecord, error: MinisglError | None) -> str | None:
        """A message about the end of an answer, if there is something to report."""
        limit = self._session.model.max_seq_len
        if isinstance(error, ContextFullError):
            is_first = not self._session.conversation.turns
            return f"{error} {'A shorter question may fit.' if is_first else MAKE_ROOM}"
        if error is not None:
            return str(error)
        if answer.fills(limit):
            return f"The context of {limit:,} tokens is full. {MAKE_ROOM}"
        if answer.is_cut_call:
            return CUT_CALL
        if answer.is_cut and not self._ui.interactive:  # a terminal shows the summary
            return CUT
        if not answer.has_come:
            return "Stopped before an answer came." if self._was_interrupted else NOTHING
        return None


@contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C call `action` while the context is open; restores the handler afterwards.

    Yields a function that says whether Ctrl-C was pressed. A second one raises KeyboardInterrupt
    wherever the program is.
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
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, before)
