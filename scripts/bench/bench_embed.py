"""Vectors per second beside sentence-transformers: `bench_embed.py --model FOLDER`, on any device.

FOLDER is a checkpoint for sentence-transformers. Without `pip install sentence-transformers`
minisgl is measured alone. Both compute the vectors of the same texts, in turns, and the largest
difference between their numbers is shown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from minisgl import LLM

WORDS = "the of and to in is that it was for on are as with his they at be this from have".split()
Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str]], Vectors]


def make_texts(count: int, num_words: tuple[int, int], seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(*num_words))) for _ in range(count)]


def sentence_transformers(folder: str, device: str, dtype: str) -> Embed | None:
    """The other engine with its defaults; None if it is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None

    model = SentenceTransformer(folder, device=device, model_kwargs={"dtype": dtype})

    def embed(texts: Sequence[str]) -> Vectors:
        found: Vectors = model.encode([*texts], show_progress_bar=False)
        return found

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num", type=int, default=256, help="texts")
    parser.add_argument("--words", type=int, nargs=2, default=(10, 100), help="of a text, from to")
    parser.add_argument("--repeat", type=int, default=4, help="of which the first warms up")
    options = parser.parse_args()
    words = (options.words[0], options.words[1])
    with LLM(options.model, device=options.device, dtype=options.dtype, task="embed") as llm:
        num_tokens = 0

        def embed(texts: Sequence[str]) -> Vectors:
            nonlocal num_tokens
            found = llm.embed(texts)
            num_tokens = sum(each.num_prompt_tokens for each in found)
            return np.array([each.vector for each in found], dtype=np.float32)

        engines: dict[str, Embed] = {"minisgl": embed}
        other = sentence_transformers(options.model, options.device, options.dtype)
        if other is None:
            print("sentence-transformers is not installed; minisgl is measured alone")
        else:
            engines["sentence-transformers"] = other
        times: dict[str, list[float]] = {name: [] for name in engines}
        furthest = 0.0
        for repetition in range(options.repeat):
            # Fresh texts, so that no prefix is cached.
            texts = make_texts(options.num, words, repetition)
            vectors = []
            for name, compute in engines.items():
                began = time.perf_counter()
                vectors.append(compute(texts))
                times[name].append(time.perf_counter() - began)
            furthest = max(furthest, float(np.abs(vectors[0] - vectors[-1]).max()))
    print(f"{options.num} texts of {words[0]} to {words[1]} words, {num_tokens:,} tokens")
    for name, seconds in times.items():
        median_s = statistics.median(seconds[1:] or seconds)
        print(
            f"{name}: {options.num / median_s:,.1f} texts/s, {num_tokens / median_s:,.0f} tok/s "
            f"(median of {len(seconds[1:] or seconds)})"
        )
    if other is not None:
        print(f"largest difference of a number: {furthest:.1e}")


if __name__ == "__main__":
    main()
