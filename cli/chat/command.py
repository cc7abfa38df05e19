"""`minisgl chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Annotated

import typer

from minisgl.config import EngineConfig, refuse_engine_options
from minisgl.errors import ConfigError

from ..logs import set_up_logging
from ..options import takes_options
from .config import ChatConfig
from .conversation import Conversation
from .model import ChatModel
from .ui.base import ChatUI

INTERRUPTED = 130  # the exit code that a shell expects after Ctrl-C


@takes_options
def chat(
    chat: ChatConfig,
    engine: EngineConfig,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Ask this, print the answer and leave.")
    ] = None,
) -> int:
    """Talk to a model in the terminal; piped in, each line is a question.

    \b
      minisgl chat                                   with the bundled demo model
      minisgl chat --model Qwen/Qwen3-0.6B "What is the capital of France?"
      minisgl chat --url http://127.0.0.1:1919       with the model of a server
      minisgl chat --temperature 0 < questions.txt > answers.txt
    """
    if question is not None and not question.strip():
        raise ConfigError("QUESTION", repr(question), "allowed: a text")
    if chat.url:
        refuse_engine_options(engine)
    set_up_logging(default="WARNING")
    from .repl import COMMANDS

    ui: ChatUI
    show_thinking = chat.thinking == "show"
    if sys.stdin.isatty() and sys.stdout.isatty():
        from .ui.terminal import Terminal

        ui = Terminal(COMMANDS, show_thinking=show_thinking, plain=chat.plain)
    else:
        from .ui.pipe import Pipe

        ui = Pipe(show_thinking=show_thinking)
    with ExitStack() as leaving:
        leaving.enter_context(ui.talking())
        if not chat.url:
            with ui.busy("Loading the libraries"):
                from . import engine_model  # noqa: F401 - takes seconds, so show it

        num_failed = asyncio.run(_talk(chat, engine, ui, leaving, question))
    # In a conversation a person has seen the error; a program checks the exit code.
    return 1 if num_failed and (question is not None or not ui.interactive) else 0


async def _talk(
    chat: ChatConfig, engine: EngineConfig, ui: ChatUI, leaving: ExitStack, question: str | None
) -> int:
    """Runs the chat. Raises MinisglError if no model can be reached or loaded.

    leaving: closed before the process is ended at once. question: the only one.
    """
    from .commands import OFF, Session
    from .repl import Repl, banner

    opened = _server(chat.url, chat, engine, ui) if chat.url else _engine(engine, ui, leaving)
    async with opened as model:
        ui.words["/lora"] = [*model.adapters, OFF]
        repl = Repl(Session(model, ui, Conversation(chat.system), dict(chat.sampling)))
        if question is not None:
            return await repl.ask(question)
        ui.note(banner(model))
        if not chat.url and not engine.model:
            from minisgl.models.hub import DEMO_NOTE

            ui.note(DEMO_NOTE)
        ui.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        return await repl.run()


@asynccontextmanager
async def _server(
    url: str, chat: ChatConfig, engine: EngineConfig, ui: ChatUI
) -> AsyncIterator[ChatModel]:
    from .server_model import ServerModel

    with ui.busy("Connecting"):
        key = chat.find_key()
        model = await ServerModel.connect(url, key, engine.model, chat.request_timeout)
    yield model


@asynccontextmanager
async def _engine(config: EngineConfig, ui: ChatUI, leaving: ExitStack) -> AsyncIterator[ChatModel]:
    from .engine_model import EngineModel, start_chat_engine

    try:
        with ui.busy("Loading the model") as show:

            def progress(phase: str, fraction: float) -> None:
                show(f"{phase.capitalize()} {fraction:.0%}" if fraction else phase.capitalize())

            engine = await start_chat_engine(config, progress)
    except asyncio.CancelledError:
        # A thread that loads weights cannot be ended, and joining it would take minutes.
        leaving.close()
        os._exit(INTERRUPTED)
    async with engine:
        assert engine.tokenizer is not None
        yield EngineModel(engine, engine.tokenizer)
