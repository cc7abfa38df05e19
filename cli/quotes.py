"""The form of what a person types: a command or a question, either of them perhaps in quotes."""

from __future__ import annotations

QUOTES = '"""'


def unquoted(text: str) -> str:
    """What stands between three quotation marks, if the text does."""
    text = text.strip()
    if text.startswith(QUOTES) and text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def unquoted_argument(text: str) -> str:
    """Of a command, where people also write one pair, as in a shell."""
    inside = unquoted(text)
    is_pair = inside == text and len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_pair and '"' not in text[1:-1] else inside


def as_command(text: str) -> tuple[str, str] | None:
    """Its name and what stands behind it; None for a question, be it one about /a/path."""
    name, rest = [*text.split(maxsplit=1), "", ""][:2]
    return (name, rest.strip()) if name.startswith("/") and "/" not in name[1:] else None


def is_open(text: str) -> bool:
    """Whether a text, or what follows a command, begins with three and has not come to the end."""
    command = as_command(text)
    text = text.strip() if command is None else command[1]
    closed = text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)
    return text.startswith(QUOTES) and not closed
