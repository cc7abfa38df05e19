"""What token masks cost the engine: `python scripts/bench/bench_masks.py --model FOLDER`, on a GPU.

The matchers have no grammar: each copies a mask of half the vocabulary, which takes microseconds.
So the figures show the split step, the copies and the kernels, and not the library of grammars.
FOLDER holds a config.json, as scripts/tools/dummy_config.py writes it; the weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.matcher import MaskRows, mask_words
from minisgl.request import SamplingParams

PROMPT_TOKENS = 512
REPEATS = 3  # the first of them warms up


class HalfMatcher:
    """Allows one of two random halves of the vocabulary, by the last token."""

    error = None
    finished = False

    def __init__(self, halves: MaskRows) -> None:
        self._halves = halves
        self._last = 0

    def accept(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]

    def fill(self, words: MaskRows) -> None:
        words[:] = self._halves[self._last % 2]


async def seconds_per_token(
    engine: AsyncEngine, halves: MaskRows, batch: int, share: float, num_tokens: int
) -> float:
    """Time per output token of a row, from the first token of the batch on."""
    generator, num_ids = random.Random(time.monotonic_ns()), min(10_000, engine.vocab_size)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens)
    streams = []
    for row in range(batch):
        prompt = [generator.randrange(num_ids) for _ in range(PROMPT_TOKENS)]
        matcher = HalfMatcher(halves) if row < round(share * batch) else None
        streams.append(engine.submit(prompt, params, matcher=matcher))
    await asyncio.gather(*(stream.wait_finished() for stream in streams))
    requests = [stream.request for stream in streams]
    first = max(request.first_token_s or 0.0 for request in requests)
    last = max(request.last_token_s or 0.0 for request in requests)
    return (last - first) / (num_tokens - 1)


async def measure(config: EngineConfig, batches: Sequence[int], num_tokens: int) -> None:
    async with await AsyncEngine.start(config) as engine:
        size = (2, mask_words(engine.vocab_size))
        halves = np.random.default_rng(0).integers(0, 2**32, size, dtype=np.uint32)
        print(f"{'batch':>6}{'masked':>8}{'ms a token':>12}{'of unmasked':>13}")
        for batch in batches:
            unmasked = 0.0
            for share in (0.0, 0.5, 1.0) if batch > 1 else (0.0, 1.0):
                given = (engine, halves, batch, share, num_tokens)
                times = [await seconds_per_token(*given) for _ in range(REPEATS)]
                taken = statistics.median(times[1:])
                unmasked = unmasked or taken
                row = f"{batch:>6}{share:>8.0%}{taken * 1e3:>12.3f}{taken / unmasked:>13.3f}"
                print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model,
        load_format="dummy",
        device=options.device,
        max_running_requests=max(options.batches),
    )
    asyncio.run(measure(config, options.batches, options.tokens))


if __name__ == "__main__":
    main()
