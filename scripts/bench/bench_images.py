"""Measures what images cost: the time to the first token (TTFT) of a prompt with one, beside
prompts of text, and how much such prompts delay running answers. Random weights:

python scripts/tools/dummy_config.py Qwen3.8-27B-vision /tmp/seeing
python scripts/tools/dummy_tokenizer.py /tmp/seeing
python scripts/bench/bench_images.py /tmp/seeing --attn triton

TTFT begins with the file of the image, in JPEG, of which no two are alike, and ends with a token:
to decode and process it on the host is a part. `text` is a prompt of as many tokens without image,
`question` the rest of the prompt alone, `again` the image once more behind another beginning, so
that its rows are there, but no page of its keys and values.

Then 32 streams decode, while requests of each kind arrive, and the time between two tokens of a
stream (ITL) is measured.
"""

from __future__ import annotations

import argparse
import io
import random
import string
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from bench_mixed import Phase, Request, Work, measure_round, requests_of_engine
from PIL import Image
from rich.console import Console
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import bench_engine
from minisgl.bench.workload.requests import random_tokens
from minisgl.engine import AsyncEngine
from minisgl.images.prompt import Prompt
from minisgl.images.source import IMAGE_PART, ImageSource
from minisgl.interpreter import favour_steps
from minisgl.request import SamplingParams

STREAM_TOKENS, MOST_TOKENS = 512, 1 << 14  # of the prompts of streams, and of their answers
WARM_UP = 2  # requests of each kind

# Sends a request of a kind, and returns once it has ended with the time of its first token.
Ask = Callable[[], Awaitable[float]]


def photo(size: int, seed: int) -> bytes:
    """The file of an image with coarse and fine structure, like a photo."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = pixels + rng.integers(-16, 17, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


class Asking:
    """The requests that are compared."""

    def __init__(self, engine: AsyncEngine, photos: Sequence[bytes]) -> None:
        self.engine = engine
        self.num_tokens = 0  # of the last prompt with an image
        self._photos = iter(photos)
        self._last = b""
        self._rng = random.Random(1)
        self._params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    async def image(self) -> float:
        self._last = next(self._photos)
        return await self.again()

    async def again(self) -> float:
        return await self._asked({"type": IMAGE_PART, "source": ImageSource(self._last)})

    async def question(self) -> float:
        return await self._asked()

    async def text(self) -> float:
        tokens = random_tokens(self._rng, self.num_tokens, self.engine.vocab_size)
        return await self._first_token(Prompt(tokens), time.perf_counter())

    async def _asked(self, *images: dict[str, Any]) -> float:
        """Behind words that no two prompts share, so that no page of one is found for another."""
        began = time.perf_counter()
        words = ("".join(self._rng.choices(string.ascii_lowercase, k=3)) for _ in range(16))
        parts = [{"type": "text", "text": " ".join(words)}, *images, {"type": "text", "text": "?"}]
        prompt = await self.engine.encode_conversation([{"role": "user", "content": parts}])
        self.num_tokens = len(prompt.token_ids)
        return await self._first_token(prompt, began)

    async def _first_token(self, prompt: Prompt, began: float) -> float:
        stream = self.engine.submit(prompt.token_ids, self._params, extras=prompt.extras)
        await stream.wait_finished()
        assert stream.request.first_token_s is not None
        return stream.request.first_token_s - began


async def measure(arguments: argparse.Namespace) -> None:
    console, count = make_console(), arguments.requests
    photos = [photo(arguments.size, seed) for seed in range(2 * count + WARM_UP)]
    console.print(
        f"images of {arguments.size} x {arguments.size}, {len(photos[0]):,} bytes of JPEG"
    )
    async with bench_engine(console, engine_config(arguments)) as engine:
        asking = Asking(engine, photos)
        favour_steps()
        await tell_ttft(console, asking, count)
        await tell_itl(console, asking, arguments)


async def tell_ttft(console: Console, asking: Asking, count: int) -> None:
    """One request after the other, the kinds in turns."""
    kinds: dict[str, Ask] = {
        "question": asking.question,
        "image": asking.image,
        "text": asking.text,
        "again": asking.again,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    await asking.image()  # tells how many tokens a text must have
    tokens = asking.num_tokens
    for _ in range(WARM_UP - 1 + count):
        for name, ask in kinds.items():
            asking.num_tokens = tokens
            found[name].append(1e3 * await ask())
    medians = {name: median(times[-count:]) for name, times in found.items()}
    table = Table("prompt", title=f"{tokens} tokens, {count} requests of each kind")
    for heading in ("TTFT ms", "above text"):
        table.add_column(heading, justify="right")
    for name, each in medians.items():
        table.add_row(name, f"{each:.1f}", f"{each - medians['text']:+.1f}")
    console.print(table)


async def tell_itl(console: Console, asking: Asking, arguments: argparse.Namespace) -> None:
    """Streams alone, then beside texts, then beside images."""
    tokens, table = asking.num_tokens, Table("arrivals")
    for heading in ("p50 ms", "p99 ms", "of text", "longest ms", "their TTFT p50 ms"):
        table.add_column(heading, justify="right")
    seconds, rng = arguments.requests / arguments.rate, random.Random(0)
    make, vocab_size = requests_of_engine(asking.engine), asking.engine.vocab_size

    def streams() -> list[Request]:
        prompts = [random_tokens(rng, STREAM_TOKENS, vocab_size) for _ in range(arguments.streams)]
        return [make(prompt, MOST_TOKENS) for prompt in prompts]

    p99 = float("nan")
    for name, ask in (("none", None), ("text", asking.text), ("image", asking.image)):
        asking.num_tokens = tokens
        phase = Phase()
        arrivals = None if ask is None else partial(arriving, ask)
        await measure_round(phase, Work(streams, arrivals, arguments.rate), seconds)
        p50, this, longest = (1e3 * phase.itl_s(percent) for percent in (50, 99, 100))
        p99 = this if name == "text" else p99
        ttft = f"{1e3 * median(phase.ttfts_s):.1f}" if phase.ttfts_s else "-"
        ratio = f"{this / p99:.2f}" if name == "image" else "-"
        table.add_row(name, f"{p50:.2f}", f"{this:.2f}", ratio, f"{longest:.2f}", ttft)
    console.print(table)


def arriving(ask: Ask) -> Request:
    async def request(times: list[float]) -> None:
        began = time.perf_counter()
        times.append(began + await ask())

    return request


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--size", type=above_zero(int), default=1024, help="pixels of a side")
    parser.add_argument("--requests", type=above_zero(int), default=16, help="of each kind")
    parser.add_argument("--streams", type=above_zero(int), default=32)
    parser.add_argument("--rate", type=above_zero(float), default=2.0, help="arrivals a second")
    return run_script(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
