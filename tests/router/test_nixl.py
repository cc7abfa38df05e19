"""Replicas with roles whose KV pages NIXL reads. Skipped without NIXL, which CI has not."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import httpx
import pytest
from support.processes import replica_sockets, wait_for_ready
from support.serving_processes import demo

pytest.importorskip("nixl", reason="NIXL is not installed: scripts/tools/try_nixl.sh")
pytestmark = pytest.mark.nixl

PATH = "/v1/completions"


def test_pages_that_nixl_reads_give_the_same_tokens(tmp_path: Path) -> None:
    options = ("--replicas", "2", "--roles", "prefill,decode", "--num-pages", "300", "--tp", "2")
    with demo(tmp_path, *options) as (process, url):
        wait_for_ready(process, url, 2)
        assert process.stderr is not None
        log: list[str] = []

        def read_until(said: str, count: int) -> None:
            while sum(said in line for line in log) < count:
                assert process.stderr is not None
                log.append(process.stderr.readline())
                assert log[-1]

        read_until("KV pages can be read by NIXL", 2)  # said by the first rank of each
        decode = httpx.HTTPTransport(uds=replica_sockets(tmp_path)[1])
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            httpx.Client(base_url="http://localhost", transport=decode, timeout=60) as alone,
        ):
            for seed in range(6):
                rng = random.Random(seed)
                ids = [rng.randrange(300, 2000) for _ in range(600)]
                body = {"prompt": ids, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
                whole = alone.post(PATH, json={**body, "cache_salt": "whole"}).json()
                handed = client.post(PATH, json=body).json()
                assert handed["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
                assert handed["usage"]["prompt_tokens_details"]["host_cached_tokens"] == 592
        read_until("KV pages of another engine come by", 1)
        process.send_signal(signal.SIGTERM)
        log += process.stderr.readlines()
        assert process.wait(30) == 0
    assert not [line for line in log if " WARNING " in line or " ERROR " in line]
