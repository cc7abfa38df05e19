"""The reproducible requests of an offline benchmark."""

from __future__ import annotations

import random
from dataclasses import dataclass

from minisgl.bench.config import Sizes
from minisgl.bench.workload.structured import STRUCTURED, is_structured
from minisgl.request import SamplingParams

# The standard workload draws its ids from 0 to 10,000, which every common vocabulary holds.
MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """One request for the engine."""

    prompt_token_ids: list[int]
    params: SamplingParams


def make_workload(
    sizes: Sizes, *, vocab_size: int, temperature: float, seed: int, structured: float = 0.0
) -> list[OfflineRequest]:
    """Random prompts, and outputs of exactly the lengths drawn, ignoring EOS.

    The numbers are drawn as other engines' benchmarks draw them, so that everybody measures the
    same requests: for each one the length of its prompt and then the token ids; then the length of
    each output. Ids beyond the vocabulary wrap around, which leaves the lengths as they are.
    structured: the share of them that follow a schema.
    """
    rng = random.Random(seed)
    prompts = [
        random_tokens(rng, rng.randint(sizes.prompt.low, sizes.prompt.high), vocab_size)
        for _ in range(sizes.num_requests)
    ]
    return [
        make_offline_request(
            prompt,
            max_tokens=rng.randint(sizes.output.low, sizes.output.high),
            temperature=temperature,
            seed=index,
            structured=is_structured(index, structured),
        )
        for index, prompt in enumerate(prompts)
    ]


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, MAX_TOKEN_ID) % vocab_size for _ in range(count)]


def make_offline_request(
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    structured: bool = False,
) -> OfflineRequest:
    """A request for exactly `max_tokens` tokens, greedy unless a temperature is given."""
    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=seed,
        structured=STRUCTURED if structured else None,
    )
    return OfflineRequest(prompt, params)
