"""One engine over two nodes, real processes over gloo: tokens, structured output, and failures."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from support.demo_adapters import save_demo_adapter
from support.fake_matcher import FakeMatcher, ending_at, held_to, tokens_after
from support.http_server import HELLO, wait_for_health
from support.nodes import TOKEN, Network, Node, network, node, script
from support.ports import free_port
from support.serving import demo_engine
from support.waiting import wait_until

from minisgl import LLM
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError, EngineStoppedError
from minisgl.kvcache.copies import LoadRule
from minisgl.lora.files import AdapterError
from minisgl.ranks.processes import remote_ranks
from minisgl.request import SamplingParams
from minisgl.server import run
from minisgl.server.config import ServerConfig

ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Aachen", "Cologne"]}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
ACTOR = """
import logging, sys
from concurrent.futures import ThreadPoolExecutor

from minisgl.config import EngineConfig
from minisgl.engine.startup import work_for_node_0

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    places = dict({option}=2, nnodes=2, node_rank=1, master_port={port})
    config = EngineConfig(device="cpu", max_loras=1, **places)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work_for_node_0, config).result()
    print("done", file=sys.stderr)
"""
# Of a process that torchrun has started on the second of two machines.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}


def both(port: int) -> tuple[str, ...]:
    return ("--tp", "2", "--nnodes", "2", "--master-port", str(port))


async def tokens(engine: AsyncEngine) -> list[list[int]]:
    """Those of greedy and sampled rows, of which two thirds are masked by fake matchers."""
    rule = tokens_after(engine.vocab_size, 5)
    rules = [None, rule, ending_at(7, rule)] * 4
    streams = [
        engine.submit(
            [index + 5, *range(20, 20 + 4 * index)],
            SamplingParams(max_tokens=12, temperature=index % 2, seed=index),
            extras=held_to(None if rule is None else FakeMatcher(rule)),
        )
        for index, rule in enumerate(rules)
    ]
    for stream in streams:
        async for _ in stream:
            engine.audit()
    return [stream.request.output_token_ids for stream in streams]


async def adapted_tokens(engine: AsyncEngine, folder: Path) -> list[list[int]]:
    """Those of a prompt with an adapter, which is loaded for it, and without."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    await engine.adapters.load("a", str(folder))
    streams = [
        engine.submit([*range(300, 320)], params, extras=extras)
        for extras in ((engine.adapter("a"),), ())
    ]
    for stream in streams:
        await stream.wait_finished()
    return [stream.request.output_token_ids for stream in streams]


@pytest.mark.parametrize("option", ["tp", "pp"])
async def test_two_nodes_give_the_tokens_of_one_rank_under_masks_too_and_end_in_order(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """Node 0 is in this process, and node 1 a thread of a program, as in an actor of Ray. An
    adapter is loaded while they run, by the ranks of both."""
    save_demo_adapter(tmp_path / "adapter", seed=0)
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)
    actor = tmp_path / "actor.py"
    actor.write_text(ACTOR.format(option=option, port=port))
    options: dict[str, Any] = {option: 2, "nnodes": 2, "master_port": port, "max_loras": 1}
    with script(actor) as other:
        async with await demo_engine(**options) as engine:
            found = await tokens(engine)
            with pytest.raises(AdapterError, match="has no file"):
                await engine.adapters.load("a", str(tmp_path / "absent"))
            adapted = await adapted_tokens(engine, tmp_path / "adapter")
            assert other.pids()
        assert other.process.wait() == 0, other.log
        wait_until(lambda: not other.pids())
        assert "Node 0 has ended, and so does this node" in other.log
        assert other.log.endswith("done\n")
    async with await demo_engine(max_loras=1) as alone:
        assert found == await tokens(alone)
        assert adapted == await adapted_tokens(alone, tmp_path / "adapter")
    assert len({*map(tuple, adapted)}) == 2


