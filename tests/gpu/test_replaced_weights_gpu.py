"""Weights that are replaced in place on a GPU, where captured steps hold their addresses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.parity import load_engine
from support.replaced_weights import SPEC, check_replaced, check_slept

from minisgl.engine import AsyncEngine

pytestmark = pytest.mark.gpu


GIVEN_BACK = 0.9
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "fp8"},
        {"dtype": "bfloat16", "model_impl": "adopted"},
        {"dtype": "bfloat16", "batch_invariant": True},
    ],
    ids=str,
)


@OPTIONS
def test_captured_steps_answer_with_the_weights_that_came(options: dict[str, Any]) -> None:
    check_replaced(device="cuda", cuda_graph_max_bs=4, **options)


@OPTIONS
def test_steps_that_are_captured_again_answer_as_before(options: dict[str, Any]) -> None:
    check_slept(device="cuda", cuda_graph_max_bs=4, **options)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_gives_its_memory_to_others(level: int, tmp_path: Path) -> None:
    spec = replace(SPEC, hidden_size=2048, num_heads=16, vocab_size=65_536)
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "cuda_graph_max_bs": 4}
    options |= {"num_pages": 200_000, "max_running_requests": 8}

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    async def run() -> None:
        folder = make_checkpoint(spec, tmp_path)
        before = free()
        async with AsyncEngine(load_engine(folder, **options)) as engine:
            taken = before - free()
            await engine.weights.sleep(level)
            given_back = taken - (before - free())
            assert given_back >= GIVEN_BACK * taken, (given_back, taken)
            await engine.weights.wake()
            assert before - free() <= 1.1 * taken

    asyncio.run(run())
