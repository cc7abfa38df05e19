"""Measures how much long prompts delay running answers, with divided and with whole engines.

    python scripts/tools/dummy_config.py Qwen/Qwen3-14B /tmp/q && \\
        python scripts/bench/bench_disaggregation.py -- \\
            --model /tmp/q --load-format dummy --dtype bfloat16

Starts `minisgl serve` with the given options twice, on two times --tp GPUs: with
`--roles prefill,decode`, and with two whole engines. On each, --streams streams decode steadily.
The time between two tokens of a stream (ITL) is measured while nothing else runs, and while prompts
of --prompt-len tokens arrive, one every --every seconds. The ratio is that of the p99 to the quiet
p99. Prompt and output tokens are those that were complete within the measured time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from bench_replicas import serving
from rich.console import Console
from rich.table import Table
from script_runner import above_zero

from minisgl.bench.figures import percentile
from minisgl.bench.report.output import make_console

FIRST_TOKEN, LAST_TOKEN = 100, 1900  # ids in prompts, which every vocabulary has
WARM_UP_PROMPTS = 2
NUM_OUTPUT = 32  # tokens after a long prompt


@dataclass(slots=True)
class Phase:
    """What was measured in some seconds."""

    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between tokens of the steady streams
    ttft_s: list[float] = field(default_factory=list)  # of long prompts
    num_sent: int = 0
    num_done: int = 0

    def itl_ms(self, percent: float) -> float:
        return 1e3 * percentile(sorted(self.gaps_s), percent)


class Client:
    """Requests of random token ids, whose answers are streamed."""

    def __init__(self, url: str, seed: int) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname, place.port
        self._rng = random.Random(seed)

    def body(self, prompt_len: int, num_output: int) -> bytes:
        """A request."""
        prompt = [self._rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(prompt_len)]
        asked = {"prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "stream": True}
        return json.dumps({**asked, "temperature": 0}).encode()

    async def times(self, body: bytes, times: list[float]) -> None:
        """Append the time of each token to `times`, to the end of the answer."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"The server answered {status.decode().strip()}.")
            async for line in reader:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise SystemExit(line.decode())
                    times.append(time.perf_counter())
        finally:
            writer.close()


async def measure(url: str, arguments: argparse.Namespace) -> tuple[Phase, Phase]:
    """The phases without and with long prompts, each with steady streams of its own: their contexts
    grow meanwhile, and a step with them."""
    client = Client(url, arguments.seed)
    for _ in range(WARM_UP_PROMPTS):
        await client.times(client.body(arguments.prompt_len, NUM_OUTPUT), [])
    quiet = await measure_phase(client, arguments, num_prompts=0)
    num_prompts = math.ceil(arguments.seconds / arguments.every)
    return quiet, await measure_phase(client, arguments, num_prompts)


async def measure_phase(client: Client, arguments: argparse.Namespace, num_prompts: int) -> Phase:
    # Made before anything is timed, which so many random tokens would hold up.
    bodies = [client.body(arguments.prompt_len, NUM_OUTPUT) for _ in range(num_prompts)]
    steady: list[list[float]] = [[] for _ in range(arguments.streams)]
    streams = [
        asyncio.ensure_future(
            client.times(client.body(arguments.steady_len, arguments.steady_output), times)
        )
        for times in steady
    ]
    while not all(steady):
        await asyncio.sleep(0.1)
        _check(streams)
    phase, prompts = Phase(), list[tuple[float, list[float], asyncio.Future[None]]]()
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + arguments.seconds:
        if bodies:
            times: list[float] = []
            prompts.append((now, times, asyncio.ensure_future(client.times(bodies.pop(), times))))
        await asyncio.sleep(arguments.every)
        _check(streams)
    ended = time.perf_counter()
    phase.seconds = ended - began
    for times in steady:
        inside = [each for each in times if began <= each <= ended]
        phase.gaps_s += [after - before for before, after in pairwise(inside)]
    phase.num_sent = len(prompts)
    for sent, times, asking in prompts:
        phase.ttft_s += [times[0] - sent] if times else []
        phase.num_done += asking.done()
    asked = [*streams, *(asking for _, _, asking in prompts)]
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return phase


def _check(streams: Sequence[asyncio.Future[None]]) -> None:
    for stream in streams:
        if stream.done():
            stream.result()
            raise SystemExit("A stream has ended; give --steady-output more, or fewer --seconds.")


def tell(
    console: Console, name: str, arguments: argparse.Namespace, phases: Sequence[Phase]
) -> None:
    table = Table(name)
    headings = ("p50 ms", "p99 ms", "ratio", "p99.9 ms", "tok/s")
    for heading in (*headings, "prompts done", "TTFT p50 s", "prompt tok/s"):
        table.add_column(heading, justify="right")
    quiet = phases[0].itl_ms(99)
    for title, phase in zip(("quiet", "with prompts"), phases, strict=True):
        done = phase.num_done
        table.add_row(
            title,
            *(f"{phase.itl_ms(50):.2f}", f"{phase.itl_ms(99):.2f}"),
            f"{phase.itl_ms(99) / quiet:.2f}",
            f"{phase.itl_ms(99.9):.2f}",
            f"{len(phase.gaps_s) / phase.seconds:,.0f}",
            f"{done} of {phase.num_sent}" if phase.num_sent else "",
            f"{percentile(sorted(phase.ttft_s), 50):.2f}" if phase.ttft_s else "",
            f"{done * arguments.prompt_len / phase.seconds:,.0f}" if done else "",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    number, positive = above_zero(int), above_zero(float)
    parser.add_argument("--streams", type=number, default=64)
    parser.add_argument("--steady-len", type=number, default=512)
    parser.add_argument("--steady-output", type=number, default=16384)
    parser.add_argument("--prompt-len", type=number, default=32768)
    parser.add_argument("--every", type=positive, default=4.0, help="seconds between prompts")
    parser.add_argument("--seconds", type=positive, default=30.0, help="of each of the two phases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=["divided", "whole"])
    parser.add_argument("serve", nargs="*", help="options of serve, after --")
    arguments = parser.parse_args()
    console = make_console()
    for part in arguments.parts:
        roles = ("--roles", "prefill,decode") if part == "divided" else ()
        with serving([*arguments.serve, "--replicas", "2", *roles], 2) as url:
            tell(console, part, arguments, asyncio.run(measure(url, arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
