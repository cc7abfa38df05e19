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
import multiprocessing
import os
import random
import secrets
import sys
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from unittest import mock

from bench_settings import free_port
from script_runner import engine_config, make_parser

from minisgl import LLM, SamplingParams
from minisgl.bench.workload.requests import random_tokens
from minisgl.config import EngineConfig
from minisgl.engine.startup import work_for_node_0

END_S = 30
DECIDED = ("tp", "nnodes", "node_rank", "master_addr", "master_port", "disable_pynccl")


def main() -> int:
    parser = make_parser(__doc__, without=(*DECIDED, "cluster_token_file"))
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--nodes", type=int, default=2, help="nodes that share them")
    parser.add_argument("--num", type=int, default=64, help="requests at once")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of each")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    arguments = parser.parse_args()
    one = engine_config(arguments, tp=arguments.ranks)
    plain = replace(one, disable_pynccl=True)
    nodes = replace(one, nnodes=arguments.nodes, master_port=free_port())
    runs = {"one host, peer memory": one, "one host, without": plain, "nodes": nodes}
    found = {name: run(config, arguments) for name, config in runs.items()}
    wanted, _ = found["one host, without"]
    print(f"{'':24}{'tok/s':>10}  answers as on one host without peer memory")
    for name, (tokens, tokens_per_s) in found.items():
        same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
        print(f"{name:24}{tokens_per_s:>10,.0f}  {same} of {arguments.num}")
    return 0 if found["nodes"][0] == wanted else 1


def run(config: EngineConfig, arguments: argparse.Namespace) -> tuple[list[list[int]], float]:
    """Start the nodes and return what node 0 has measured."""
    secret, spawn = secrets.token_hex(32), multiprocessing.get_context("spawn")
    own, nodes = config.tp // config.nnodes, []
    ours, theirs = spawn.Pipe(duplex=False)
    try:
        for node in range(config.nnodes):
            environment = {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(node * own, (node + 1) * own))),
                "NCCL_HOSTID": f"node-{node}",
                "MINISGL_CLUSTER_TOKEN": secret,
            }
            that = replace(config, node_rank=node)
            given = (that,) if node else (that, arguments, theirs)
            nodes.append(spawn.Process(target=work_for_node_0 if node else measure, args=given))
            with mock.patch.dict(os.environ, environment):
                nodes[-1].start()
        theirs.close()
        found: tuple[list[list[int]], float] = ours.recv()
        for node in nodes:
            node.join(END_S)
            if node.exitcode != 0:
                raise SystemExit("a node has not ended in order")
        return found
    except EOFError:
        raise SystemExit("node 0 has failed") from None
    finally:
        for node in nodes:
            node.kill()


def measure(config: EngineConfig, arguments: argparse.Namespace, results: Connection) -> None:
    """Generate as node 0, and send the tokens, and how many came a second."""
    draw = random.Random(0)
    with LLM(**asdict(config)) as llm:
        most = llm.engine.vocab_size
        prompts = [random_tokens(draw, arguments.input, most) for _ in range(arguments.num)]
        params = SamplingParams(temperature=0, max_tokens=arguments.output, ignore_eos=True)
        llm.generate([prompt[::-1] for prompt in prompts], params, progress=False)  # warms up
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - began
    tokens = [output.token_ids for output in outputs]
    results.send((tokens, arguments.num * arguments.output / seconds))


if __name__ == "__main__":
    sys.exit(main())