async def test_a_rank_of_another_node_tells_of_its_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """Of requests of its own, which would wait for ever otherwise."""
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    few = {"page_size": 4, "num_pages": 40, "host_cache": 0.05, "dp_attention": True}
    actor = tmp_path / "actor.py"
    given = ", ".join(f"{name}={value}" for name, value in few.items())
    actor.write_text(ACTOR.format(option=f"{given}, tp", port=port))
    prompts = [[*range(first, first + 100)] for first in (5, 200)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found: list[list[list[int]]] = []
    with script(actor) as other:
        options: dict[str, Any] = {"nnodes": 2, "master_port": port, "max_loras": 1, **few}
        async with await demo_engine(tp=2, **options) as engine:
            for asked in (prompts, [[3] * 148, [4] * 148], prompts):
                streams = [engine.submit(prompt, params) for prompt in asked]
                for stream in streams:
                    async for _ in stream:
                        engine.audit()
                found.append([stream.request.output_token_ids for stream in streams])
            assert all(cache.loads.num_begun for cache in engine._scheduler.kv.of_ranks)
            assert engine.stats().counters.num_host_tokens > 100
        assert other.process.wait() == 0, other.log
    assert found[0] == found[2]


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What would have ended this process. It leaves the group of its ranks instead, so that later
    tests can form another."""
    found: list[str] = []
    monkeypatch.setattr(remote_ranks, "_exit", lambda: found.append("a rank was lost"))
    monkeypatch.setattr(remote_ranks, "EXIT_AFTER_S", 0.1)
    yield found
    if dist.is_initialized():
        dist.destroy_process_group()


async def test_a_killed_rank_of_another_node_ends_every_answer_and_both_nodes_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: list[str], port: int
) -> None:
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)
    torchrun = TORCHRUN | {"MASTER_PORT": str(port - 1)}
    with node(tmp_path, "--tp", "2", env=torchrun) as other:
        async with await demo_engine(tp=2, nnodes=2, master_port=port) as engine:
            streams = [engine.submit([1, 2, 3], ENDLESS) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            pid = other.rank()
            os.kill(pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineStoppedError) as caught:
                    async for _ in stream:
                        pass
            reason = f"Rank 1 (process {pid}) was killed by SIGKILL."
            assert str(caught.value) == f"Node 1 (127.0.0.1): {reason}"
        wait_until(lambda: bool(exits))  # nothing else ends what waits for the dead
        assert other.process.wait() == 1
        assert "Node 1 of 2: works for node 0" in other.log and "serves no HTTP" in other.log
        assert f"This node ends: Node 1 (127.0.0.1): {reason}" in other.log
        wait_until(lambda: not other.pids())


def test_another_node_is_no_place_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="node_rank=1: only node 0 takes requests; start the o"):
        LLM(device="cpu", tp=2, nnodes=2, node_rank=1)
    for name, value in (TORCHRUN | {"LOCAL_RANK": "1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert run(EngineConfig(tp=2), ServerConfig(port=0)) == 0  # as of no use


@pytest.fixture
def pair(tmp_path: Path, port: int) -> Iterator[tuple[Node, Node, Network, str]]:
    """Node 0 at 127.0.0.1, node 1 that reaches it over a network at 127.0.0.2, and the URL."""
    with (
        free_port() as http,
        network("127.0.0.2", ("127.0.0.1", port)) as between,
        node(tmp_path, *both(port), "--port", str(http)) as main,
        node(
            tmp_path,
            *both(between.port),
            *("--master-addr", "127.0.0.2", "--node-rank", "1"),
        ) as other,
    ):
        url = f"http://127.0.0.1:{http}"
        wait_for_health(main.process, url, 200)
        yield main, other, between, url


def test_two_servers_answer_as_one_and_a_cut_network_ends_both_with_a_reason(
    pair: tuple[Node, Node, Network, str],
) -> None:
    main, other, between, url = pair
    with httpx.Client(base_url=url) as client:
        body: dict[str, Any] = {"messages": HELLO, "max_tokens": 64, "temperature": 0}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        answer = client.post("/v1/chat/completions", json=body | {"response_format": schema})
        content = json.loads(answer.json()["choices"][0]["message"]["content"])
        assert content["city"] in ("Aachen", "Cologne") and isinstance(content["size"], int)

        os.kill(other.process.pid, signal.SIGTERM)  # once is not enough while node 0 goes on
        wait_until(lambda: "node 0 decides when the engine ends" in other.log)

        errors: list[dict[str, Any]] = []
        begun = threading.Barrier(3)

        def stream() -> None:
            endless = body | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=endless) as streamed:
                lines = filter(None, streamed.iter_lines())
                next(lines)
                begun.wait()
                events = list(lines)
            assert events[-1] == "data: [DONE]"
            errors.append(json.loads(events[-2].removeprefix("data: "))["error"])

        streams = [threading.Thread(target=stream) for _ in range(2)]
        for one in streams:
            one.start()
        begun.wait()
        pids = [*main.pids(), *other.pids()]
        # What the ranks send each other does not pass here; a stopped one is as silent.
        os.kill(other.rank(), signal.SIGSTOP)
        between.cut()
        for one in streams:
            one.join()
    # As soon as the silence is longer than any that was promised, and two heartbeats at most later.
    lost = r"has given no sign of life for (8|9|10) s"
    assert len(errors) == 2
    assert all(re.search(r"Node 1 \(127.0.0.1\) " + lost, error["message"]) for error in errors)
    assert main.process.wait() == 1 and other.process.wait() == 1
    assert re.search(r"Node 1 \(127.0.0.1\) " + lost, main.log)
    assert re.search("This node ends: Node 0 " + lost, other.log)
    wait_until(lambda: not main.pids() and not other.pids())
    assert pids
