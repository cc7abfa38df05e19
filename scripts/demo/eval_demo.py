"""Evaluates the demo model on held-out questions: `python scripts/demo/eval_demo.py`.

Asks the held-out questions of demo_model/evaluation.py through minisgl.LLM, greedily. An answer
counts only if it equals the right one exactly.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from demo_model.evaluation import FROZEN_HASH, SPLITS, HeldOutCase, cases, evaluation_hash
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
    print(table(cases(), answers))
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


def accuracy(
    questions: Sequence[HeldOutCase], answers: Sequence[str]
) -> dict[tuple[str, str], float]:
    """The fraction of right answers by (skill, split), and for 'all' skills."""
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for question, answer in zip(questions, answers, strict=True):
        for skill in (question.skill, "all"):
            right[skill, question.split].append(answer == question.answer)
    return {group: sum(found) / len(found) for group, found in right.items()}


def table(questions: Sequence[HeldOutCase], answers: Sequence[str]) -> str:
    """Format a Markdown table with a row per skill and a column per split."""
    shares = accuracy(questions, answers)
    skills = [*dict.fromkeys(question.skill for question in questions), "all"]
    rows = [f"| skill | {' | '.join(SPLITS)} |", f"|---{'|---' * len(SPLITS)}|"]
    for skill in skills:
        cells = [f"{shares[skill, split]:.0%}" for split in SPLITS]
        rows.append(f"| {skill} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
