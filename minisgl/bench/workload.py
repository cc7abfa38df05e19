"""What a benchmark asks of the engine, reproducibly."""

from __future__ import annotations

import random
from dataclasses import dataclass

from minisgl.bench.config import Sizes
from minisgl.request import SamplingParams

# The standard workload draws its ids from 0 to 10,000, which every common vocabulary holds.
MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request to come."""

    prompt_token_ids: list[int]
    params: SamplingParams


def make_workload(sizes: Sizes, *, vocab_size: int, temperature: float, seed: int) -> list[Job]:
    """Random prompts, and outputs of exactly the lengths drawn, whatever the model says.

    The numbers are drawn as other engines' benchmarks draw them, so that everybody measures the
    same requests: for each one the length of its prompt and then the token ids; then the length of
    each output. Ids beyond the vocabulary wrap around, which leaves the lengths as they are.
    """
    rng = random.Random(seed)
    prompts = [
        [
            rng.randint(0, MAX_TOKEN_ID) % vocab_size
            for _ in range(rng.randint(sizes.prompt.low, sizes.prompt.high))
        ]
        for _ in range(sizes.num_requests)
    ]
    return [
        Job(
            prompt,
            SamplingParams(
                temperature=temperature,
                max_tokens=rng.randint(sizes.output.low, sizes.output.high),
                ignore_eos=True,
                seed=index,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
