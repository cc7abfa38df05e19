"""Shared parts of the scripts in this folder: the engine's options, and errors."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from minisgl.config import EngineConfig, option_names
from minisgl.errors import MinisglError

Number = TypeVar("Number", int, float)


def make_parser(
    description: str | None, *, without: Sequence[str] = (), **defaults: Any
) -> argparse.ArgumentParser:
    """A parser for a script that takes a model and the engine's options, like the commands.

    `without`: fields of EngineConfig that the script sets itself. `defaults`: defaults that differ
    from EngineConfig's; random weights unless overridden.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    types = get_type_hints(EngineConfig)
    defaults = {"load_format": "dummy"} | defaults
    engine = parser.add_argument_group("engine")
    for spec in fields(EngineConfig):
        default = defaults.get(spec.name, spec.default)
        note = "" if default in (None, "", False) else f" [default: {default}]"
        help = f"{spec.metadata['help']}{note}".replace("%", "%%")
        if spec.name == "model":
            parser.add_argument("model", nargs="?", default=default, help=help)
        elif spec.name not in without:
            kind = next(t for t in (*get_args(types[spec.name]), types[spec.name]) if t != NoneType)
            how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
            names = option_names(spec)
            engine.add_argument(*names, dest=spec.name, default=default, help=help, **how)
    return parser


def engine_config(arguments: argparse.Namespace, **decided: Any) -> EngineConfig:
    """The engine's options, with the fields that the script sets. Raises ConfigError."""
    given = {
        spec.name: getattr(arguments, spec.name)
        for spec in fields(EngineConfig)
        if hasattr(arguments, spec.name)
    }
    return EngineConfig(**given | decided)


def above_zero(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """An argparse type for a number, int or float, above 0."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: allowed: a number above 0")
        return value

    parse.__name__ = "number"  # argparse shows this name if `kind` rejects the text
    return parse


def run_script(work: Coroutine[Any, Any, None]) -> int:
    """Run the script; an error is one line. Returns the exit code."""
    try:
        asyncio.run(work)
    except MinisglError as error:
        message = " ".join(str(error).split())
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
