"""Clients can parse what a stream has of an input, whatever the model writes."""

from __future__ import annotations

import json
import random
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.server.apis.messages.object_text import MAX_DEPTH, ObjectText, is_object

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
MISTAKES = (
    "",
    '"',
    "'",
    ",",
    ":",
    "}",
    "]",
    "x",
    "\\",
    "\\u12",
    "\\ud800",
    "\n",
    "NaN",
    "tru",
    "-",
)


def passed(text: str, chance: random.Random) -> str:
    """What is passed on of a text in pieces of any size, at each of which a client parses it."""
    found, read = "", ObjectText()
    while text:
        size = chance.randint(1, 4)
        found += read.passed(text[:size])
        text = text[size:]
        if found.strip():
            assert isinstance(jiter.from_json(found.encode(), partial_mode=True), dict)
    return found


@given(
    st.dictionaries(TEXTS, VALUES, max_size=3), st.booleans(), st.sampled_from([None, 1]), st.data()
)
def test_an_object_is_passed_on_whole_and_a_mistake_ends_it(
    value: dict[str, Any], ascii: bool, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    chance = data.draw(st.randoms(use_true_random=False))
    assert passed(text, chance) == text and is_object(text)
    place = chance.randint(0, len(text))
    changed = text[:place] + chance.choice(MISTAKES) + text[place + chance.randint(0, 2) :]
    found = passed(changed, chance)
    assert changed.startswith(found) and ObjectText().passed(changed) == found
    if is_object(changed):
        assert found == changed.rstrip(" \t\r\n") and isinstance(json.loads(changed), dict)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", '"a"', '{"a": 1,}', '{"a": 01}', '{"a": 1} {', '{"a": NaN}', '{"a"}'),
        *("{1: 2}", '{"a": [}', '{"a": "\n"}', "{}\u2028", r'{"a": "\x"}', r'{"a": "\udc00"}'),
        *(r'{"a": "\ud83d\u0041"}', '{"a":' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH),
    ],
)
def test_what_clients_cannot_parse_is_no_object(text: str) -> None:
    assert not is_object(text)
