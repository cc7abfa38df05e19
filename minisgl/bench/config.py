"""The options of the benchmarks. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from minisgl.config import check_at_least, check_parameter, check_types, option, refuse
from minisgl.errors import ConfigError, one_of
from minisgl.printable import counted

bench_option = partial(option, group="Benchmark")
T = TypeVar("T", int, float)
REPORT_GROUP = "Report"
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# Default lengths of a latency run in tokens, smaller on a CPU.
LATENCY_INPUT, LATENCY_OUTPUT = 512, 256
LATENCY_INPUT_ON_CPU, LATENCY_OUTPUT_ON_CPU = 64, 32


@dataclass(frozen=True, slots=True)
class Span:
    """A range of lengths in tokens, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of requests and the lengths of a workload."""

    num_requests: int
    prompt: Span
    output: Span

    def __str__(self) -> str:
        return (
            f"{counted(self.num_requests, 'request')}, {self.prompt} tokens in, {self.output} out"
        )


STANDARD = Sizes(256, Span(100, 1024), Span(100, 1024))
STANDARD_ON_CPU = Sizes(32, Span(16, 64), Span(16, 64))


def _size_option(what: str, standard: int, on_cpu: int) -> Any:
    return bench_option(None, f"{what}; {standard} if not given, on a CPU {on_cpu}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunConfig:
    """What every run of a benchmark is told."""

    seed: int = bench_option(0, "Seed of lengths, prompts and sampling.")
    structured: float = bench_option(
        0.0, "Share of the requests, 0 to 1, whose output must follow a JSON schema."
    )
    repeat: int = bench_option(
        2, "Repetitions, each with fresh prompts; the figures are of the last one."
    )
    json_file: str | None = bench_option(
        None, "File for all figures, options and requests.", names=("--json",)
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "repeat", 1)
        if not 0 <= self.structured <= 1:
            refuse(self, "structured", "allowed: 0 to 1")
        _check_file(self, "json_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(_RunConfig):
    """The options as the user gave them. Raises ConfigError for an invalid value."""

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
    temperature: float = bench_option(0.6, "Sampling temperature; 0 is greedy.")

    def __post_init__(self) -> None:
        _RunConfig.__post_init__(self)
        for name in ("num_requests", "min_prompt_length", "min_output_length"):
            check_at_least(self, name, 1)
        check_at_least(self, "max_prompt_length", self.min_prompt_length or 1)
        check_at_least(self, "max_output_length", self.min_output_length or 1)
        check_parameter(self, "temperature")

    def sizes(self, device: str) -> Sizes:
        """The sizes to run on `device`, cpu or cuda."""
        standard = STANDARD_ON_CPU if device == "cpu" else STANDARD
        return Sizes(
            self.num_requests or standard.num_requests,
            _span(self.min_prompt_length, self.max_prompt_length, standard.prompt),
            _span(self.min_output_length, self.max_output_length, standard.output),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """The load of an offline run. Raises ConfigError for an invalid value."""

    max_concurrency: int | None = bench_option(
        None, "Requests at once at most; without it all are submitted at once."
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "max_concurrency", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig(_RunConfig):
    """The options of a latency run. Raises ConfigError for an invalid value."""

    batch_size: tuple[str, ...] = bench_option(
        ("1", "8", "32"),
        "Requests at once; repeat, or put commas between, for several.",
    )
    input_len: int | None = _size_option(
        "Prompt tokens of each request", LATENCY_INPUT, LATENCY_INPUT_ON_CPU
    )
    output_len: int | None = _size_option(
        "Output tokens of each request", LATENCY_OUTPUT, LATENCY_OUTPUT_ON_CPU
    )
    cached_prompts: bool = bench_option(
        False,
        "Compute the prompts beforehand, to be found in the prefix cache: long contexts without "
        "their prefill.",
    )

    def __post_init__(self) -> None:
        _RunConfig.__post_init__(self)
        if not self.batch_sizes:
            raise ConfigError("--batch-size", "", "allowed: whole numbers of 1 or more")
        check_at_least(self, "input_len", 1)
        check_at_least(self, "output_len", 2)  # a single token has no time between

    @property
    def batch_sizes(self) -> list[int]:
        return numbers("--batch-size", self.batch_size, int)

    def sizes(self, batch_size: int, device: str) -> Sizes:
        """The sizes of a batch of `batch_size` requests on `device`, cpu or cuda."""
        on_cpu = device == "cpu"
        input_len = self.input_len or (LATENCY_INPUT_ON_CPU if on_cpu else LATENCY_INPUT)
        output_len = self.output_len or (LATENCY_OUTPUT_ON_CPU if on_cpu else LATENCY_OUTPUT)
        return Sizes(batch_size, Span(input_len, input_len), Span(output_len, output_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Files for the results of a run. Raises ConfigError for an invalid value."""

    csv_file: str | None = option(
        None, "File for a line of figures for each measurement.", names=("--csv",),
        group=REPORT_GROUP,
    )  # fmt: skip
    plot_file: str | None = option(
        None, "Picture of the figures: .png, .svg or .pdf; needs matplotlib, the extra [plot].",
        names=("--plot",), group=REPORT_GROUP,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        _check_file(self, "csv_file")
        _check_file(self, "plot_file")
        if self.plot_file is not None:
            if Path(self.plot_file).suffix.lower() not in PLOT_SUFFIXES:
                refuse(self, "plot_file", f"at the end of the name {one_of(PLOT_SUFFIXES)}")
            # Check now, not after hours of measuring.
            if importlib.util.find_spec("matplotlib") is None:
                refuse(self, "plot_file", "matplotlib is missing; pip install matplotlib")


def parts(values: tuple[str, ...]) -> list[str]:
    """Split the values of an option that may be repeated and may be a list."""
    return [part for part in ",".join(values).split(",") if part]


def numbers(name: str, values: tuple[str, ...], kind: Callable[[str], T]) -> list[T]:
    """The numbers without duplicates, in the order given; above 0. Raises ConfigError."""
    found: dict[T, None] = {}
    for part in parts(values):
        number = None
        with suppress(ValueError):
            number = kind(part)
        if number is None or not number > 0:
            allowed = "whole numbers of 1 or more" if kind is int else "numbers above 0, or inf"
            raise ConfigError(name, ",".join(values), f"allowed: {allowed}")
        found[number] = None
    return list(found)


def _check_file(config: Any, name: str) -> None:
    if (file := getattr(config, name)) is not None:
        path = Path(file)
        if path.is_dir() or not path.parent.is_dir():
            refuse(config, name, "allowed: a file in a folder that exists")


def _span(low: int | None, high: int | None, standard: Span) -> Span:
    """A default bound is moved if it contradicts the bound that was given."""
    if low is None:
        low = standard.low if high is None else min(standard.low, high)
    return Span(low, max(standard.high, low) if high is None else high)
