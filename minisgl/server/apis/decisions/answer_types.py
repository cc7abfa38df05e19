"""The answers to POST /v1/decisions as types."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from minisgl.server.apis.responses.answer_types import ResponseUsage


class PredicateAnswer(Struct, tag_field="type", tag="predicate"):
    name: str | None
    probability: float  # that the statement is true


class ChoiceProbability(Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice"):
    name: str | None
    choice: str | bool  # the likeliest one
    confidence: float  # 0: all are as likely; 1: there is no doubt
    probabilities: list[ChoiceProbability]


class LevelProbability(Struct):
    value: int  # the place of the level, from 0
    label: str
    probability: float


class ScoreAnswer(Struct, tag_field="type", tag="score"):
    name: str | None
    score: float  # the expected place
    confidence: float  # as that of a choice
    probabilities: list[LevelProbability]


Answer: TypeAlias = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class Decision(Struct):
    model: str
    answers: list[Answer]  # in the order of the questions
    usage: ResponseUsage
