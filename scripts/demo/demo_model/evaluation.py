"""The held-out evaluation: questions that training never saw, each with its one right answer.

Split 'instances' asks in phrasings of the training for names, cities, words, numbers, sums and
lists that it never saw, and for known facts in questions that it never saw word for word. Split
'phrasings' asks for all of that in phrasings that it never saw.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from demo_model.conversation import Conversation, instructed, remembering
from demo_model.data import tokenize
from demo_model.skills import SKILLS, draw
from demo_model.world import World, plain

SEED = 20261121
SPLITS = ("instances", "phrasings")
MANNERS = ("upper", "lower", "begin", "end")
# Tokens of the conversations that end with a question for something told in them.
RECALL_TOKENS = (40, 80, 150, 300, 500, 800, 1300, 1800)
NUM_CASES = {"recall": 64, "copy": 48, "arithmetic": 48, "option": 96, "command": 36}
NUM_CASES_OF_OTHERS = 24

# Of the cases that the bundled model was trained beside. They were frozen before it was trained:
# with other cases, or other options, it has to be trained again.
FROZEN_HASH = "e8032f87969a6ee9666fe73efe5cec237e555384ee21b8a3deae1ed87a6e47e9"


@dataclass(frozen=True, slots=True)
class Case:
    split: str
    skill: str
    messages: list[dict[str, str]]  # up to the question
    answer: str


@dataclass(frozen=True, slots=True)
class TokenizedCase:
    split: str
    skill: str
    ids: np.ndarray  # the prompt, the right answer and <|im_end|>
    num_answer: int  # how many ids at the end are the answer and <|im_end|>


@cache
def cases() -> tuple[Case, ...]:
    return tuple(case for case, _ in _drawn())


def evaluation_hash() -> str:
    text = json.dumps([asdict(case) for case in cases()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenized_cases(folder: Path) -> list[TokenizedCase]:
    """The cases as token ids; `folder` holds tokenizer.json."""
    drawn = _drawn()
    tokenized = tokenize(folder, [whole for _, whole in drawn])
    found = []
    for (case, _), (ids, learned) in zip(drawn, tokenized, strict=True):
        num_answer = len(ids) - int(np.flatnonzero(~learned)[-1]) - 1
        found.append(TokenizedCase(case.split, case.skill, ids, num_answer))
    return found


@cache
def _drawn() -> list[tuple[Case, Conversation]]:
    drawn = []
    for split in SPLITS:
        world = World(
            random.Random(f"{SEED} {split}"), evaluates=True, new_phrases=split == "phrasings"
        )
        for skill in (*SKILLS, "recall", "system"):
            found: dict[str, tuple[Case, Conversation]] = {}
            while len(found) < NUM_CASES.get(skill, NUM_CASES_OF_OTHERS):
                whole = _conversation(world, skill, len(found))
                *messages, last = whole.messages()
                case = Case(split, skill, messages, last["content"])
                # Two that differ in case and marks alone are one.
                found["\n".join(plain(message["content"]) for message in messages)] = case, whole
            drawn += found.values()
    return drawn


def _conversation(world: World, skill: str, index: int) -> Conversation:
    if skill == "recall":
        return remembering(world, RECALL_TOKENS[index % len(RECALL_TOKENS)])
    if skill == "system":
        return instructed(world, MANNERS[index % len(MANNERS)], 1 + index % 3)
    return Conversation([draw(world, skill)])
