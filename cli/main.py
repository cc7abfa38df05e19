"""The command `minisgl`. Each command imports heavy modules only when it runs."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from minisgl.config import INSTEAD
from minisgl.errors import MinisglError, one_of
from minisgl.printable import printable

from .batch import batch
from .bench import bench, bench_compare, bench_latency, bench_serve
from .chat.command import chat
from .chat.text_format import did_you_mean
from .config import config
from .models import models
from .serve import REPLICA, ROUTER, replica_process, router_process, serve
from .verify import verify
from .version import version

# Commands of other programs, and what they are called here.
FAMILIAR = {
    **dict.fromkeys(("run", "ask", "complete"), "chat"),
    **dict.fromkeys(("start", "server", "api_server", "launch_server"), "serve"),
    **dict.fromkeys(("benchmark", "bench throughput"), "bench"),
    **dict.fromkeys(("list", "ls", "show", "search"), "models"),
    "run-batch": "batch",
    "collect-env": "version",
}


class Commands(TyperGroup):
    """Knows commands of two words, such as `bench latency` beside `bench`."""

    # Typer passes click's context, or one of its own copy of click, by version.
    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: names.index(name.partition(" ")[0]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        shown = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        if (both := " ".join(args[:2])) in self.commands:
            args = [both, *args[2:]]
        elif len(args) > 1 and not args[1].startswith("-"):
            verbs = [name for name in shown if name.startswith(f"{args[0]} ")]
            if verbs:
                ctx.fail(_unknown(both, [args[0], *verbs]))
        if args[0] not in self.commands and not args[0].startswith("-"):
            ctx.fail(_unknown(args[0], shown))
        return super().resolve_command(ctx, args)


def _unknown(said: str, names: Sequence[str]) -> str:
    """The message for a command that does not exist: the closest one, and all that there are."""
    hint = did_you_mean(said, names, FAMILIAR)
    return f"There is no command {said}. {hint}{one_of(names).capitalize()}"


# Options of a server are read from variables, too: --page-size from MINISGL_SERVE_PAGE_SIZE.
OF_ENVIRONMENT = {"auto_envvar_prefix": "MINISGL_SERVE"}

app = typer.Typer(
    cls=Commands,
    name="minisgl",
    help="A compact and fast inference engine for large language models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command(context_settings=OF_ENVIRONMENT)(serve)
app.command()(chat)
app.command()(batch)
app.command()(bench)
app.command()(verify)
app.command(context_settings=OF_ENVIRONMENT)(config)
app.command()(version)
app.command()(models)
app.command(REPLICA, hidden=True)(replica_process)
app.command(ROUTER, hidden=True)(router_process)
# `bench` alone is the first of its verbs.
verbs = typer.Typer()
verbs.command("bench offline", hidden=True)(bench)
verbs.command("bench latency")(bench_latency)
verbs.command("bench serve")(bench_serve)
verbs.command("bench compare")(bench_compare)
verbs.command("bench --compare", hidden=True)(bench_compare)
app.add_typer(verbs)

# The base of all errors in the use of a command line. Typer has it from click or from its own copy
# of click, by version, and makes public only this subclass.
UsageError: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
# What people try first.
ALSO = {"": "--help", "help": "--help", "--version": "version"}


def main() -> int:
    """The entry point. Returns the exit code: 2 for a caller's mistake, 130 for Ctrl-C."""
    _open_standard_streams()
    try:
        arguments = sys.argv[1:]
        said = " ".join(arguments)
        arguments = [ALSO[said]] if said in ALSO else arguments
        return app(arguments, prog_name="minisgl", standalone_mode=False) or 0
    except MinisglError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError:  # start.py says what to do
        raise
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "minisgl"
        return _fail(f"{_misused(error)} (see {command} --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error} (LOG_LEVEL=DEBUG shows where)", 1)


def _open_standard_streams() -> None:
    """Put /dev/null where the caller closed a standard stream. Its number would go to the next
    socket, which libraries then take for that stream: libuv aborts when it closes one. Let no
    character that the output lacks end the program."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    # None where they were closed.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # A terminal that lacks a character gets a question mark for it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _misused(error: Any) -> str:
    """The message of a UsageError; for a missing argument, with all arguments of the command, and
    for an option that other engines have, with what to do."""
    option = str(getattr(error, "option_name", ""))
    if instead := INSTEAD.get(option.removeprefix("--").replace("-", "_")):
        return f"No such option: {option}; {instead}"
    message = str(error.format_message())
    if not message.startswith("Missing argument") or error.ctx is None:
        return message
    parts = error.ctx.command.params
    taken = [part.metavar for part in parts if part.param_type_name == "argument"]
    missing = error.param.metavar
    return f"{error.ctx.command_path} takes {' and '.join(taken)}; {missing} was not given"


def _fail(message: str, exit_code: int) -> int:
    """Prints the error in one line. Called while the exception is handled.

    The message may quote a server, whose text must not control the terminal.
    """
    if os.environ.get("LOG_LEVEL", "").upper() == "DEBUG":
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
    print(f"minisgl: {printable(' '.join(message.split()))}", file=sys.stderr)
    return exit_code
