"""The options of a workload. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from minisgl.bench.config import BenchConfig, Sizes, Span
from minisgl.config import EngineConfig, check_at_least, check_types, option, refuse
from minisgl.errors import ConfigError
from minisgl.printable import counted

WORKLOADS = ("random", "shared-prefix", "multi-turn", "embed", "trace", "dataset")
FILES = ("trace", "dataset")  # workloads that are the name of the option with their file
NO_OUTPUT = "not with --workload embed, where nothing is generated"
workload_option = partial(option, group="Workload")
# Why a workload takes no lengths of prompts or of outputs.
NO_LENGTHS: Mapping[str, Mapping[str, str]] = {
    "trace": dict.fromkeys(("input_len", "output_len"), "a trace has its own lengths"),
    "dataset": {"input_len": "a data set has its own prompts"},
    "embed": {"output_len": NO_OUTPUT},
}
# Options that mean something with one workload alone.
ONLY_WITH = {
    "prefix_len": "shared-prefix",
    "num_prefixes": "shared-prefix",
    "num_turns": "multi-turn",
    "think_time": "multi-turn",
    "trace_scale": "trace",
    "trace_block_size": "trace",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The workload. Raises ConfigError for an invalid value."""

    workload: str = workload_option(
        "random",
        "random, shared-prefix, multi-turn, embed (vectors of random prompts), trace or dataset; "
        "trace or dataset if its file is given.",
        choices=WORKLOADS,
    )
    input_len: int | None = workload_option(
        None, "Prompt tokens of each request, instead of random lengths."
    )
    output_len: int | None = workload_option(
        None, "Output tokens of each request, instead of random lengths."
    )
    prefix_len: int = workload_option(1024, "Tokens of a shared prefix, before the prompt's own.")
    num_prefixes: int = workload_option(1, "Different shared prefixes, taken in turns.")
    num_turns: int = workload_option(
        4, "Questions of a multi-turn conversation; each is a request."
    )
    think_time: float = workload_option(
        0.0, "Seconds between an answer and the next question of a chat."
    )
    trace: str | None = workload_option(
        None,
        "JSONL file to replay, a request a line; --num-requests limits how many.",
    )
    trace_scale: float = workload_option(
        1.0,
        "Factor of the trace's times: 0.5 replays it twice as fast, 0 at once.",
    )
    trace_block_size: int = workload_option(
        16, "Tokens that one of the trace's hash_ids stands for."
    )
    dataset: str | None = workload_option(
        None,
        "File of conversations in ShareGPT's or MT-Bench's format, sampled by --seed up to "
        "--num-requests.",
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("input_len", "output_len", "prefix_len", "num_prefixes"):
            check_at_least(self, name, 1)
        check_at_least(self, "num_turns", 2)
        check_at_least(self, "trace_block_size", 1)
        for name in ("think_time", "trace_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(self, name, "allowed: 0 or more")
        self._check_kind()

    def _check_kind(self) -> None:
        """Reject options of another workload."""
        for name in FILES:
            file = getattr(self, name)
            if file is None and self.workload == name:
                refuse(self, "workload", f"needs --{name} FILE")
            if file is not None:
                if self.workload not in ("random", name):
                    refuse(self, "workload", f"allowed with --{name}: {name}")
                if not Path(file).is_file():
                    refuse(self, name, "allowed: a file that exists")
        if self.trace is not None and self.dataset is not None:
            refuse(self, "dataset", "not together with --trace")
        for spec in fields(self):
            kind = ONLY_WITH.get(spec.name)
            if kind not in (None, self.kind) and getattr(self, spec.name) != spec.default:
                refuse(self, spec.name, f"only with --workload {kind}")
        for name, reason in NO_LENGTHS.get(self.kind, {}).items():
            if getattr(self, name) is not None:
                refuse(self, name, reason)

    @property
    def kind(self) -> str:
        """One of WORKLOADS."""
        given = (name for name in FILES if getattr(self, name) is not None)
        return next(given, self.workload)

    def fix(self, sizes: Sizes) -> Sizes:
        """`sizes` with the fixed lengths of the options."""
        output = Span(self.output_len, self.output_len) if self.output_len else sizes.output
        return Sizes(
            sizes.num_requests,
            Span(self.input_len, self.input_len) if self.input_len else sizes.prompt,
            Span(0, 0) if self.kind == "embed" else output,
        )

    def describe(self, sizes: Sizes, *, at_once: bool = False) -> str:
        kind = self.kind
        if kind == "trace" and at_once:
            return f"the requests of the trace {self.trace}, all at once"
        if kind == "trace":
            return f"the trace {self.trace}, its times multiplied by {self.trace_scale:g}"
        if kind == "dataset":
            return f"up to {counted(sizes.num_requests, 'request')} of the data set {self.dataset}"
        if kind == "multi-turn":
            num_conversations = max(1, sizes.num_requests // self.num_turns)
            conversations = counted(num_conversations, "conversation")
            return (
                f"{conversations} of {counted(self.num_turns, 'question')}, {sizes.prompt} "
                f"words in each, answers of {sizes.output} tokens, {self.think_time:g} s to think"
            )
        if kind == "shared-prefix":
            prefixes = "a prefix" if self.num_prefixes == 1 else f"one of {self.num_prefixes}"
            return f"{sizes}, after {prefixes} of {self.prefix_len} tokens"
        if kind == "embed":
            return (
                f"{counted(sizes.num_requests, 'request')}, {sizes.prompt} tokens in, a vector out"
            )
        return str(sizes)


def engine_for(workload: WorkloadConfig, engine: EngineConfig) -> EngineConfig:
    """The options of the engine that a workload needs. Raises ConfigError."""
    if workload.kind != "embed":
        return engine
    if engine.task not in ("auto", "embed"):
        raise ConfigError("--task", engine.task, "allowed with --workload embed: embed")
    return replace(engine, task="embed")


def check_lengths(bench: BenchConfig, workload: WorkloadConfig) -> None:
    """Raise ConfigError if lengths are given twice, or those of outputs where there are none."""
    if workload.kind == "embed" and bench.structured:
        refuse(bench, "structured", NO_OUTPUT)
    for spans, fixed in (("prompt", "input_len"), ("output", "output_len")):
        ends = [getattr(bench, f"{end}_{spans}_length") for end in ("min", "max")]
        if any(ends) and (reason := NO_LENGTHS.get(workload.kind, {}).get(fixed)):
            raise ConfigError(f"--min- or --max-{spans}-length", max(filter(None, ends)), reason)
        if getattr(workload, fixed) is not None and any(ends):
            refuse(workload, fixed, f"not together with --min- or --max-{spans}-length")
