"""Measures n-gram drafts on the demo model: `python scripts/demo/speculate_demo.py`.

Asks the held-out questions whose answers repeat words of the question, of the skills copy and
passage, one after the other, with and without --speculative ngram. Prints the tokens per second of
both, and how many tokens a step brings. The answers must be the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from demo_model.evaluation import HeldOutCase, cases
from minisgl import LLM, SamplingParams

SKILLS = ("copy", "passage")


@dataclass(frozen=True, slots=True)
class Outcome:
    answers: list[list[int]]  # token ids
    num_steps: int  # after those that compute the prompts
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Those that such steps bring: the first is sampled with the prompt."""
        return sum(len(answer) - 1 for answer in self.answers)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--questions", type=int, default=24, help="of each skill")
    options = parser.parse_args()
    questions = [
        case
        for skill in SKILLS
        for case in [case for case in cases() if case.skill == skill][: options.questions]
    ]
    without = ask(questions)
    drafted = ask(questions, speculative="ngram", draft_tokens=options.draft_tokens)
    for name, outcome in (("without", without), ("ngram", drafted)):
        print(
            f"{name:8} {outcome.tokens_per_s:8.1f} tok/s {outcome.tokens_per_step:8.2f} tokens a "
            "step"
        )
    print(f"{without.seconds / drafted.seconds:.2f} times as fast")
    return int(drafted.answers != without.answers)


def ask(questions: Sequence[HeldOutCase], **engine_options: object) -> Outcome:
    """Ask the questions one after the other."""
    params = SamplingParams(temperature=0, max_tokens=256)
    with LLM(device="cpu", max_running_requests=1, **engine_options) as llm:
        messages = [question.messages for question in questions]
        llm.chat(messages[:1], params)  # warms up
        began, before = time.perf_counter(), llm.engine.stats().counters.num_steps
        outputs = llm.chat(messages, params)
        seconds = time.perf_counter() - began
        num_steps = llm.engine.stats().counters.num_steps - before - len(questions)
    return Outcome([output.token_ids for output in outputs], num_steps, seconds)


if __name__ == "__main__":
    sys.exit(main())
