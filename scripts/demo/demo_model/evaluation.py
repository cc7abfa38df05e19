"""The held-out evaluation: questions that are not in the training, each with one right answer.

Split 'instances' uses phrasings of the training with held-out names, cities, words, numbers, sums
and lists, and asks for known facts in held-out questions. Split 'phrasings' asks for the same in
held-out phrasings.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from demo_model.conversation import Dialogue, instructed, remembering, with_tools
from demo_model.data import tokenize
from demo_model.skills import SKILLS, draw
from demo_model.world import World, plain

SEED = 20261121
SPLITS = ("instances", "phrasings")
GROUPS = (*SKILLS, "tool", "recall", "system")  # of cases
MANNERS = ("upper", "lower", "begin", "end")
WAYS = ("one", "two", "none", "one", "three", "one")  # with tools
# Lengths, in tokens, of the recall conversations.
RECALL_TOKENS = (40, 80, 150, 300, 500, 800, 1300, 1800)
NUM_CASES = {
    "recall": 64,
    "tool": 96,
    "json": 48,
    "copy": 48,
    "arithmetic": 48,
    "option": 96,
    "command": 36,
}
NUM_CASES_OF_OTHERS = 24

# Hash of the cases held out from the training of the bundled model. Other cases or other options
# require a new training.
FROZEN_HASH = "d727d7cc375678e3936b07ed956bcc1d57967b221e2b0acc0bfc14400926bd06"


@dataclass(frozen=True, slots=True)
class HeldOutCase:
    split: str
    skill: str
    messages: list[dict[str, str]]  # ending with the question
    answer: str


@dataclass(frozen=True, slots=True)
class TokenizedCase:
    split: str
    skill: str
    ids: np.ndarray  # the prompt, the right answer and <|im_end|>
    num_answer: int  # number of ids of the answer and <|im_end|>, at the end


Scores = dict[tuple[str, str], float]  # the fraction of right answers by (skill, split)


def scores_of(questions: Iterable[HeldOutCase | TokenizedCase], right: Iterable[bool]) -> Scores:
    """Of each skill, and of `all` skills. right: whether each question was answered rightly."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for question, is_right in zip(questions, right, strict=True):
        for skill in (question.skill, "all"):
            found[skill, question.split].append(is_right)
    all_last = sorted(found.items(), key=lambda item: item[0][0] == "all")
    return {group: sum(answers) / len(answers) for group, answers in all_last}


def table(scores: Scores) -> str:
    """In Markdown, with a row for each skill and a column for each split."""
    rows = [f"| skill | {' | '.join(SPLITS)} |", f"|---{'|---' * len(SPLITS)}|"]
    for skill in dict.fromkeys(skill for skill, _ in scores):
        cells = [f"{scores[skill, split]:.0%}" for split in SPLITS]
        rows.append(f"| {skill} | {' | '.join(cells)} |")
    return "\n".join(rows)


@cache
def cases() -> tuple[HeldOutCase, ...]:
    return tuple(case for case, _ in _drawn())


def evaluation_hash() -> str:
    text = json.dumps([asdict(case) for case in cases()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenized_cases(folder: Path) -> list[TokenizedCase]:
    """The cases as token ids. folder: contains tokenizer.json."""
    drawn = _drawn()
    tokenized = tokenize(folder, [whole for _, whole in drawn])
    found = []
    for (case, _), (ids, learned) in zip(drawn, tokenized, strict=True):
        num_answer = len(ids) - int(np.flatnonzero(~learned)[-1]) - 1
        found.append(TokenizedCase(case.split, case.skill, ids, num_answer))
    return found


@cache
def _drawn() -> list[tuple[HeldOutCase, Dialogue]]:
    drawn = []
    for split in SPLITS:
        world = World(
            random.Random(f"{SEED} {split}"), evaluates=True, new_phrases=split == "phrasings"
        )
        for skill in GROUPS:
            found: dict[str, tuple[HeldOutCase, Dialogue]] = {}
            while len(found) < NUM_CASES.get(skill, NUM_CASES_OF_OTHERS):
                whole = conversation_of(world, skill, len(found))
                *messages, last = whole.messages()
                case = HeldOutCase(split, skill, messages, last["content"])
                # Duplicates up to case and punctuation are dropped.
                found["\n".join(plain(message["content"]) for message in messages)] = case, whole
            drawn += found.values()
    return drawn


def conversation_of(world: World, skill: str, index: int) -> Dialogue:
    """Make the conversation with number `index` of a skill; of some, numbers differ in kind."""
    if skill == "recall":
        return remembering(world, RECALL_TOKENS[index % len(RECALL_TOKENS)])
    if skill == "system":
        return instructed(world, MANNERS[index % len(MANNERS)], 1 + index % 3)
    if skill == "json" and index % 3 == 0:
        return instructed(world, "json", 1)
    if skill == "tool":
        whole = with_tools(world, WAYS[index % len(WAYS)])
        # Half of them end with a call, the others with the answer from the results.
        (exchange,) = whole.exchanges
        if exchange.steps and index // len(WAYS) % 2:
            last = max(n for n, (role, _) in enumerate(exchange.steps) if role == "assistant")
            before, (_, call) = exchange.steps[:last], exchange.steps[last]
            return replace(whole, exchanges=[replace(exchange, answer=call, steps=before)])
        return whole
    return Dialogue([draw(world, skill)])
