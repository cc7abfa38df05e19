"""The options of the load of `bench serve`. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from minisgl.bench.config import numbers, parts
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.client.remote import RemoteConfig
from minisgl.config import check_at_least, option
from minisgl.errors import ConfigError, one_of

ENDPOINTS = ("auto", "completions", "chat")
ARRIVALS = ("poisson", "constant")
LATENCIES = ("ttft", "tpot", "itl", "e2e")
load_option = partial(option, group="Load")


class Point(NamedTuple):
    """The load of one measurement of a sweep."""

    request_rate: float | None  # requests a second; None: as fast as possible
    max_concurrency: int | None  # None: any number at once

    def __str__(self) -> str:
        rate, most = self.request_rate, self.max_concurrency
        pace = "as fast as possible" if rate is None else f"{rate:g} requests/s"
        return pace if most is None else f"{pace}, at most {most} at once"

    def short(self) -> str:
        rate, most = self.request_rate, self.max_concurrency
        if rate is None:
            return "inf" if most is None else f"{most} at once"
        return f"{rate:g}/s" if most is None else f"{rate:g}/s, {most} at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(RemoteConfig):
    """The server and the load. Raises ConfigError for an invalid value."""

    endpoint: str = load_option(
        "auto",
        "completions (prompts of token ids) or chat (prompts of words); chat for multi-turn.",
        choices=ENDPOINTS,
    )
    request_rate: tuple[str, ...] = load_option(
        ("inf",),
        "Requests a second, inf for as fast as possible; several, with commas, are a sweep.",
    )
    arrivals: str = load_option(
        "poisson", "At a rate: poisson (random) or constant (evenly spaced).", choices=ARRIVALS
    )
    max_concurrency: tuple[str, ...] = load_option(
        (), "Requests at once at most; several, with commas, are a sweep."
    )
    goodput: tuple[str, ...] = load_option(
        (),
        "Limits in milliseconds, such as ttft:500,tpot:50,e2e:9000; reports requests that meet "
        "all of them.",
    )
    stop_at_eos: bool = load_option(False, "Stop at EOS; output lengths become upper bounds.")
    vocab_size: int | None = load_option(
        None, "With --url, token ids of prompts stay below it; 10,001 if not given.",
    )  # fmt: skip
    request_timeout: float = load_option(600.0, "Seconds after which a request counts as failed.")

    def __post_init__(self) -> None:
        RemoteConfig.__post_init__(self)
        for name in ("api_key", "api_key_file", "vocab_size"):
            if not self.url and (given := getattr(self, name)):
                shown = "(not shown)" if name == "api_key" else given
                raise ConfigError(f"--{name.replace('_', '-')}", shown, "only with --url")
        check_at_least(self, "vocab_size", 1)
        points = self.points  # which looks at every value
        if (
            len({point.request_rate for point in points})
            < len(points)
            > len({point.max_concurrency for point in points})
        ):
            given = ",".join(self.max_concurrency)
            allowed = "a sweep goes over this or over --request-rate; allowed: one value"
            raise ConfigError("--max-concurrency", given, allowed)
        _ = self.limits_s

    @property
    def points(self) -> list[Point]:
        """The measurements, in the order given."""
        most: list[int | None] = [*numbers("--max-concurrency", self.max_concurrency, int)]
        rates = numbers("--request-rate", self.request_rate, float) or [math.inf]
        return [
            Point(None if rate == math.inf else rate, concurrency)
            for rate in rates
            for concurrency in (most or [None])
        ]

    @property
    def limits_s(self) -> dict[str, float]:
        """The limits of goodput by name, in seconds."""
        limits: dict[str, float] = {}
        for part in parts(self.goodput):
            name, _, value = part.partition(":")
            try:
                limit = float(value) / 1e3
            except ValueError:
                limit = math.nan
            if name not in LATENCIES or not limit > 0:
                allowed = one_of(f"{name}:MILLISECONDS" for name in LATENCIES)
                raise ConfigError("--goodput", part, allowed)
            limits[name] = limit
        return limits


def check_load(workload: WorkloadConfig, load: LoadConfig) -> None:
    """Raise ConfigError if the workload cannot be sent with this load."""
    if workload.kind == "multi-turn" and load.endpoint == "completions":
        raise ConfigError("--endpoint", load.endpoint, "allowed with --workload multi-turn: chat")
    if workload.kind == "embed" and load.endpoint != "auto":
        raise ConfigError("--endpoint", load.endpoint, "allowed with --workload embed: auto")
    timed = any(point.request_rate is not None for point in load.points)
    if workload.kind == "trace" and timed:
        given = ",".join(load.request_rate)
        raise ConfigError("--request-rate", given, "a trace has its own times: --trace-scale")
