"""Experts that an engine says its tokens have taken, compared with the routers of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from support.checkpoints import load_reference, make_checkpoint, random_prompt, spec_named

from minisgl.engine import AsyncEngine
from minisgl.parts.experts.host import experts_of
from minisgl.request import Request, SamplingParams

FOLDER = TemporaryDirectory()
NUM_TOKENS = 24
PARAMS = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, return_routed_experts=True
)
PLAIN = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def folder_of(name: str) -> Path:
    return make_checkpoint(spec_named(name), Path(FOLDER.name) / name)


@cache
def reference_of(name: str) -> Any:
    return load_reference(folder_of(name))


@torch.inference_mode()
def routed(name: str, token_ids: Sequence[int]) -> np.ndarray:
    """[tokens, layers, experts], those of a token in ascending order."""
    found = reference_of(name)(torch.tensor([list(token_ids)]), output_router_logits=True)
    top_k = reference_of(name).config.num_experts_per_tok
    of_layers = [logits.topk(top_k).indices for logits in found.router_logits]
    return torch.stack(of_layers, dim=1).sort(dim=-1).values.numpy()


def prompts_of(name: str) -> list[list[int]]:
    spec = spec_named(name)
    shared = random_prompt(spec, 32)
    return [shared + random_prompt(spec, length, seed=length) for length in (1, 9, 20, 40)]


async def run(engine: AsyncEngine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    """The requests of the prompts, each beside one that does not ask for experts."""
    streams = [engine.submit(prompt, params) for prompt in prompts for params in (PARAMS, PLAIN)]
    for stream in streams:
        await stream.wait_finished()
    assert all(experts_of(stream.request) is None for stream in streams[1::2])
    return [stream.request for stream in streams[::2]]


def check(name: str, request: Request) -> None:
    experts = experts_of(request)
    assert experts is not None and experts.dtype == np.int16
    wanted = routed(name, request.token_ids[:-1])
    assert np.array_equal(np.sort(experts, axis=-1), wanted)
