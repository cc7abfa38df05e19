"""Evaluates the demo model on held-out questions: `python scripts/demo/eval_demo.py`.

Asks the held-out questions of demo_model/evaluation.py through minisgl.LLM, greedily. An answer
counts only if it equals the right one exactly.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from demo_model.evaluation import (
    FROZEN_HASH,
    HeldOutCase,
    Scores,
    cases,
    evaluation_hash,
    scores_of,
    table,
)
from minisgl import LLM, SamplingParams

MAX_ANSWER_TOKENS = 512  # enough for every right answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="the bundled demo model if not given")
    parser.add_argument("--wrong", action="store_true", help="print what was answered wrongly")
    options = parser.parse_args()
    if evaluation_hash() != FROZEN_HASH:
        print("These are not the frozen questions: the phrasings, or the options, have changed.")
        return 1

    start = time.perf_counter()
    answers = ask(cases(), options.model)
    print(table(accuracy(cases(), answers)))
    print(f"\n{len(answers)} questions in {time.perf_counter() - start:.0f} s")
    if options.wrong:
        for case, answer in zip(cases(), answers, strict=True):
            if answer != case.answer:
                print(f"\n{case.split} {case.skill}: {case.messages[-1]['content']}")
                print(f"  right    {case.answer}\n  answered {answer}")
    return 0


def ask(questions: Sequence[HeldOutCase], model: str = "", **engine_options: object) -> list[str]:
    """Ask all questions in one batch; returns the answers."""
    with LLM(model, **engine_options) as llm:
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        prompts = [tokenizer.chat(question.messages) for question in questions]
        limit = llm.engine.capacity.max_seq_len
        params = [
            SamplingParams(temperature=0, max_tokens=min(MAX_ANSWER_TOKENS, limit - len(prompt)))
            for prompt in prompts
        ]
        return [output.text for output in llm.generate(prompts, params)]


def accuracy(questions: Sequence[HeldOutCase], answers: Sequence[str]) -> Scores:
    pairs = zip(questions, answers, strict=True)
    return scores_of(questions, (answer == question.answer for question, answer in pairs))


if __name__ == "__main__":
    sys.exit(main())
