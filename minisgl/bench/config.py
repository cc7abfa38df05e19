"""Every option of the benchmarks, once. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import check_at_least, check_types, option, refuse

GROUP = "Benchmark"


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths in tokens, from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a benchmark is."""

    num_requests: int
    prompt: Span
    output: Span

    def __str__(self) -> str:
        return f"{self.num_requests} requests, {self.prompt} tokens in, {self.output} out"


STANDARD = Sizes(256, Span(100, 1024), Span(100, 1024))
STANDARD_ON_CPU = Sizes(32, Span(16, 64), Span(16, 64))


def _size_option(what: str, standard: int, on_cpu: int) -> Any:
    return option(None, f"{what}; {standard} if not given, on a CPU {on_cpu}.", group=GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The options as the user gave them. Raises ConfigError on a value that can never be right."""

    num_requests: int | None = _size_option(
        "How many requests", STANDARD.num_requests, STANDARD_ON_CPU.num_requests
    )
    min_prompt_length: int | None = _size_option(
        "Shortest prompt in tokens", STANDARD.prompt.low, STANDARD_ON_CPU.prompt.low
    )
    max_prompt_length: int | None = _size_option(
        "Longest prompt in tokens", STANDARD.prompt.high, STANDARD_ON_CPU.prompt.high
    )
    min_output_length: int | None = _size_option(
        "Shortest output in tokens", STANDARD.output.low, STANDARD_ON_CPU.output.low
    )
    max_output_length: int | None = _size_option(
        "Longest output in tokens", STANDARD.output.high, STANDARD_ON_CPU.output.high
    )
    temperature: float = option(0.6, "Sampling temperature; 0 is greedy.", group=GROUP)
    seed: int = option(0, "Seed of lengths, prompts and sampling.", group=GROUP)
    repeat: int = option(
        2, "Repetitions, each with fresh prompts; the figures are of the last one.", group=GROUP
    )
    json_file: str | None = option(
        None, "File for all figures, options and requests.", names=("--json",), group=GROUP
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("num_requests", "min_prompt_length", "min_output_length", "repeat"):
            check_at_least(self, name, 1)
        check_at_least(self, "max_prompt_length", self.min_prompt_length or 1)
        check_at_least(self, "max_output_length", self.min_output_length or 1)
        if not 0 <= self.temperature <= 2:
            refuse(self, "temperature", "allowed: 0 to 2")
        if self.json_file is not None:
            path = Path(self.json_file)
            if path.is_dir() or not path.parent.is_dir():
                refuse(self, "json_file", "allowed: a file in a folder that exists")

    def sizes(self, device: str) -> Sizes:
        """What to run on `device`, cpu or cuda."""
        standard = STANDARD_ON_CPU if device == "cpu" else STANDARD
        return Sizes(
            self.num_requests or standard.num_requests,
            _span(self.min_prompt_length, self.max_prompt_length, standard.prompt),
            _span(self.min_output_length, self.max_output_length, standard.output),
        )


def _span(low: int | None, high: int | None, standard: Span) -> Span:
    """A bound that was not given makes way for the one that was."""
    if low is None:
        low = standard.low if high is None else min(standard.low, high)
    return Span(low, max(standard.high, low) if high is None else high)
