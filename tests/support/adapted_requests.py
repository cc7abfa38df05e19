"""Requests of many adapters and none, in the same steps: each gets the tokens of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.checkpoints import GreedyRun, greedy_reference, load_reference
from support.parity import FOLDER, NOISE, Case, case_of, greedy, load_engine
from torch import Tensor, nn
from transformers import PreTrainedModel

from minisgl.engine import AsyncEngine
from minisgl.request import Request, SamplingParams

NUM_ADAPTERS, NUM_REQUESTS, NUM_TOKENS = 8, 32, 16
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class Asked:
    """Requests, of which each has an adapter or none, and their greedy tokens by PEFT."""

    case: Case
    options: dict[str, Any]  # that load the adapters
    prompts: list[list[int]]
    names: list[str | None]
    runs: list[GreedyRun]


@torch.no_grad()
def write_merged(model: PreTrainedModel, folder: Path, *, rank: int, seed: int) -> None:
    """Write a random adapter of all linear layers but the head, and of all experts, in the form of
    PEFT, and add what it computes to the weights of the model."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()

    def pair(path: str, n: int, k: int, num_experts: int = 1) -> tuple[Tensor, Tensor]:
        a = torch.randn(num_experts * rank, k, generator=generator) / k**0.5
        b = 0.3 * torch.randn(n, rank * num_experts, generator=generator)
        name = f"base_model.model.{path}"
        tensors.update({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
        return a, b

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            a, b = pair(path, *module.weight.shape)
            module.weight += 2 * b @ a
        elif path.endswith(".experts"):  # the number of the expert changes fastest in B
            for stacked, of in (("gate_up_proj", f"{path}.base_layer"), ("down_proj", path)):
                weights = getattr(module, stacked)
                num_experts, n, k = weights.shape
                a, b = pair(of, n, k, num_experts)
                of_experts = b.view(n, rank, num_experts).permute(2, 0, 1)
                weights += 2 * of_experts @ a.view(num_experts, rank, k)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@cache
def asked_of(name: str) -> Asked:
    """Adapters of ranks 1 to 8. A prompt is asked with several of them."""
    case = case_of(name)
    folders = [Path(FOLDER.name) / f"{name}-adapter-{number}" for number in range(NUM_ADAPTERS)]
    models = [load_reference(case.folder)]
    for number, folder in enumerate(folders):
        model = load_reference(case.folder)
        write_merged(model, folder, rank=1 + number, seed=number)
        models.append(model)
    names = [None, *(f"a{number}" for number in range(NUM_ADAPTERS))]
    prompts = [case.prompts[index % len(case.prompts)] for index in range(NUM_REQUESTS)]
    which = [index * 5 % len(models) for index in range(NUM_REQUESTS)]
    runs = [
        greedy_reference(models[model], prompt, NUM_TOKENS)
        for prompt, model in zip(prompts, which, strict=True)
    ]
    lora = tuple(f"a{number}={folder}" for number, folder in enumerate(folders))
    loading = {"lora": lora, "max_lora_rank": 16}
    return Asked(case, loading, prompts, [names[model] for model in which], runs)


async def answer(
    engine: AsyncEngine, prompt: Sequence[int], name: str | None, params: SamplingParams
) -> Request:
    extras = () if name is None else (engine.adapter(name),)
    stream = engine.submit(prompt, params, extras=extras)
    async for _ in stream:
        engine.audit()
    return stream.request


def answers(
    asked: Asked, params: Sequence[SamplingParams], *, together: bool = True, **options: Any
) -> list[Request]:
    async def run() -> list[Request]:
        loaded = load_engine(asked.case.folder, **asked.options, **options)
        async with AsyncEngine(loaded) as engine:
            jobs = [
                answer(engine, *job) for job in zip(asked.prompts, asked.names, params, strict=True)
            ]
            if together:
                return list(await asyncio.gather(*jobs))
            return [await job for job in jobs]

    return asyncio.run(run())


def check_greedy(found: Sequence[int], run: GreedyRun) -> None:
    """Up to a token whose two best logits are equal within the noise."""
    for step, (token, wanted) in enumerate(zip(found, run.token_ids, strict=True)):
        if token != wanted:
            assert run.margins[step] < NOISE * float(run.logits[step].abs().max()), step
            return


def both() -> list[SamplingParams]:
    """Every fourth request is seeded, the others are greedy."""
    return [SEEDED if index % 4 == 3 else greedy(NUM_TOKENS) for index in range(NUM_REQUESTS)]


@cache
def alone(name: str) -> list[list[int]]:
    """The tokens of requests that come one after the other."""
    found = answers(asked_of(name), both(), together=False)
    return [request.output_token_ids for request in found]


def check(name: str, **options: Any) -> list[Request]:
    asked = asked_of(name)
    found = answers(asked, both(), max_loras=3, **options)
    for request, params, run, own in zip(found, both(), asked.runs, alone(name), strict=True):
        if params is SEEDED:
            assert request.output_token_ids == own
        else:
            check_greedy(request.output_token_ids, run)
    return found
