"""Reads and shows sampling parameters. Values are typed as JSON or as plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from reprlib import repr as short_repr
from typing import Any

import msgspec

from minisgl.errors import InvalidRequestError
from minisgl.request import SamplingParams

from .text_format import aligned, did_you_mean, shortened

# The chat does not display these, and has a command for the last.
NOT_SHOWN = (
    *("logprobs", "logprob_token_ids", "prompt_logprobs", "return_routed_experts"),
    "structured",
)
NAMES = tuple(spec.name for spec in fields(SamplingParams) if spec.name not in NOT_SHOWN)
FLAGS = frozenset(spec.name for spec in fields(SamplingParams) if isinstance(spec.default, bool))
# Fields of a request that the chat sets itself, or whose results it does not display.
NOT_OFFERED = frozenset(
    (*("model", "messages", "stream", "stream_options", "n", "echo", "top_logprobs"), *NOT_SHOWN)
)
TEXTS = ("stop", "bad_words")  # a text or a list of them
TOKEN_IDS = ("stop_token_ids", "allowed_token_ids")
FLAG_WORDS = {"true": True, "on": True, "false": False, "off": False}
MAX_SHOWN_CHARS = 40


def check_name(name: str, *, may_be_other: bool) -> None:
    """Raises InvalidRequestError for an unknown name.

    `may_be_other`: a server may know more names than minisgl.
    """
    if name in NAMES or (may_be_other and name not in NOT_OFFERED):
        return
    hints = did_you_mean(name, NAMES) + ("" if may_be_other else "/params lists them.")
    said = f"is no parameter of a chat. {hints}".rstrip()
    raise InvalidRequestError(shortened(name, MAX_SHOWN_CHARS), said)


def parsed(name: str, text: str) -> Any:
    """Parses a typed value; None resets the parameter to its default.

    Raises InvalidRequestError if the value has the wrong type.
    """
    if text in ("default", "null"):
        return None
    if name in FLAGS:
        return in_form(name, FLAG_WORDS.get(text.lower(), text))
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = text
    # Any text can be one to stop at or a word, also that of a number.
    is_text = name in TEXTS and not isinstance(value, str | list)
    return in_form(name, text if is_text else value)


def in_form(name: str, value: Any) -> Any:
    """Converts a JSON value for SamplingParams, which checks numbers and ranges.

    Raises InvalidRequestError if the value has the wrong type.
    """
    if value is None:
        return None
    if name in FLAGS and not isinstance(value, bool):
        raise InvalidRequestError(name, f"must be true or false, not {short_repr(value)}.")
    if name in TEXTS and not isinstance(value, str | list):
        raise InvalidRequestError(
            name, f"must be a text or a list of them, not {short_repr(value)}."
        )
    if name in TEXTS:
        return [value] if isinstance(value, str) else value
    if name in TOKEN_IDS:
        value = [value] if isinstance(value, int) else value
        if not isinstance(value, list):
            raise InvalidRequestError(
                name, f"must be a list such as [1, 2], not {short_repr(value)}."
            )
    if name == "logit_bias":
        if not isinstance(value, dict):
            raise InvalidRequestError(
                name, f'must be an object such as {{"7": -5}}, not {short_repr(value)}.'
            )
        # In JSON every key is a text. One that is no id keeps its form, and is refused with it.
        return {int(key) if re.fullmatch(r"\d{1,10}", key) else key: value[key] for key in value}
    return value


def shown(value: object) -> str:
    """Formats a value as it could be typed."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def listed(chosen: Mapping[str, Any], defaults: SamplingParams | None) -> list[str]:
    """Lines with every effective parameter. `defaults`: None if a server has its own."""
    names = list(chosen) if defaults is None else NAMES
    rows = [
        (
            name,
            shortened(shown(chosen.get(name, getattr(defaults, name, None))), MAX_SHOWN_CHARS),
            "chosen" if name in chosen else "default",
        )
        for name in names
    ]
    rest = "All the others are" if chosen else "None is chosen: all are"
    return aligned(rows) + ([f"{rest} the server's own."] if defaults is None else [])
