"""Networks that draft on a GPU, in captured steps and without: no token changes, and a model
accepts what it drafts for itself."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from dummy_config import config_of
from support.draft_policies import drafting

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import load
from minisgl.request import SamplingParams

pytestmark = pytest.mark.gpu

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(1000) for _ in range(length)] for length in (3, 40, 200, 64)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=49, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=49, ignore_eos=True),
]


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], int, int]:
    """The tokens, and how many drafts were verified and accepted, in each step as many as there may
    be: a network has no part of a context that steps without drafts have computed."""
    (folder / "config.json").write_text(json.dumps(config_of("Qwen3-0.6B")))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        num_pages=200,
        max_running_requests=8,
        **{"device": "cuda", "attn": "triton", **options},
    )

    async def run() -> tuple[list[list[int]], int, int]:
        loaded = load(config)
        async with AsyncEngine(drafting(loaded)) as engine:
            streams = [
                engine.submit(prompt, PARAMS[place % 2]) for place, prompt in enumerate(PROMPTS)
            ]
            for stream in streams:
                await stream.wait_finished()
            engine.audit()
        requests = [stream.request for stream in streams]
        return (
            [request.output_token_ids for request in requests],
            sum(request.num_drafted_tokens for request in requests),
            sum(request.num_accepted_tokens for request in requests),
        )

    return asyncio.run(run())


@pytest.mark.parametrize("graphs", [0, 8])
def test_a_model_accepts_what_it_drafts_for_itself(graphs: int, tmp_path: Path) -> None:
    expected, none, _ = answers(tmp_path, cuda_graph_max_bs=graphs)
    tokens, drafted, accepted = answers(
        tmp_path, cuda_graph_max_bs=graphs, speculative=str(tmp_path)
    )
    assert tokens == expected and not none
    # One row at a time and several at once round differently in near-ties.
    assert drafted > 0 and accepted >= 0.95 * drafted


@pytest.mark.parametrize("graphs", [0, 8])
def test_a_head_of_random_weights_changes_no_token(graphs: int, tmp_path: Path) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    model.mkdir()
    head.mkdir()
    values = config_of("Qwen3-0.6B") | {"num_hidden_layers": 1, "draft_vocab_size": 32000}
    (head / "config.json").write_text(json.dumps(values | {"model_type": "llama"}))
    expected, *_ = answers(model, cuda_graph_max_bs=graphs)
    tokens, drafted, _ = answers(model, cuda_graph_max_bs=graphs, speculative=str(head))
    assert tokens == expected and drafted > 0
