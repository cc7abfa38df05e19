"""Starts the engine of a benchmark, and describes the run for its report."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

import minisgl
from minisgl.bench.environment import Environment
from minisgl.bench.workload.requests import MAX_TOKEN_ID
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.llm import UNBOUNDED_QUEUE
from minisgl.progress import LoadProgress
from minisgl.runner.facts import device_name


@asynccontextmanager
async def bench_engine(console: Console, config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """An engine with an unbounded queue; shows its progress and describes it. Raises
    MinisglError."""
    config = replace(config, max_queued_requests=UNBOUNDED_QUEUE)
    with LoadProgress(console) as progress:
        engine = await AsyncEngine.start(config, progress)
    async with engine:
        for line in describe(engine):
            console.print(line)
        yield engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The information that is needed to compare or repeat a measurement."""

    environment: Environment
    versions: dict[str, str]
    device: str
    model: str
    bench_options: dict[str, Any]  # as the user gave them
    # Not known of a server at --url:
    backends: dict[str, str] = field(default_factory=dict)  # of attention, by phase
    engine_options: dict[str, Any] = field(default_factory=dict)  # with nothing left to choose
    capacity: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: AsyncEngine, bench_options: dict[str, Any]) -> RunInfo:
        return cls(
            environment=Environment.found(),
            versions={
                "minisgl": minisgl.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            device=device_name(engine.config.device),
            model=engine.model_name,
            backends={
                "prefill": engine.config.attn_prefill,
                "decode": engine.config.attn_decode,
            },
            bench_options=bench_options,
            engine_options=asdict(engine.config),
            capacity=asdict(engine.capacity),
        )


def describe(engine: AsyncEngine) -> Iterator[str]:
    """Describe the model, the device and the options that affect speed, in lines."""
    config, capacity = engine.config, engine.capacity
    weights = "random weights" if config.load_format == "dummy" else "its own weights"
    devices = f"{config.num_ranks} x " if config.num_ranks > 1 else ""
    backends = dict.fromkeys((config.attn_prefill, config.attn_decode))
    largest = capacity.max_graph_batch
    graphs = f"CUDA graphs up to batch {largest}" if largest else "no CUDA graphs"
    yield (
        f"minisgl {minisgl.__version__}, torch {torch.__version__}: {engine.model_name} with "
        f"{weights} in {config.dtype}, on {devices}{device_name(config.device)}"
    )
    yield (
        f"attention {', '.join(backends)}, {graphs}, "
        f"{'steps planned ahead' if config.overlap else 'no look-ahead'}, "
        f"KV cache of {capacity.num_tokens:,} tokens in pages of "
        f"{capacity.page_size}, prefix cache {config.cache_type}, at most "
        f"{capacity.num_slots:,} requests and {config.max_prefill_length:,} prompt tokens a step"
    )
    if config.num_drafts:
        by_chance = ""
        if config.draft_acceptance >= 0:
            by_chance = f", accepted with probability {config.draft_acceptance:g} by a coin"
        yield f"speculation {config.speculative}: up to {config.num_drafts} drafts{by_chance}"
    if engine.model.vocab_size <= MAX_TOKEN_ID:
        yield (
            f"the standard prompts have token ids up to {MAX_TOKEN_ID:,}; "
            f"here they wrap around at the vocabulary of {engine.model.vocab_size:,}"
        )
