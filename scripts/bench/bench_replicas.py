"""Measures replicas: `python scripts/bench/bench_replicas.py --replicas 2 -- OPTIONS OF SERVE`.

Starts `minisgl serve` with the given options several times, one after the other, and runs
`minisgl bench serve` against each:

- random: one engine, and then all replicas with N times the requests; the ratio of their output
  tokens a second is the gain of replicas.
- shared-prefix: all replicas with `--router-policy cache`, and with round-robin; requests begin
  with one of --prefixes prefixes.

    python scripts/tools/dummy_config.py Qwen/Qwen3-0.6B /tmp/q && \\
        python scripts/tools/dummy_tokenizer.py /tmp/q
    python scripts/bench/bench_replicas.py --replicas 2 --router-processes 1 2 -- \\
        --model /tmp/q --load-format dummy --dtype bfloat16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from script_runner import above_zero

from minisgl.bench.report.output import make_console

PROGRAM = (sys.executable, "-m", "minisgl")
START_SECONDS = 900
STOP_SECONDS = 60


@contextlib.contextmanager
def serving(options: Sequence[str], num_replicas: int) -> Iterator[str]:
    """The URL of a server of which all replicas are ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([*PROGRAM, "serve", "--port", str(port), *options])
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(url, num_replicas):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server with {' '.join(options)} did not start.")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        finally:
            server.kill()


def is_ready(url: str, num_replicas: int) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            health = json.load(answer)
    except (urllib.error.URLError, OSError):
        return False
    return num_replicas == 1 or bool(health.get("ready") == num_replicas)


def bench(url: str, options: Sequence[str]) -> dict[str, Any]:
    """The figures of the last repetition of `bench serve`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        command = [*PROGRAM, "bench", "serve", "--url", f"{url}/v1", "--json", str(path), *options]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def figure(found: Any, name: str) -> float | None:
    """The first number of this name, however deep it is."""
    if isinstance(found, dict):
        if isinstance(found.get(name), int | float):
            return float(found[name])
        found = [*found.values()]
    if isinstance(found, list):
        for value in found:
            if (inner := figure(value, name)) is not None:
                return inner
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    number = above_zero(int)
    parser.add_argument("--replicas", type=number, default=2)
    parser.add_argument("--router-processes", type=number, nargs="+", default=[1])
    parser.add_argument("--num-requests", type=number, default=512, help="for each engine")
    # Odd: prefixes come in turns, so that round-robin would keep an even number apart by itself.
    parser.add_argument("--prefixes", type=number, default=63)
    parser.add_argument("--prefix-len", type=number, default=2048)
    parser.add_argument("--parts", nargs="+", default=["random", "shared-prefix"])
    parser.add_argument("--bench", default="", help="more options of bench serve")
    parser.add_argument("serve", nargs="*", help="options of serve, after --")
    arguments = parser.parse_args()
    console = make_console()
    table = Table("workload", "server", "output tok/s", "ratio")
    replicas = ("--replicas", str(arguments.replicas))
    more = arguments.bench.split()

    def measure(part: str, server: Sequence[str], load: Sequence[str], base: float | None) -> float:
        num_replicas = arguments.replicas if server else 1
        with serving([*arguments.serve, *server], num_replicas) as url:
            rate = figure(bench(url, [*load, *more]), "output_tokens_per_s") or 0.0
        ratio = f"{rate / base:.2f}" if base else ""
        table.add_row(part, " ".join(server) or "one engine", f"{rate:,.0f}", ratio)
        console.print(f"{part}, {' '.join(server) or 'one engine'}: {rate:,.0f} tok/s {ratio}")
        return rate

    each, all_of_them = arguments.num_requests, arguments.num_requests * arguments.replicas
    if "random" in arguments.parts:
        base = measure("random", (), ("--num-requests", str(each)), None)
        for processes in arguments.router_processes:
            server = (*replicas, "--router-processes", str(processes))
            measure("random", server, ("--num-requests", str(all_of_them)), base)
    if "shared-prefix" in arguments.parts:
        load = (
            *("--workload", "shared-prefix", "--num-prefixes", str(arguments.prefixes)),
            *("--prefix-len", str(arguments.prefix_len), "--num-requests", str(all_of_them)),
        )
        base = measure("shared-prefix", (*replicas, "--router-policy", "round-robin"), load, None)
        measure("shared-prefix", (*replicas, "--router-policy", "cache"), load, base)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
