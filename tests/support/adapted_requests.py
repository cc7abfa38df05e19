"""Requests of many adapters and none, in the same steps: each gets the tokens of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import GreedyRun, greedy_reference, load_reference
from support.followed import followed
from support.parity import FOLDER, NOISE, Case, case_of, greedy, load_engine
from support.waiting import until
from torch import Tensor, nn
from transformers import PreTrainedModel

from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.errors import InvalidRequestError, ModelNotFoundError
from minisgl.request import Request, SamplingParams

NUM_ADAPTERS, NUM_REQUESTS, NUM_TOKENS = 8, 18, 16
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
def write_merged(
    model: PreTrainedModel, folder: Path, *, rank: int, seed: int, within: str = ""
) -> None:
    """Write a random adapter of all linear layers but the head, and of all experts, in the form of
    PEFT, and add what it computes to the weights of the model. within: of modules whose path has
    this part."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()

    def pair(path: str, n: int, k: int, num_experts: int = 1) -> tuple[Tensor, Tensor]:
        a = torch.randn(num_experts * rank, k, generator=generator) / k**0.5
        b = 0.3 * torch.randn(n, rank * num_experts, generator=generator)
        name = f"base_model.model.{path}"
        tensors.update({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
        return a, b

    for path, module in model.named_modules():
        if within not in path:
            continue
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
    return await followed(engine, engine.submit(prompt, params, extras=extras))


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


# -- adapters that come and go --------------------------------------------------------------------

ROOM = {"max_loras": 2, "max_lora_rank": 16, "page_size": 4}


def folder_of(asked: Asked, name: str) -> str:
    return dict(each.split("=", 1) for each in asked.options["lora"])[name]


def loaded_of(asked: Asked, **options: Any) -> Loaded[Any]:
    return load_engine(asked.case.folder, **{**ROOM, **options})


def numbers_on(loaded: Loaded[Any]) -> list[int]:
    """The numbers of the adapters that rank 0 has in host memory."""
    reader: Any = loaded.adapters
    return sorted(getattr(reader, "_own", reader)._adapters)


def of_name(asked: Asked, name: str | None, start: int = 0) -> int:
    """The next request with this adapter."""
    return asked.names.index(name, start)


async def check_one(engine: AsyncEngine, asked: Asked, index: int, name: str | None) -> None:
    """A request gets the tokens that PEFT has for it."""
    request = await answer(engine, asked.prompts[index], name, greedy(16))
    check_greedy(request.output_token_ids, asked.runs[index])


def check_coming_and_going(name: str, **options: Any) -> None:
    """More than there are places for; a name is given again to another adapter."""
    asked = asked_of(name)

    async def run() -> None:
        loaded = loaded_of(asked, **options)
        async with AsyncEngine(loaded) as engine:
            assert not engine.adapters and not numbers_on(loaded)
            beside = asyncio.gather(
                *(check_one(engine, asked, of_name(asked, None, start), None) for start in (0, 9))
            )
            for each in ("a0", "a1", "a2"):
                await engine.adapters.load(each, folder_of(asked, each))
            await beside
            assert [*engine.adapters] == ["a0", "a1", "a2"]
            await asyncio.gather(
                *(
                    check_one(engine, asked, index, each)
                    for index, each in enumerate(asked.names)
                    if each in (None, "a0", "a1", "a2")
                )
            )
            index = of_name(asked, "a0")
            params = greedy(16)
            adapter = engine.adapter("a0")  # of a request that is still being read
            stream = engine.submit(asked.prompts[index], params, extras=(adapter,))
            await anext(aiter(stream))
            await engine.adapters.unload("a0")
            with pytest.raises(ModelNotFoundError, match="has just been unloaded"):
                engine.submit(asked.prompts[index], params, extras=(adapter,))
            with pytest.raises(InvalidRequestError, match="no adapter a0; loaded: a1, a2"):
                engine.adapter("a0")
            await engine.adapters.load("a0", folder_of(asked, "a3"))
            is_kept = 0 in numbers_on(loaded)
            assert is_kept or stream.request.finished
            other = of_name(asked, "a3")
            await check_one(engine, asked, other, "a0")
            await stream.wait_finished()
            check_greedy(stream.request.output_token_ids, asked.runs[index])
            await until(lambda: numbers_on(loaded) == [1, 2, 3])
            engine.audit()

    asyncio.run(run())
