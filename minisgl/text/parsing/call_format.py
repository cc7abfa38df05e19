"""What a format of tool calls consists of, for its reader and for grammars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.reader import Reading


class ArgumentStyle(Enum):
    """How the arguments of a call are written."""

    JSON = "json"  # an object
    TAGS = "tags"  # the name and the value of each between tags, strings as plain text
    QUOTED = "quoted"  # NAME:VALUE for each, with `,` between them and a token around strings
    PYTHON = "python"  # NAME=LITERAL for each, with `, ` between them


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a model writes its calls:

    begin, then for each call head + name + middle + arguments + tail with `between` after all but
    the last, then end. Where the model says so, a text begins with `text`, and calls after it with
    `after_text`; or a text before calls is `aside`.
    """

    head: str
    middle: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    arguments: ArgumentStyle = ArgumentStyle.JSON
    tags: tuple[str, str, str] = ("", "", "")  # before a name, before its value and after it
    text: str = ""
    after_text: str = ""
    aside: tuple[str, str] = ("", "")  # what is around a text that comes before calls
    single: bool = False  # an answer has one call at most
    numbered: bool = False  # each name has `:` and a number behind it
    json_tag: str = ""  # the second of `tags` where a value is JSON, if it is another one then

    def first(self, name: str) -> str:
        """What comes before the arguments of the first call."""
        return f"{self.begin}{self.head}{name}{self.middle}"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A family's format of tool calls: its facts, and how it is read."""

    name: str
    spelling: CallSpelling
    markers: tuple[str, ...]  # what may be a single token
    openings: tuple[str, ...]  # the markers that begin calls wherever they are
    # Given the opening: a marker, which has been read; one of `in_text`, which comes next; or "".
    # None: a MessageFormat reads them.
    read: Callable[[CallContext, str], Reading[bool]] | None
    closing: str = ""  # without text where it stands after a call
    bare: bool = False  # an answer may begin with calls, without an opening
    in_text: tuple[str, ...] = ()  # what may begin calls of offered tools in a text
