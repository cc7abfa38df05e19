"""Replicas with roles whose KV pages NIXL reads. Skipped without NIXL (try_nixl.sh)."""

from __future__ import annotations

import random
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from support.processes import replica_sockets, wait_for_ready
from support.serving_processes import demo

pytest.importorskip("nixl", reason="NIXL is not installed: scripts/tools/try_nixl.sh")
pytestmark = pytest.mark.nixl

PATH = "/v1/completions"
# Run by each interpreter that finds it. On such a system pages go through host memory, which NIXL
# reads; else they would go from device to device.
NO_FILES_IN_MEMORY = "import os; del os.memfd_create"
THROUGH_HOST = "come through host memory: this system has no files in memory"


class Log:
    """What a process has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.lines: list[str] = []
        self._rest = process.stderr

    def read_until(self, said: str, count: int) -> None:
        """Wait for so many lines with these words."""
        while sum(said in line for line in self.lines) < count:
            self.lines.append(self._rest.readline())
            assert self.lines[-1], self.lines

    def read(self) -> None:
        """Wait for the end."""
        self.lines += self._rest.readlines()


def test_pages_that_nixl_reads_give_the_same_tokens(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("path")
    (path / "sitecustomize.py").write_text(NO_FILES_IN_MEMORY)
    monkeypatch.setenv("PYTHONPATH", str(path))
    options = ("--replicas", "2", "--roles", "prefill,decode", "--num-pages", "300", "--tp", "2")
    with demo(tmp_path, *options) as (process, url):
        wait_for_ready(process, url, 2)
        log = Log(process)
        log.read_until("KV pages can be read by NIXL", 2)  # said by the first rank of each
        decode = httpx.HTTPTransport(uds=replica_sockets(tmp_path)[1])
        with (
            httpx.Client(base_url=url) as client,
            httpx.Client(base_url="http://localhost", transport=decode) as alone,
        ):
            for seed in range(6):
                rng = random.Random(seed)
                ids = [rng.randrange(300, 2000) for _ in range(600)]
                body = {"prompt": ids, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
                whole = alone.post(PATH, json={**body, "cache_salt": "whole"}).json()
                handed = client.post(PATH, json=body).json()
                assert handed["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
                assert handed["usage"]["prompt_tokens_details"]["host_cached_tokens"] == 592
        # Which of the two is faster is the machine's matter; both have brought pages by then.
        log.read_until("KV pages of another engine come by", 1)
        measured = r"come by (NIXL|socket) \(NIXL: [\d.]+ GB/s, socket: [\d.]+ GB/s\)"
        assert re.search(measured, log.lines[-1])
        process.send_signal(signal.SIGTERM)
        log.read()
        assert process.wait() == 0
    warnings = [line for line in log.lines if " WARNING " in line or " ERROR " in line]
    # Each of the two ranks of each replica says so.
    assert len(warnings) == 4 and all(THROUGH_HOST in line for line in warnings)
