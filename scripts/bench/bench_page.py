"""Measures the page of the server: `python scripts/bench/bench_page.py`.

1. frames: an answer streams into a conversation of 300 messages in a browser. How long one update
   of the page takes (script, then style and layout), and the time between frames; 16.7 ms are 60 a
   second.
2. dashboard: 256 streams, alternately with and without requests for /metrics as often as --boards
   open views of the server send them. The browser itself is left out, because its CPU is not the
   server's.

A clock takes the place of the model. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import sys
from multiprocessing.connection import Connection
from typing import Any

from bench_serve import HOST, STOP_SECONDS, TEMPERATURE, Load, receive, serve
from playwright.async_api import async_playwright
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.figures import Distribution
from minisgl.bench.online.run import run_online
from minisgl.bench.online.target import Endpoint
from minisgl.server.config import ServerConfig
from minisgl.server.process import bind, new_event_loop

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NUM_QUESTIONS = 150
POLL_SECONDS = 2  # of the page
ANSWER = """\
Some *text* with `code` and **weight**, and a list:

1. one
2. two, which is [a link](https://example.org)

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    return x + 1  # once
```
"""
# Times each update and the layout that follows it, and the frames while an answer streams.
MEASURE = """async numTokens => {
    const updates = [], frames = [], update = AnswerView.prototype.update;
    AnswerView.prototype.update = function (...rest) {
        const began = performance.now();
        update.apply(this, rest);
        scrollDown();
        $("log").getBoundingClientRect();
        updates.push(performance.now() - began);
    };
    chat.sampling = { max_tokens: numTokens, ignore_eos: true };
    let last = performance.now();
    const frame = now => {
        frames.push(now - last);
        last = now;
        asking = requestAnimationFrame(frame);
    };
    let asking = requestAnimationFrame(frame);
    answering.ask("Go on");
    while (answering.isBusy) await new Promise(resolve => setTimeout(resolve, 50));
    cancelAnimationFrame(asking);
    return [updates.slice(1, -1), frames.slice(1)];
}"""


def described(name: str, values: list[float]) -> str:
    """values: in milliseconds."""
    found = Distribution.of(values)
    return f"{name}: p50 {found.p50:.1f}, p99 {found.p99:.1f}, max {max(values):.1f} ms"


async def measure_frames(url: str, num_tokens: int) -> None:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    messages = [
        {"role": role, "content": content}
        for index in range(NUM_QUESTIONS)
        for role, content in (("user", f"Question {index}"), ("assistant", ANSWER))
    ]
    empty = dict.fromkeys(("title", "model", "system", "thinking", "schema", "tools"), "")
    chat = {"id": "long", "changed": 1, "sampling": {}, **empty, "messages": messages}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox"]
        )
        page = await browser.new_page()
        await page.goto(url)
        await page.evaluate(
            "chat => localStorage.setItem('minisgl.chat.long', chat)", json.dumps(chat)
        )
        await page.goto(f"{url}/#/chat/long")
        await page.reload()
        await page.wait_for_function("() => models.length > 0")
        updates, frames = await page.evaluate(MEASURE, num_tokens)
        await browser.close()
    print(f"{num_tokens} tokens into {len(messages)} messages, {len(updates)} updates")
    print(described("  update and layout", updates))
    print(described("  between frames", frames))


async def poll(url: str, boards: int) -> None:
    target = Endpoint(url=url)
    while True:
        for _ in range(boards):
            await target.get(f"{url}/metrics")
        await asyncio.sleep(POLL_SECONDS)


async def measure_dashboard(url: str, load: Load, arguments: argparse.Namespace, ask: Any) -> None:
    sizes = load.sizes("cpu")
    target = Endpoint(url=f"{url}/v1", temperature=TEMPERATURE)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(2 * arguments.repeat + 1):
        is_polled = repeat % 2 == 0
        polling = asyncio.create_task(poll(url, arguments.boards if is_polled else 0))
        cpu_s = await ask("cpu")
        run = await run_online(target, load.requests(sizes, arguments.vocab_size))
        cpu_s = await ask("cpu") - cpu_s
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
        run.require_all()
        if repeat == 0:
            continue  # warms up
        rate = run.num_output_tokens / run.elapsed_s
        rates[is_polled].append(rate)
        itl = Distribution.of([1e3 * gap for request in run.requests for gap in request.itls_s])
        print(
            f"  {'with' if is_polled else 'without'} polls: {rate:,.0f} tok/s, "
            f"ITL p50 {itl.p50:.2f}, p99 {itl.p99:.2f} ms, "
            f"CPU {1e6 * cpu_s / run.num_output_tokens:.1f} µs a token"
        )
    print(f"with / without: {max(rates[True]) / max(rates[False]):.1%} (best of each)")


async def measure(arguments: argparse.Namespace) -> None:
    load = Load(arguments.num, (16, 64), (128, 128), 0, arguments.step_ms / 1e3)
    with bind(ServerConfig(host=HOST, port=0)) as probe:
        port: int = probe.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(engine_config(arguments), port, load, theirs)
    )
    process.start()
    theirs.close()

    async def ask(what: str) -> Any:
        ours.send(what)
        return await told(ours)

    try:
        arguments.vocab_size = (await told(ours)).vocab_size
        url = f"http://{HOST}:{port}"
        await asyncio.sleep(1)  # between the start of the engine and that of the server
        if not arguments.no_frames:
            await measure_frames(url, arguments.tokens)
        print(f"{arguments.num} streams, {arguments.step_ms:g} ms a step:")
        await measure_dashboard(url, load, arguments, ask)
    finally:
        ours.close()
        process.terminate()
        await asyncio.to_thread(process.join, STOP_SECONDS)
        process.kill()


async def told(connection: Connection) -> Any:
    said = await asyncio.to_thread(receive, connection)
    if said is None or isinstance(said, Exception):
        raise said or RuntimeError("The server has ended.")
    return said


def main() -> int:
    parser = make_parser(__doc__, cache_type="naive", load_format="auto")
    number = above_zero(int)
    parser.add_argument("--num", type=number, default=256, help="streams [default: 256]")
    parser.add_argument("--tokens", type=number, default=1000, help="of the answer in the browser")
    parser.add_argument("--boards", type=number, default=1, help="open views [default: 1]")
    parser.add_argument("--repeat", type=number, default=3, help="repetitions [default: 3]")
    parser.add_argument("--step-ms", type=above_zero(float), default=8.0, help="of the clock")
    parser.add_argument("--no-frames", action="store_true", help="leave the browser out")
    return run_script(measure(parser.parse_args()), loop_factory=new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
