"""`serve --roles`: prompts computed by one engine and continued by another, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.cache_kinds import FULL, STATES, WINDOWED, reference_of
from support.checkpoints import greedy_reference
from support.forked_replicas import forked_demo
from support.processes import (
    children_of,
    replica_sockets,
    wait_for_ready,
    wait_until_nothing_is_left,
)
from support.serving_processes import demo
from support.toy_tokenizers import byte_level_backend

from minisgl.config import EngineConfig, machine
from minisgl.errors import ConfigError
from minisgl.router.config import RouterConfig
from minisgl.router.process import RouterProcess, with_pages_shared
from minisgl.server.config import ServerConfig

PATH = "/v1/completions"
NUM_TOKENS = 600  # of a prompt, whose text in a body is long enough for a transfer
PREFILLS = "minisgl_router_prefills_total"
TRANSFERS = "minisgl_kv_transfers_total"
DIRECT = "minisgl_kv_transfers_direct_total"
BYTES, SECONDS = "minisgl_kv_transfer_bytes_total", "minisgl_kv_transfer_seconds_total"
FALLBACKS = "minisgl_kv_transfer_fallbacks_total"
LOST = (PREFILLS, FALLBACKS, "minisgl_router_replica_ready")
RUNNING = ("minisgl_running_requests", "0")


def prompt(seed: int, shared: int = 0) -> list[int]:
    """Token ids, of which the first `shared` are those of all seeds."""
    own = random.Random(seed)
    every = random.Random(0)
    return [every.randrange(300, 2000) for _ in range(shared)] + [
        own.randrange(300, 2000) for _ in range(NUM_TOKENS - shared)
    ]


async def ask(
    client: httpx.AsyncClient,
    token_ids: list[int] | list[list[int]],
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    body = {"prompt": token_ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    answer = await client.post(PATH, json={**body, "return_token_ids": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def cached_tokens(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def counted(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """The samples of /metrics by name and the values of their labels but that of the router."""
    page = (await client.get("/metrics")).text
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "router")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def ranks_of(folder: Path, replica: int) -> list[int]:
    """The processes of a replica's ranks; none while it is not running."""
    children = children_of(folder)
    name = str(replica)
    own = [
        pid
        for pid, part in children.items()
        if {"replica-process", "replica"} & {*part} and part[-1] == name
    ]
    forked = [["rank", "of", str(pid)] for pid in own]
    others = [
        pid
        for pid, part in children.items()
        if part in forked or ("spawn_main" in " ".join(part) and parent_of(pid) in own)
    ]
    return [*own, *others]


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def wait_for_successor(folder: Path, replica: int, killed: list[int]) -> None:
    while not (found := ranks_of(folder, replica)) or found[0] == killed[0]:
        time.sleep(0.02)


