"""The experts that an engine says its tokens have taken, against the routers of transformers."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.http_server import http_client
from support.parity import load_engine
from support.resolving import MODEL, resolved
from support.routed_experts import PARAMS, check, folder_of, prompts_of, run

from minisgl.config import ExpertFacts
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError, InvalidRequestError
from minisgl.parts.experts.host import experts_of
from minisgl.request import Request

HELLO = [{"role": "user", "content": "Hello!"}]

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "captured": {"padded": 8},
    "chunks": {"max_prefill_length": 7},
    "retracted": {"num_pages": 18, "schedule_conservativeness": 0.01},
    "adopted": {"model_impl": "adopted"},
    "two ranks": {"tp": 2},
    "whole experts": {"tp": 2, "ep": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_experts_are_those_of_transformers_for_each_token(way: str) -> None:
    async def main() -> None:
        loaded = load_engine(folder_of("moe"), return_routed_experts=True, **WAYS[way])
        async with AsyncEngine(loaded) as engine:
            for _ in range(2):  # the prefixes are cached the second time
                for request in await run(engine, prompts_of("moe")):
                    check("moe", request)
                    assert way == "retracted" or not request.num_cached_tokens
            engine.audit()
            retracted = engine.stats().counters.num_retractions > 0
            assert retracted == (way == "retracted")

    asyncio.run(main())


def test_layers_without_experts_are_left_out_and_an_expert_of_all_rows_is_not_told() -> None:
    async def main(name: str) -> list[Request]:
        loaded = load_engine(folder_of(name), return_routed_experts=True)
        async with AsyncEngine(loaded) as engine:
            return await run(engine, prompts_of(name)[:2])

    for request in asyncio.run(main("moe-60")):
        check("moe-60", request)
    for request in asyncio.run(main("deepseek-v2")):
        experts = experts_of(request)
        assert experts is not None and experts.shape[1:] == (2, 3)  # the first layer has an MLP
        assert experts.min() == 0 and experts.max() == 7
        assert (np.diff(np.sort(experts, axis=-1)) > 0).all()


def test_an_engine_without_the_option_refuses_to_tell_experts() -> None:
    async def main() -> None:
        async with AsyncEngine(load_engine(folder_of("moe"))) as engine:
            with pytest.raises(InvalidRequestError, match="--return-routed-experts"):
                engine.submit([1, 2, 3], PARAMS)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_whole_answers_tell_experts_in_base64(path: str) -> None:
    asked = {"prompt": "ab"} if "chat" not in path else {"messages": HELLO}
    engine = FakeEngine()
    async with http_client(engine) as http:
        body = {"max_tokens": 2, **asked}
        answer = (await http.post(path, json={**body, "return_routed_experts": True})).json()
        [choice] = answer["choices"]
        assert base64.b64decode(choice["routed_experts"]) == b"\x01\x00\x02\x00"
        [choice] = (await http.post(path, json=body)).json()["choices"]
        assert "routed_experts" not in choice
        streamed = {**body, "return_routed_experts": True, "stream": True}
        response = await http.post(path, json=streamed)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "return_routed_experts"


@pytest.mark.parametrize(
    "options",
    [{"pp": 2}, {"tp": 2, "dp_attention": True}, {"speculative": "ngram"}],
)
def test_an_engine_whose_first_rank_does_not_see_all_experts_is_refused(
    options: dict[str, Any],
) -> None:
    experts = ExpertFacts(num_layers=2, num_experts=8, num_chosen=2, num_weights=100, size=64)
    model = replace(MODEL, experts=experts)
    assert resolved(model, return_routed_experts=True).routed_shape(model) == (2, 2)
    with pytest.raises(ConfigError, match="without --pp, --dp-attention and --speculative"):
        resolved(model, return_routed_experts=True, **options)
    with pytest.raises(ConfigError, match="this model has no experts"):
        resolved(return_routed_experts=True)
