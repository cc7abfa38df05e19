"""Models with a state for each request on a GPU: hits and captured steps change no token."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from dummy_config import config_of

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.request import SamplingParams

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
RNG = random.Random(0)
SHARED = [RNG.randrange(1000) for _ in range(100)]
PROMPTS = [
    [*SHARED[:shared], *(RNG.randrange(1000) for _ in range(own))]
    for shared, own in ((100, 1), (100, 60), (70, 9), (0, 3), (100, 300), (0, 64))
]


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], list[int]]:
    """The tokens of all prompts together and of each once more beside a running answer, and what
    those found in the prefix cache."""
    (folder / "config.json").write_text(json.dumps(config_of("Qwen3.5-tiny")))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        page_size=16,
        num_pages=400,
        max_running_requests=8,
        **{"device": "cuda", "attn": "triton", **options},
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def run() -> tuple[list[list[int]], list[int]]:
        async with await AsyncEngine.start(config) as engine:
            streams = [engine.submit(prompt, params) for prompt in PROMPTS]
            for stream in streams:
                await stream.wait_finished()
            endless = SamplingParams(max_tokens=2000, ignore_eos=True)
            beside = engine.submit(SHARED[:5], endless)
            for prompt in PROMPTS:
                streams.append(engine.submit(prompt, params))
                await streams[-1].wait_finished()
            beside.abort()
            engine.audit()
        requests = [stream.request for stream in streams]
        tokens = [request.output_token_ids for request in requests]
        return tokens, [request.num_cached_tokens for request in requests[len(PROMPTS) :]]

    return asyncio.run(run())


@pytest.mark.parametrize("graphs", [0, 8])
def test_hits_and_captured_steps_change_no_token(graphs: int, tmp_path: Path) -> None:
    computed, found_none = answers(tmp_path, cuda_graph_max_bs=0, state_cache=0)
    tokens, found = answers(tmp_path, cuda_graph_max_bs=graphs)
    assert not any(found_none)
    assert found == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert len({token for answer in computed for token in answer}) > 20
    assert tokens == computed
    drafting = {"speculative": "mtp", "draft_tokens": 3}
    assert answers(tmp_path, cuda_graph_max_bs=graphs, **drafting) == (tokens, found)