async def test_disaggregated_and_whole_give_the_same_tokens_and_a_killed_engine_loses_no_request(
    tmp_path: Path,
) -> None:
    options = ("--replicas", "2", "--roles", "prefill,decode", "--num-pages", "300", "--tp", "2")
    with demo(tmp_path, *options) as (process, url):
        await asyncio.to_thread(wait_for_ready, process, url, 2)
        decode = httpx.AsyncHTTPTransport(uds=replica_sockets(tmp_path)[1])
        async with (
            httpx.AsyncClient(base_url=url) as client,
            httpx.AsyncClient(base_url="http://localhost", transport=decode) as alone,
        ):
            prompts = [prompt(seed, shared=100 * (seed % 2)) for seed in range(1, 5)]
            wholes = [tokens_of(await ask(alone, each, cache_salt="whole")) for each in prompts]

            # All APIs hand over alike.
            first = await asyncio.gather(*(ask(client, each) for each in prompts[:3]))
            assert [tokens_of(each) for each in first] == wholes[:3]
            counts = {key: n for key, n in (await counted(client)).items() if key[0] in LOST}
            assert all(cached_tokens(each) > NUM_TOKENS - 16 - 240 for each in first), (
                [cached_tokens(each) for each in first],
                counts,  # by whom a prompt was not handed over; the log says why
            )
            chat = {"messages": [{"role": "user", "content": "the " * 600}], "max_tokens": 4}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
            while (seen := await counted(client))[TRANSFERS, "0", "sent"] < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the other engine may be the first to know
            assert seen[PREFILLS, "done"] == seen[TRANSFERS, "0", "sent"] == 4
            assert seen[TRANSFERS, "1", "received"] == 4
            assert 0 < seen[DIRECT, "0", "sent"] == seen[DIRECT, "1", "received"]
            assert seen[BYTES, "0", "sent"] == seen[BYTES, "1", "received"] > 0
            assert seen[SECONDS, "0", "sent"] > 0 and seen[SECONDS, "1", "received"] > 0
            assert seen[PREFILLS, "failed"] == seen[FALLBACKS, "1"] == 0

            # A next turn goes straight to the replica that has the conversation; keys of clients
            # do not open the replicas' own ways.
            turn = [*prompts[0], *wholes[0][0], 5, 6, 7]
            answer = await ask(client, turn, headers={"x-minisgl-prefill": "1"})
            assert len(tokens_of(answer)[0]) == 8
            assert cached_tokens(answer) >= NUM_TOKENS - 16
            assert (await counted(client))[PREFILLS, "done"] == 4

            # A transfer that fails: nobody has offered this.
            answer = await ask(alone, prompts[3], headers={"x-minisgl-prefilled": "/nowhere"})
            assert tokens_of(answer) == wholes[3] and cached_tokens(answer) == 0
            assert (await counted(client))[FALLBACKS, "1"] == 1

            # Until a replica dies its stopped rank holds up the prompts. For one that loses a rank
            # whose process is not its own see below.
            ranks = ranks_of(tmp_path, replica=0)
            os.kill(ranks[1], signal.SIGSTOP)
            asked = [
                asyncio.ensure_future(ask(client, each, cache_salt="killed"))
                for each in prompts[2:4]
            ]
            while (await counted(client))[RUNNING] < len(asked):  # noqa: ASYNC110 - asks a server
                await asyncio.sleep(0)
            os.kill(ranks[0], signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            assert [tokens_of(each) for each in answers] == wholes[2:4]
            assert tokens_of(await ask(client, prompts[3], cache_salt="new")) == wholes[3]
            await asyncio.to_thread(wait_for_successor, tmp_path, 0, ranks)
            await asyncio.to_thread(wait_for_ready, process, url, 2)
            again = await ask(client, prompts[3], cache_salt="again")
            assert tokens_of(again) == wholes[3] and cached_tokens(again) >= NUM_TOKENS - 16

            # Without an engine for decode the other one does whole requests.
            os.kill(ranks_of(tmp_path, replica=1)[0], signal.SIGKILL)
            assert tokens_of(await ask(client, prompts[0])) == wholes[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        wait_until_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("kind", "ranks", "is_killed"),
    [
        (STATES, "--tp", True),
        (WINDOWED, "--pp", False),
        (FULL, "--pp", False),
        (FULL, "--dp-attention --tp", False),
    ],
)
async def test_engines_hand_over_what_any_kind_of_model_keeps_and_may_be_killed(
    kind: str, ranks: str, is_killed: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, folder, model = reference_of(kind)
    folder = shutil.copytree(folder, tmp_path_factory.mktemp("models") / "small")
    byte_level_backend().save(str(folder / "tokenizer.json"))
    every = random.Random(0)
    prompts = [[every.randrange(100, 250) for _ in range(300)] for _ in range(4)]
    wholes = [greedy_reference(model, each, 8).token_ids for each in prompts]
    ways = (*ranks.split(), "2", "--replicas", "2", "--roles", "prefill,decode")
    few = ("--max-running-requests", "4", "--max-prefill-length", "128", "--num-pages", "120")
    options = ("--model", str(folder), *ways, *few, "--device", "cpu")
    with forked_demo(tmp_path, *options) as (process, url):
        await asyncio.to_thread(wait_for_ready, process, url, 2)
        assert all(len(ranks_of(tmp_path, replica)) == 2 for replica in range(2))
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await ask(client, prompts[:2])
            assert tokens_of(answer) == wholes[:2] and cached_tokens(answer) == 2 * 288
            while (seen := await counted(client))[TRANSFERS, "0", "sent"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the other engine may be the first to know
            assert seen[TRANSFERS, "1", "received"] == 2 and seen[PREFILLS, "done"] == 1
            assert seen[BYTES, "0", "sent"] == seen[BYTES, "1", "received"] > 0
            assert seen[DIRECT, "1", "received"] == (2 if kind == FULL else 0)
            assert seen[FALLBACKS, "1"] == 0

            if is_killed:
                pids = ranks_of(tmp_path, replica=0)
                os.kill(pids[1], signal.SIGSTOP)
                asked = asyncio.ensure_future(ask(client, prompts[2:]))
                while not (await counted(client))[RUNNING]:  # noqa: ASYNC110 - asks a server
                    await asyncio.sleep(0)
                os.kill(pids[1], signal.SIGKILL)
                assert tokens_of(await asked) == wholes[2:]
                answer = await ask(client, prompts[2], cache_salt="new")
                assert tokens_of(answer) == wholes[2:3]
                assert (await counted(client))[PREFILLS, "failed"] > seen[PREFILLS, "failed"]
                await asyncio.to_thread(wait_for_successor, tmp_path, 0, pids)
                await asyncio.to_thread(wait_for_ready, process, url, 2)
                answer = await ask(client, prompts[:2], cache_salt="again")
                assert tokens_of(answer) == wholes[:2] and cached_tokens(answer) == 2 * 288
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        wait_until_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"roles": "prefill,guess"}, "prefill or decode"),
        ({"roles": "decode,decode"}, "at least one replica for prefill"),
        ({"roles": "prefill,decode", "replicas": 3}, "has 2, and there are --replicas 3"),
        ({"roles": "prefill,decode", "replicas": 1}, "requires --replicas 2"),
    ],
)
def test_roles_that_do_not_fit_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RouterConfig(**{"replicas": 2, **options})


