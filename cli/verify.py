"""`minisgl verify`: whether a model computes here what it computes in transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.table import Table

from minisgl.config import EngineConfig

from .logs import set_up_logging
from .options import ModelArgument, of_model, takes_options

if TYPE_CHECKING:
    from minisgl.verify.run import Findings
    from minisgl.verify.verdict import PathResult


@takes_options
def verify(engine: EngineConfig, named: ModelArgument = "") -> int:
    """Compare a model with transformers, on this machine and with its weights.

    Short prompts go through minisgl and through transformers. The table shows how far the logprobs
    of both are from those of transformers in float32, the last line is the verdict, and the exit
    code is 0 if all is right, else 1.

    \b
      minisgl verify Qwen/Qwen3-0.6B
      minisgl verify ./folder --dtype float16 --kv-cache-dtype fp8
    """
    set_up_logging(default="WARNING")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    from minisgl.verify.run import verify

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    findings = verify(
        of_model(engine, named), tell=lambda text: print(text, file=sys.stderr, flush=True)
    )
    _print(findings)
    return 0 if findings.is_right else 1


def _print(findings: Findings) -> None:
    from minisgl import __version__
    from minisgl.bench.report.output import make_console

    console = make_console()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    console.print(f"minisgl {__version__}, {packages}")
    for line in findings.facts:
        console.print(line)
    if findings.paths:
        console.print(_table(findings.paths, findings.dtype))
    if findings.texts is not None:
        differ = f"{len(findings.texts)} not " if findings.texts else ""
        console.print(f"tokens of texts: {differ}as in transformers")
    said = [*findings.conversations.values()]
    console.print(
        f"chat template: {said.count('')} of {len(said)} conversations as in transformers"
        if said
        else "chat template: none that takes a conversation"
    )
    console.print(f"parsers: {findings.format}")
    for fault in findings.faults:
        console.print(f"fault: {fault}")
    console.print(_verdict(findings))


def _table(paths: Sequence[PathResult], dtype: str) -> Table:
    table = Table(title="difference of logprobs from transformers in float32", title_justify="left")
    table.add_column("")
    for heading in (
        *("rows", "minisgl\nlargest", "\nmean", f"transformers\nin {dtype}", "\nmean"),
        *("tokens\nsame", "\nnear ties", "\nothers"),
    ):
        table.add_column(heading, justify="right")
    for each in paths:
        distances = (each.ours.largest, each.ours.mean, each.theirs.largest, each.theirs.mean)
        counts = (each.num_same, each.num_near, each.num_other)
        table.add_row(
            f"{each.path}{'' if each.is_right else '  WRONG'}",
            str(each.num_rows),
            *(f"{distance:.2g}" for distance in distances),
            *map(str, counts),
        )
    return table


def _verdict(findings: Findings) -> str:
    if findings.faults:
        return "WRONG: minisgl does not compute what transformers computes"
    if findings.not_compared:
        return f"NOT SHOWN: {'; '.join(findings.not_compared)}"
    return (
        f"RIGHT: minisgl computes what transformers does, but for the rounding of {findings.dtype}"
    )
