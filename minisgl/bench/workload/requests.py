"""The reproducible requests of a benchmark."""

from __future__ import annotations

import random
from dataclasses import dataclass

from minisgl.bench.config import Sizes
from minisgl.bench.workload.structured import STRUCTURED, is_structured
from minisgl.request import SamplingParams

# The standard workload draws its ids from 0 to 10,000, which every common vocabulary holds.
MAX_TOKEN_ID = 10_000
BYTES_PER_TOKEN = 4  # of text in common languages, about


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request, and when to send it where they do not come all at once."""

    prompt: list[int]  # token ids, or in a chat what `chat_text` makes words of; [] beside `text`
    max_tokens: int
    seed: int = 0
    due_s: float = 0.0  # since the start of the run
    parent: int | None = None  # the place of the request whose answer must have come before
    pause_s: float = 0.0  # between that answer and this request
    continues: bool = False  # the conversation so far comes before the prompt
    structured: bool = False  # the output follows a schema
    text: str | None = None  # the prompt, where it is not made up

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt alone; of a text, an estimate."""
        return len(self.prompt) if self.text is None else estimated_tokens(self.text)

    def params(self, temperature: float = 0.0) -> SamplingParams:
        """The parameters for exactly `max_tokens` tokens, greedy unless a temperature is given."""
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            seed=self.seed,
            structured=STRUCTURED if self.structured else None,
        )


def make_workload(
    sizes: Sizes, *, vocab_size: int, seed: int, structured: float = 0.0
) -> list[ScheduledRequest]:
    """The standard workload: random prompts, and outputs of exactly the lengths drawn.

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
        ScheduledRequest(
            prompt=prompt,
            max_tokens=rng.randint(sizes.output.low, sizes.output.high),
            seed=index,
            structured=is_structured(index, structured),
        )
        for index, prompt in enumerate(prompts)
    ]


def estimated_tokens(text: str) -> int:
    return max(1, len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, MAX_TOKEN_ID) % vocab_size for _ in range(count)]
