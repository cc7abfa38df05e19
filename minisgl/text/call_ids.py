"""The ids of tool calls."""

from __future__ import annotations

import hashlib
import re
import secrets
import string

ALPHABET = string.ascii_letters + string.digits
NUM_RANDOM = 24
NUM_SHORT = 9  # what the templates of Mistral's models take
SHORT_ID = re.compile(f"[{ALPHABET}]{{{NUM_SHORT}}}")


def new_call_id() -> str:
    """An id unlike all others."""
    return "call_" + "".join(secrets.choice(ALPHABET) for _ in range(NUM_RANDOM))


def short_id(call_id: str) -> str:
    """An id of 9 letters and digits, which depends on `call_id` alone."""
    if SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "replace")).digest())
    letters = []
    for _ in range(NUM_SHORT):
        number, place = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[place])
    return "".join(letters)
