"""Compares ranks on one host with the same ranks on several nodes, all of them on this machine.

    python scripts/bench/bench_nodes.py [FOLDER] [--ranks 2] [--nodes 2]

The same greedy requests run three times, each time in new processes: on one host with peer memory,
on one host with the collectives of torch.distributed alone, and on nodes that have GPUs of their
own and a host name of their own for NCCL, so that it connects them by the network. The tokens of
the last two must be the same, or the exit code is 1; those of the first may differ in near-ties,
because its sums round differently. FOLDER needs no more than a config.json (see
scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from script_runner import engine_config, make_parser

from minisgl import LLM, SamplingParams
from minisgl.bench.workload.requests import random_tokens
from minisgl.config import EngineConfig
from minisgl.server import run as serve
from minisgl.server.config import ServerConfig

END_S = 30
DECIDED = ("tp", "nnodes", "node_rank", "master_addr", "master_port", "disable_pynccl")


def main() -> int:
    parser = make_parser(__doc__, without=(*DECIDED, "cluster_token_file"))
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--nodes", type=int, default=2, help="nodes that share them")
    parser.add_argument("--num", type=int, default=64, help="requests at once")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of each")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    # Of the processes that this one starts.
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        job = json.loads(arguments.measure)
        config = EngineConfig(**job["config"])
        if config.node_rank:
            return serve(config, ServerConfig())
        Path(job["result"]).write_text(json.dumps(measure(config, arguments)))
        return 0
    one = engine_config(arguments, tp=arguments.ranks)
    plain = replace(one, disable_pynccl=True)
    nodes = replace(one, nnodes=arguments.nodes, master_port=free_port())
    runs = {"one host, peer memory": one, "one host, without": plain, "nodes": nodes}
    found = {name: run(config) for name, config in runs.items()}
    wanted = found["one host, without"]["tokens"]
    print(f"{'':24}{'tok/s':>10}  answers as on one host without peer memory")
    for name, figures in found.items():
        same = sum(a == b for a, b in zip(figures["tokens"], wanted, strict=True))
        print(f"{name:24}{figures['tokens_per_s']:>10,.0f}  {same} of {arguments.num}")
    return 0 if found["nodes"]["tokens"] == wanted else 1


def run(config: EngineConfig) -> dict[str, Any]:
    """Start the nodes and return what node 0 has measured."""
    secret = secrets.token_hex(32)
    own = config.tp // config.nnodes

    def environment(node: int) -> dict[str, str]:
        gpus = ",".join(map(str, range(node * own, (node + 1) * own)))
        own_host = {"CUDA_VISIBLE_DEVICES": gpus, "NCCL_HOSTID": f"node-{node}"}
        return os.environ | own_host | {"MINISGL_CLUSTER_TOKEN": secret}

    with contextlib.ExitStack() as leaving, tempfile.TemporaryDirectory() as folder:
        result, nodes = Path(folder) / "result.json", []
        for node in range(config.nnodes):
            job = {"config": asdict(replace(config, node_rank=node)), "result": str(result)}
            command = (__file__, *sys.argv[1:], "--measure", json.dumps(job))
            nodes.append(leaving.enter_context(started(*command, env=environment(node))))
        first, *others = nodes
        if first.wait() != 0:
            raise SystemExit("node 0 has failed")
        if any(other.wait(END_S) != 0 for other in others):
            raise SystemExit("a node has not ended in order")
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures


@contextlib.contextmanager
def started(*command: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *command], env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate as node 0."""
    draw = random.Random(0)
    with LLM(**asdict(config)) as llm:
        most = llm.engine.vocab_size
        prompts = [random_tokens(draw, arguments.input, most) for _ in range(arguments.num)]
        params = SamplingParams(temperature=0, max_tokens=arguments.output, ignore_eos=True)
        llm.generate([prompt[::-1] for prompt in prompts], params, progress=False)  # warms up
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - began
    return {
        "tokens": [output.token_ids for output in outputs],
        "tokens_per_s": arguments.num * arguments.output / seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
