"""Questions as the model reads them, and answers from the logits of its labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, product
from string import ascii_uppercase

from minisgl.errors import InvalidRequestError
from minisgl.server.apis.decisions import answer_types as answers
from minisgl.server.apis.decisions.request_types import (
    ChoiceQuestion,
    PredicateQuestion,
    Question,
)
from minisgl.text.tokenizer import Tokenizer

HEADS = {
    "predicate": "Is this statement about the text above true?",
    "choice": "Choose the option that fits the text above.",
    "score": "Rate the text above by these levels, the lowest one first.",
}
BEFORE = ("", " ", "\n")  # what a label may stand behind where it is tokenized
Label = tuple[str, tuple[int, ...]]  # its text, and the tokens that spell it


def labels(tokenizer: Tokenizer, num: int) -> list[Label]:
    """Labels for `num` options: A, B and so on, as far as a token spells them.

    Raises InvalidRequestError if there are not as many.
    """
    pairs = ("".join(pair) for pair in product(ascii_uppercase, repeat=2))
    spelled = ((text, _tokens(tokenizer, text)) for text in chain(ascii_uppercase, pairs))
    found = [*islice((each for each in spelled if each[1]), num)]
    if len(found) < num:
        raise InvalidRequestError(
            "questions", f"this model has labels for up to {len(found)} options, not {num}."
        )
    return found


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens that are a text by themselves, with or without a space in front."""
    wanted = {text.encode(), f" {text}".encode()}
    last = (
        token_id
        for before in BEFORE
        for token_id in tokenizer.encode(before + text, add_special_tokens=False)[-1:]
    )
    return tuple(sorted({each for each in last if tokenizer.token_bytes(each) in wanted}))


def prompt_of(question: Question, labels: Iterable[Label]) -> str:
    """What follows the input: a question that one of the labels answers."""
    given = question.instructions
    said = given if isinstance(given, str) else "\n".join(part.text for part in given)
    kind = str(question.__struct_config__.tag)
    lines = [
        f"{label}. {option.text}" + (f": {option.description}" if option.description else "")
        for option, (label, _) in zip(question.options, labels, strict=False)
    ]
    return "\n".join((HEADS[kind], said, "", *lines, "", "Answer with the letter only."))


def answer_of(
    question: Question, labels: Sequence[Label], logits: Iterator[float]
) -> answers.Answer:
    """The answer to a question. logits: of the tokens of its labels, one label after the other."""
    num = len(question.options)
    weights = [[next(logits) for _ in token_ids] for _, token_ids in labels[:num]]
    most = max(map(max, weights))
    masses = [sum(math.exp(logit - most) for logit in each) for each in weights]
    probabilities = [mass / sum(masses) for mass in masses]
    name = question.name
    if isinstance(question, PredicateQuestion):
        return answers.PredicateAnswer(name, probabilities[0])
    best = max(probabilities)
    # How far the likeliest one is above the share that each would have.
    confidence = max(0.0, (best - 1 / num) / (1 - 1 / num))
    if isinstance(question, ChoiceQuestion):
        values = [each.value for each in question.choices]
        shown = [*map(answers.ChoiceProbability, values, probabilities)]
        return answers.ChoiceAnswer(name, values[probabilities.index(best)], confidence, shown)
    levels = [each.label for each in question.levels]
    score = sum(place * each for place, each in enumerate(probabilities))
    places = [*map(answers.LevelProbability, range(num), levels, probabilities)]
    return answers.ScoreAnswer(name, score, confidence, places)