@pytest.mark.parametrize("roles", ["", "prefill,decode"])
def test_replicas_are_on_one_node_with_any_layout(roles: str) -> None:
    def make(**options: Any) -> RouterProcess:
        router = RouterConfig(replicas=2, roles=roles)
        engine = EngineConfig(device="cpu", **options)
        return RouterProcess(engine, ServerConfig(), router, replica=(), front=())

    with pytest.raises(ConfigError, match="--nnodes 2: replicas are on one node; allowed: 1"):
        make(tp=2, nnodes=2)
    make(tp=2, dp_attention=True)
    make(tp=2, parallel="auto")
    make(pp=2)
    make(tp=2)


def test_pages_travel_through_a_host_cache_that_fits_the_machine_or_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = with_pages_shared(EngineConfig(host_cache=3.0), 2)
    assert given == EngineConfig(host_cache=3.0)
    chosen = with_pages_shared(EngineConfig(), 2).host_cache
    assert 0 < chosen <= 16
    assert with_pages_shared(EngineConfig(), 100).host_cache < chosen
    limits = [tmp_path / "memory.max", tmp_path / "limit_in_bytes"]
    monkeypatch.setattr(machine, "CGROUP_LIMITS", limits)
    for limit, gb in zip(limits, (1.0, 0.5), strict=True):
        limit.write_text(f"{int(gb * 1e9)}\n")
        assert with_pages_shared(EngineConfig(), 2).host_cache == gb / 4
    limits[1].write_text("max\n")
    assert with_pages_shared(EngineConfig(), 2).host_cache == 0.25
