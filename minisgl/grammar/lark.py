"""Writes a Lark grammar, in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl.grammar.source import OPTIONS


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a list whose order is fixed."""

    rule: str
    is_required: bool


class Grammar:
    """A grammar that is being written."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        """marker_ids: the markers that are one token, which no text has in it."""
        self.marker_ids = marker_ids
        self._rules: list[str] = []
        self._nested: list[dict[str, str]] = []  # grammars of their own

    def rule(self, name: str, *parts: str) -> str:
        """Add a rule; returns its name. One in capitals is a terminal."""
        self._rules.append(f"{name}: {' '.join(parts)}")
        return name

    def text(self, text: str) -> str:
        """An expression for a text with markers in it; "" for none."""
        return marked(text, self.marker_ids)

    def first_marker(self, text: str) -> str:
        """The first marker in a text; "" for none."""
        places = {text.find(marker): marker for marker in self.marker_ids if marker in text}
        return places[min(places)] if places else ""

    def raw_text(self, name: str, text: str, end: str) -> str:
        """Add a rule for a plain text and what is behind it, which the text does not have in it.

        text: the expression of a terminal.
        """
        marker = self.first_marker(end)
        before, _, rest = end.partition(marker) if marker else ("", "", "")
        terminal = self.rule(name.upper(), f"({text})", string(before) if before else "")
        if marker:
            return self.rule(name, terminal, self.text(marker + rest))
        self.rule(f"{name}[suffix={string(end)}]", terminal)
        return name

    def listed(self, name: str, members: Sequence[Member], separator: str, more: str = "") -> str:
        """Add rules for members in their order, and any number of `more` behind them.

        `first_i`: the members from i on, the first of the list; `next_i`: others precede.
        """
        rule, last, between = self.rule, len(members), string(separator)
        rule(f"{name}_first_{last}", f"({more} ({between} {more})*)?" if more else '""')
        rule(f"{name}_next_{last}", f"({between} {more})*" if more else '""')
        for index, member in reversed([*enumerate(members)]):
            skip = "" if member.is_required else f" | {name}_first_{index + 1}"
            skip_next = "" if member.is_required else f" | {name}_next_{index + 1}"
            behind = f"{name}_next_{index + 1}"
            rule(f"{name}_first_{index}", f"{member.rule} {behind}{skip}")
            rule(f"{name}_next_{index}", f"{between} {member.rule} {behind}{skip_next}")
        return f"{name}_first_0"

    def nest(self, name: str, lark: str) -> str:
        """Add a grammar of its own; returns an expression for it."""
        self._nested.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def __str__(self) -> str:
        lark = "\n".join(self._rules) + OPTIONS
        if not self._nested:
            return lark
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._nested]})


def marked(text: str, marker_ids: Mapping[str, int]) -> str:
    """An expression for a text in which `marker_ids` are tokens; "" for none."""
    parts = re.split(f"({'|'.join(map(re.escape, marker_ids))})", text) if marker_ids else [text]
    return " ".join(
        f"<[{marker_ids[part]}]>" if part in marker_ids else string(part) for part in parts if part
    )


def string(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
