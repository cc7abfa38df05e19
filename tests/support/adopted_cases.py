"""Prompts of small checkpoints of adopted architectures, with the tokens of transformers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from support.adopted_checkpoints import write_checkpoint, write_checkpoint_with_towers
from support.checkpoints import GreedyRun, greedy_reference, load_reference
from support.parity import NOISE, batch, complete, greedy, load_engine

from minisgl.engine import AsyncEngine
from minisgl.models.adopted.architectures import TOWERS
from minisgl.models.config import ModelConfig
from minisgl.models.registry import read_model_config

NUM_TOKENS = 10
LENGTHS = (3, 17, 40, 40, 12)
SHARED = 24  # tokens, by two of the prompts


@dataclass(frozen=True, eq=False)
class Case:
    folder: Path
    prompts: list[list[int]]
    runs: list[GreedyRun]


@cache
def case_of(architecture: str, folder: Path) -> Case:
    write = write_checkpoint_with_towers if architecture in TOWERS else write_checkpoint
    made = write(architecture, folder / architecture)
    reference = load_reference(made, getattr(transformers, architecture))
    size = reference.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(2, size, (SHARED,), generator=generator).tolist()
    prompts = []
    for length in LENGTHS:
        own = torch.randint(2, size, (length,), generator=generator).tolist()
        prompts.append((shared + own)[:length] if length > SHARED else own)
    runs = [greedy_reference(reference, prompt, NUM_TOKENS) for prompt in prompts]
    return Case(made, prompts, runs)


@cache
def config_of(case: Case, model_impl: str) -> ModelConfig:
    """What is read once for all engines of a case: the proof takes longer than most runs."""
    return read_model_config(case.folder, model_impl=model_impl)


def check(case: Case, *, alone: bool, **options: Any) -> list[int]:
    """Run the prompts and compare each token up to a close call, of which there may be few; returns
    the cached tokens of each. alone: one after the other, those that share a beginning."""
    asked = slice(2, 4) if alone else slice(None)
    prompts, runs = case.prompts[asked], case.runs[asked]

    async def run() -> list[int]:
        options.setdefault("model_impl", "adopted")
        model_config = config_of(case, options["model_impl"])
        loaded = load_engine(case.folder, model_config=model_config, **options)
        async with AsyncEngine(loaded) as engine:
            wanted = [greedy(NUM_TOKENS)] * len(prompts)
            if alone:
                outputs = [await complete(engine, prompt, wanted[0]) for prompt in prompts]
            else:
                outputs = await batch(engine, prompts, wanted)
        close_calls = 0
        for output, run in zip(outputs, runs, strict=True):
            for step, (got, token) in enumerate(zip(output.token_ids, run.token_ids, strict=True)):
                if got != token:
                    assert run.margins[step] < NOISE * float(run.logits[step].abs().max())
                    close_calls += 1
                    break
        assert close_calls <= 1
        return [output.num_cached_tokens for output in outputs]

    return asyncio.run(run())
