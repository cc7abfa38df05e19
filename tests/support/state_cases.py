"""Greedy runs of small models with a state, on prompts that share a beginning."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import GreedyRun, greedy_reference
from support.drafters import KnowingDrafter
from support.parity import batch, greedy, load_engine
from transformers import PreTrainedModel

from minisgl.engine import AsyncEngine

NUM_TOKENS = 8
LENGTHS = (3, 17, 70, 70, 12)  # the last crosses a page of 16 on the way
NUM_SHARED = 40  # tokens, of the longer prompts
# Of Qwen3-Next and Qwen3.5, and of their mixtures.
HYBRID = {
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "full_attention_interval": 2,
    "max_position_embeddings": 512,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# Room on the device for one of the longer prompts, so that others fall out.
FEW: dict[str, Any] = {"num_pages": 24, "max_seq_len_override": 92, "state_cache": 0.01}


@dataclass(frozen=True)
class StateCase:
    folder: Path
    prompts: list[list[int]]
    runs: list[GreedyRun]


def drafter_of(case: StateCase) -> KnowingDrafter:
    """Drafts what the requests of the case are known to get, and at times something else."""
    runs = zip(case.prompts, case.runs, strict=True)
    return KnowingDrafter("fading", [prompt + run.token_ids for prompt, run in runs], 257)


def save_case(model: PreTrainedModel, folder: Path) -> StateCase:
    """Save a model, whose vocabulary has 257 tokens, and run it on prompts of LENGTHS."""
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(2, 257, (NUM_SHARED,), generator=generator).tolist()
    prompts = []
    for length in LENGTHS:
        own = torch.randint(2, 257, (length,), generator=generator).tolist()
        prompts.append((shared + own)[:length] if length > NUM_SHARED else own)
    runs = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert all(len({*run.token_ids}) > 5 for run in runs)
    return StateCase(folder, prompts, runs)


def check_hits(case: StateCase, **options: Any) -> int:
    """Ask each prompt twice, and alone: the second time it is found up to its last page. Returns
    how many tokens came from host memory."""

    async def run() -> int:
        async with AsyncEngine(load_engine(case.folder, page_size=4, **options)) as engine:
            cached: list[int] = []
            for place in (*range(len(LENGTHS)), *range(len(LENGTHS))):
                (output,) = await batch(engine, [case.prompts[place]], [greedy(NUM_TOKENS)])
                cached.append(output.num_cached_tokens)
                assert output.token_ids == case.runs[place].token_ids, "a token differs"
            num_host_tokens = engine.stats().counters.num_host_tokens
        assert cached == [0, 0, 0, 0, 0, *((length - 1) // 4 * 4 for length in LENGTHS)]
        return num_host_tokens

    return asyncio.run(run())


def check_restart(case: StateCase, folder: Path, **options: Any) -> None:
    """Ask each prompt of three engines with the same disk: the second finds all, and where a file
    is lost that has some, the third computes it. Any hit pays."""
    given = {"page_size": 4, "host_cache": 0.02, "disk_cache": str(folder), **FEW, **options}

    async def run() -> tuple[list[int], int]:
        async with AsyncEngine(load_engine(case.folder, **given)) as engine:
            cached: list[int] = []
            for prompt, wanted in zip(case.prompts, case.runs, strict=True):
                (output,) = await batch(engine, [prompt], [greedy(NUM_TOKENS)])
                cached.append(output.num_cached_tokens)
                assert output.token_ids == wanted.token_ids, "a token differs"
            return cached, engine.stats().counters.num_disk_tokens

    assert asyncio.run(run()) == ([0, 0, 0, 0, 0], 0)
    every = [(length - 1) // 4 * 4 for length in LENGTHS]
    cached, num_disk_tokens = asyncio.run(run())
    assert cached == every and num_disk_tokens > NUM_SHARED
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    files = sorted(path for path, size in sizes.items() if size > 500)
    files[len(files) // 2].unlink()
    cached, _ = asyncio.run(run())
    assert all(num <= most for num, most in zip(cached, every, strict=True))


def check_handover(case: StateCase, folder: Path, **options: Any) -> None:
    """Compute each prompt in one engine, and go on in another one, which finds all of it."""
    given = {"page_size": 4, "host_cache": 0.02, **FEW, **options}

    async def run() -> None:
        async with (
            AsyncEngine(load_engine(case.folder, **given)) as prefill,
            AsyncEngine(load_engine(case.folder, **given)) as decode,
        ):
            address = await prefill.pages.share(str(folder / "a"), always_load=False)
            await decode.pages.share(str(folder / "b"), always_load=True)
            for prompt, wanted in zip(case.prompts, case.runs, strict=True):
                num_found = (len(prompt) - 1) // 4 * 4
                assert await prefill.pages.offer(prompt) == bool(num_found)
                if num_found:
                    assert await decode.pages.fetch(address, prompt)
                (output,) = await batch(decode, [prompt], [greedy(NUM_TOKENS)])
                assert output.token_ids == wanted.token_ids, "a token differs"
                assert output.num_cached_tokens == num_found
            received = decode.stats().transfers
            assert received is not None and received.received.num_transfers == 4

    asyncio.run(run())
