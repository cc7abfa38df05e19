"""Measures what LoRA adapters cost: the time of a token (TPOT), by the rows of a step and how many
adapters they have, beside an engine that has loaded none. Random weights and adapters:

python scripts/tools/dummy_config.py Llama-3.1-8B /tmp/llama
python scripts/bench/bench_adapters.py /tmp/llama

With --loads N it measures the steps of 32 streams instead, while N adapters are read and copied to
the device. Each adapter is of all linear layers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from script_runner import engine_config, make_parser, run_script

from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.interpreter import favour_steps
from minisgl.request import Extra, Request, SamplingParams

# Rows of a step, and how many adapters they have.
CASES = ((1, 0), (1, 1), (8, 0), (8, 8), (32, 0), (32, 1), (32, 8), (32, 32))
DECIDED = ("lora", "max_loras", "max_lora_rank")


def main() -> int:
    parser = make_parser(__doc__, without=DECIDED, max_running_requests=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--places", type=int, default=32, help="adapters on the device at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=0, help="adapters loaded beside 32 streams")
    arguments = parser.parse_args()
    return run_script(measure_loads(arguments) if arguments.loads else measure(arguments))


async def measure(arguments: argparse.Namespace) -> None:
    base = await tpots(arguments, {})
    with random_adapters(arguments.model, arguments.places, arguments.rank) as options:
        adapted = await tpots(arguments, options)
    print(f"{'rows':>5} {'adapters':>9} {'TPOT ms':>9} {'of none loaded':>15}")
    for (rows, adapters), milliseconds in adapted.items():
        alone = base[rows, 0]
        print(f"{rows:5} {adapters:9} {milliseconds:9.3f} {milliseconds / alone - 1:+15.2%}")


@contextmanager
def random_adapters(model: str, count: int, rank: int) -> Iterator[dict[str, Any]]:
    """The options of an engine that has so many adapters on the device. Their folders are deleted
    at the end."""
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, f"a{number}") for number in range(count)]
        for number, folder in enumerate(folders):
            write_adapter(Path(model), folder, rank, number)
        lora = tuple(f"{folder.name}={folder}" for folder in folders)
        yield {"lora": lora, "max_loras": count, "max_lora_rank": rank} if lora else {}


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """Write a random adapter of all linear layers of a Llama or a Qwen3."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = (config[f"num_{of}_heads"] * size for of in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for path, (n, k) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            for matrix, shape in (("A", (rank, k)), ("B", (n, rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{name}.lora_{matrix}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*shapes]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


async def measure_loads(arguments: argparse.Namespace) -> None:
    with random_adapters(arguments.model, arguments.loads, arguments.rank) as options:
        lora = options.pop("lora")
        async with await AsyncEngine.start(engine_config(arguments, **options)) as engine:
            await time_loads(engine, lora)


async def time_loads(engine: AsyncEngine, lora: tuple[str, ...]) -> None:
    """The longest times between the tokens of a stream: alone, while adapters are read, while they
    are copied to the device, for which requests wait, and beside such requests once they are."""
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    times: list[float] = []

    async def watch(stream: OutputStream) -> None:
        async for _ in stream:
            times.append(time.perf_counter())

    favour_steps()
    streams = [engine.submit([1 + row, 2, 3, 4], params) for row in range(32)]
    watching = asyncio.ensure_future(watch(streams[0]))
    print(f"{'':8} {'median ms':>10} {'longest ms':>11}")

    async def tell(name: str, work: Awaitable[object]) -> None:
        first = len(times)
        await work
        await stepped(2)
        gaps = [1e3 * (after - before) for before, after in pairwise(times[first:])]
        print(f"{name:8} {median(gaps):10.3f} {max(gaps):11.3f}")

    async def stepped(number: int) -> None:
        first = len(times)
        while len(times) < first + number:  # noqa: ASYNC110  a stream sets no event
            await asyncio.sleep(0.01)

    async def read() -> None:
        for name, _, folder in (each.partition("=") for each in lora):
            await engine.adapters.load(name, folder)

    async def copy() -> None:
        one = SamplingParams(temperature=0, max_tokens=1)
        for name in engine.adapters:
            await engine.submit([5, 6], one, extras=[engine.adapter(name)]).wait_finished()

    await stepped(50)  # the first
    await tell("alone", stepped(500))
    await tell("read", read())
    await tell("copied", copy())
    await tell("held", copy())
    watching.cancel()
    for stream in streams:
        stream.abort()


async def tpots(
    arguments: argparse.Namespace, options: dict[str, Any]
) -> dict[tuple[int, int], float]:
    """Milliseconds of a token by rows and adapters, the median of the rounds."""
    found: dict[tuple[int, int], float] = {}
    async with await AsyncEngine.start(engine_config(arguments, **options)) as engine:
        favour_steps()
        for rows, adapters in CASES:
            if adapters <= len(engine.adapters):
                times = [
                    await tpot(engine, rows, adapters, arguments.tokens)
                    for _ in range(1 + arguments.rounds)
                ]
                found[rows, adapters] = median(times[1:])  # the first loads the adapters
    return found


async def tpot(engine: AsyncEngine, rows: int, adapters: int, num_tokens: int) -> float:
    """Of requests that are asked together, the median over all."""
    names = [*engine.adapters][:adapters]

    async def ask(row: int) -> Request:
        extras: list[Extra] = [engine.adapter(names[row % adapters])] if adapters else []
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        stream = engine.submit([1 + row, 2, 3, 4], params, extras=extras)
        async for _ in stream:
            pass
        return stream.request

    requests = await asyncio.gather(*map(ask, range(rows)))
    each = [
        (request.last_token_s - request.first_token_s) / (num_tokens - 1)
        for request in requests
        if request.first_token_s and request.last_token_s
    ]
    return 1e3 * median(each)


if __name__ == "__main__":
    sys.exit(main())
