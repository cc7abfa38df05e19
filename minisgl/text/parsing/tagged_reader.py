"""Reader of calls that have tags around names and values:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A value may have any text in it, tags as well: a closing counts where something follows that may
follow it. The values become JSON by the tool's schema. A tag that is written wrongly is read as far
as its name is certain. What cannot be read, as a parameter without a name or one that was given
before, is text after the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minisgl.text.parsing.alternatives import properties_of
from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.json_formats import END_TOOL_CALL, TOOL_CALL, TOOL_NAME, read_hermes
from minisgl.text.parsing.plain_values import escaped, types_of, value_json
from minisgl.text.parsing.reader import BLANK_RUN, Patterns, Put, Reading

END_OF_NAME = Patterns(">", "<", "\n")
ATTRIBUTE = re.compile(r"""\bname\s*=\s*(?:(["'])(.*?)\1|([^\s"'=]+))""")
IS_TEXT = re.compile(r'"\s+string="(true|false)"\s*$')
AROUND_NAME = " \t:=\"'"
MAX_TRIED_CHARS = 4096  # of a value: whether it is whole is tried at every closing in it
QUOTE_OR_ESCAPE = re.compile(r'["\'\n]|\\(?:.|$)', re.DOTALL)
NO_NAME = re.compile("[=\"']")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format. Where there is a name in a tag, `function` and `parameter` are what is
    before `before_name`: a model may go on wrongly from there."""

    call: str  # around a call, or around several
    end_call: str
    function: str = "<function"  # "": the name comes right after `call`
    end_function: str = "</function>"
    parameter: str = "<parameter"
    end_parameter: str = "</parameter>"
    before_name: str = "="
    after_name: str = ">"
    value: str = ""  # a tag before each value; names are between `parameter` and `after_name`
    tells_type: bool = False  # a tag says whether the value is a string; others are JSON
    breaks_lines: bool = False  # one line break on each side of a value is markup

    @property
    def opening(self) -> str:
        """What begins a call where the tag around it is forgotten."""
        return self.function + self.before_name

    @property
    def key(self) -> str:
        """What begins a parameter."""
        return self.parameter + self.before_name


XML = Tags(TOOL_CALL, END_TOOL_CALL, breaks_lines=True)


class _Quotes:
    """Whether a string is open at the end of a list or an object, as JSON or Python has it, whose
    text comes in pieces."""

    def __init__(self) -> None:
        self.open = ""  # the quote
        self._begun = self._escaped = False

    def go_over(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
            self._begun = text.startswith(("[", "{"))
        if not self._begun:
            return
        for found in QUOTE_OR_ESCAPE.finditer("\\" * self._escaped + text):
            self._escaped = found[0] == "\\"
            if found[0] == self.open or found[0] == "\n":  # which is in no such string
                self.open = ""
            elif found[0] in "'\"" and not self.open:
                self.open = found[0]


def read_tagged(tags: Tags, calls: CallContext, opening: str) -> Reading[bool]:
    """Read a call, or all calls that a tag is around. Closings may be missing.

    Within the tag that XML has in common with hermes, a model may go on with the JSON of hermes.
    """
    is_around = tags == XML and opening == calls.markers[TOOL_CALL]
    if is_around and (yield from calls.reader.peek()) == "{":
        return (yield from read_hermes(calls, opening))
    return (yield from _Calls(tags, calls).read(opening))


@dataclass(frozen=True, slots=True)
class _Key:
    """The name of a parameter, "" where none is certain, and what the model has written for it."""

    name: str
    written: str
    types: frozenset[str]  # of the value; none if they are not known


class _Calls:
    """Calls that are being read, one after the other."""

    def __init__(self, tags: Tags, calls: CallContext) -> None:
        self._tags = self._own_tags = tags
        self._calls = calls
        self._reader, self._emitter = calls.reader, calls.emitter
        # The tags as they arrive.
        self._call, self._end_call = calls.markers[tags.call], calls.markers[tags.end_call]
        self._function, self._opening = calls.markers[tags.function], calls.markers[tags.opening]
        self._end_function = calls.markers[tags.end_function]
        self._parameter, self._value = calls.markers[tags.parameter], calls.markers[tags.value]
        self._end_key = calls.markers[tags.after_name]
        self._end_parameter = calls.markers[tags.end_parameter]
        plain = (XML.parameter,) if tags.tells_type else ()
        self._openings = (self._parameter, *plain)  # of parameters
        self._set_closings()
        # Of the call:
        self._schema: Mapping[str, Any] = {}
        self._known: Collection[str] = ()  # parameters
        self._given: set[str] = set()
        self._unread: list[str] = []

    def _set_closings(self) -> None:
        closings = (self._end_parameter, self._end_function, self._end_call)
        self._closings = tuple(filter(None, closings))
        openings = filter(None, (self._call, self._opening))
        self._between = Patterns(self._parameter, *self._closings[1:], *openings)

    def _choose_tags(self) -> Reading[None]:
        """Take the tags of XML for a parameter that comes next with these instead."""
        if not self._own_tags.tells_type:
            return
        found = yield from self._reader.starts(*self._openings)
        if not found or found == self._parameter:
            return
        self._tags = self._own_tags
        if found == XML.parameter:
            self._tags = replace(
                self._tags, parameter=XML.parameter, end_parameter=XML.end_parameter
            )
        self._parameter = found
        self._end_parameter = self._calls.markers[self._tags.end_parameter]
        self._set_closings()

    def read(self, opening: str) -> Reading[bool]:
        reader, begun = self._reader, ""
        if self._function and opening == self._opening:
            begun = self._tags.before_name
            if not self._emitter.at_line_start:
                return False
        else:
            yield from reader.peek()
            if self._function and not (yield from reader.skip(self._function)):
                return False
        found = False
        while name := (yield from self._function_name(begun)):
            found, begun = True, ""
            self._calls.start(name)
            end = yield from self._parameters(name)
            yield from reader.peek()
            if end == self._end_call or not self._function:
                return True
            reader.record()
            if not (yield from reader.skip(self._function)):
                reader.forget()
                yield from reader.skip(self._end_call)
                return True
        if found:
            self._emitter.text(reader.recorded())
        return found

    def _function_name(self, begun: str) -> Reading[str]:
        """Read the name of a function; "" where there is none."""
        reader, tools = self._reader, self._calls.tools
        if self._function:
            head = yield from self._rest_of_tag(tools, begun)
            closed = yield from reader.skip(">")
            name = self._name_in(head, tools, bool(closed))
            if closed:
                return name
            is_whole = yield from reader.starts("\n", self._parameter, *self._closings)
            return name if is_whole and name in tools else ""
        name = yield from reader.match(TOOL_NAME)
        if not (yield from reader.peek()):
            return name if reader.natural else ""
        if (yield from reader.starts(self._parameter, self._end_call)):
            return name
        is_tag = yield from reader.starts(self._value, self._end_key, self._end_parameter)
        if (is_tag and name in tools) or (yield from self._is_key(self._parameters_of(name))):
            return name
        return ""

    def _parameters(self, name: str) -> Reading[str]:
        """Read the parameters and what ends the call, which is returned."""
        emitter = self._emitter
        self._schema, self._known = self._calls.schema(name), self._parameters_of(name)
        self._given, self._unread = set(), []
        emitter.arguments("{")
        while (end := (yield from self._next_tag())) == self._parameter:
            end = yield from self._argument()
            if end not in (self._end_parameter, self._parameter):
                break
        # The braces are no text of the model's: at its end they are certain.
        complete = bool(end) or self._reader.natural
        if complete:
            emitter.arguments("}")
        emitter.end_call()
        if complete:
            emitter.text("\n".join(self._unread))
        return end

    def _parameters_of(self, name: str) -> Collection[str]:
        """The names of the parameters of a function, if they are known."""
        return properties_of(self._calls.schema(name))

    def _next_tag(self) -> Reading[str]:
        """Read up to the next parameter, or to what ends the call; returns its tag."""
        reader = self._reader
        yield from reader.peek()
        yield from self._choose_tags()
        if self._value and (yield from self._is_key(self._known)):
            return self._parameter  # which is forgotten
        skipped: list[str] = []
        found = yield from reader.until(self._between, skipped.append)
        self._leave("".join(skipped).strip().removeprefix(self._end_parameter))  # written twice
        if found in (self._call, self._opening):
            reader.unread(found)
        return found

    def _leave(self, text: str) -> None:
        """Keep what cannot be read."""
        if text := text.strip():
            self._unread.append(text)

    def _argument(self) -> Reading[str]:
        """Read a parameter whose tag has been read; returns what ends its value."""
        key = yield from (self._key_between_tags() if self._value else self._key_in_tag())
        put = self._emitter.arguments
        if not key.name or key.name in self._given:
            parts: list[str] = []
            end = yield from self._text(parts.append)
            closing = end if end == self._end_parameter else ""
            self._leave(f"{self._parameter}{key.written}{''.join(parts)}{closing}")
            return end
        put(f"{', ' if self._given else ''}{json.dumps(key.name, ensure_ascii=False)}: ")
        self._given.add(key.name)
        if key.types != {"string"}:
            return (yield from self._typed_value(key.types))
        put('"')
        end = yield from self._text(
            lambda text: put(escaped(text)), breaks_lines=self._tags.breaks_lines
        )
        if end or self._reader.natural:
            put('"')
        return end

    def _typed_value(self, types: frozenset[str]) -> Reading[str]:
        """Read a value that is emitted when it is whole; returns what ends it."""
        parts: list[str] = []
        quotes = _Quotes()
        is_json = bool(types) and "string" not in types

        def put(text: str) -> None:
            parts.append(text)
            quotes.go_over(text)

        def value() -> str:
            text = "".join(parts)
            if is_json:
                text = text.strip().removeprefix(self._value)  # a tag that was written twice
            return self._emitter.spelled(text)

        def is_whole() -> bool | None:
            if not is_json:
                return None
            if quotes.open:
                return False
            is_short = sum(map(len, parts)) <= MAX_TRIED_CHARS
            return (is_short and not value_json(value(), types).startswith('"')) or None

        end = yield from self._text(put, is_whole, breaks_lines=self._tags.breaks_lines)
        if end or self._reader.natural:
            self._emitter.arguments(value_json(value(), types))
        return end

    # -- names -------------------------------------------------------------------------------------

    def _key_in_tag(self) -> Reading[_Key]:
        """Read the rest of a tag with a name in it."""
        reader, tags = self._reader, self._tags
        head = yield from self._rest_of_tag(self._known)
        end = yield from reader.skip(*(">" if tags.breaks_lines else ">\n"))
        name = self._name_in(head, self._known, end == ">")
        if not (end or (yield from reader.starts("\n"))):
            name = ""  # which may go on, or have the value behind it
        types = types_of(self._schema, name)
        said = tags.tells_type and IS_TEXT.search(head)
        if said:
            text = frozenset({"string"})
            if said[1] == "false":
                types = types - text or types
            elif not types or "string" in types:
                types = text
        return _Key(name, head + end, types)

    def _rest_of_tag(self, known: Collection[str], begun: str = "") -> Reading[str]:
        """Read a tag up to its `>`, or to the line break or the tag before which it is missing.

        A name of `known` may have any < and > in it; another one with a < ends with its line.
        """
        reader, parts = self._reader, [begun]
        tags = (self._parameter, *self._closings)
        while end := (yield from reader.until(END_OF_NAME, parts.append)):
            reader.unread(end)
            name = "".join(parts)[len(self._tags.before_name) :] + end
            if end == "\n" or (yield from reader.starts(*tags)):
                break
            if any(longer.startswith(name) for longer in known):
                parts.append(reader.take(1))
                continue
            if end == "<":
                reader.unread((yield from reader.until(Patterns("\n", *tags), parts.append)))
                if "".join(parts).endswith(">"):
                    parts = ["".join(parts)[:-1]]
                    reader.unread(">")
            break
        return "".join(parts)

    def _name_in(self, head: str, known: Collection[str], is_closed: bool) -> str:
        """The name in a tag, of which `head` is the rest; "" where none is certain."""
        name = head.removeprefix(self._tags.before_name).strip()
        if self._end_key != ">":
            name = IS_TEXT.sub(self._end_key, name).removesuffix(self._end_key)
        if name in known:
            return name
        attribute = ATTRIBUTE.search(head)
        name = (attribute[2] or attribute[3] if attribute else head).strip(AROUND_NAME)
        first = name.partition(" ")[0].rstrip("/")
        if name in known or TOOL_NAME.fullmatch(name):
            return name
        if is_closed and first in known:
            return first
        return name if is_closed and not NO_NAME.search(name) else ""

    def _key_between_tags(self) -> Reading[_Key]:
        """Read a key and the tags around it. Of these some may be missing, or written twice."""
        reader, written, key = self._reader, list[str](), list[str]()
        stops = Patterns(self._parameter, self._end_key, self._value, *self._closings)

        def put(text: str) -> None:
            written.append(text)
            key.append(text)

        while (found := (yield from reader.until(stops, put))) == self._parameter:
            if "".join(key).strip():
                break
            written.append(found)
        name = "".join(key).strip()
        if found not in (self._end_key, self._value):
            reader.unread(found)
            return _Key("", "".join(written), frozenset())
        while found == self._end_key:
            written += (found, (yield from reader.match(BLANK_RUN)))
            found = yield from reader.skip(self._end_key, self._value)
        written.append(found)
        if not found:
            is_tag = yield from reader.starts(self._parameter, *self._closings)
            if is_tag or not (yield from reader.peek()):
                name = ""  # there is no value
        return _Key(name, "".join(written), types_of(self._schema, name))

    def _is_key(self, known: Collection[str]) -> Reading[bool]:
        """Whether one of `known`, if there are any, comes next, with the tags behind a key; nothing
        is read."""
        return self._reader.ahead(self._read_key(known))

    def _read_key(self, known: Collection[str]) -> Reading[bool]:
        name = yield from self._reader.match(TOOL_NAME)
        if not name or (known and name not in known):
            return False
        if not (yield from self._reader.skip(self._end_key)):
            return False
        yield from self._reader.match(BLANK_RUN)
        return bool((yield from self._reader.starts(self._value)))

    # -- values ------------------------------------------------------------------------------------

    def _text(
        self,
        put: Put,
        is_whole: Callable[[], bool | None] = lambda: None,
        *,
        breaks_lines: bool = False,
    ) -> Reading[str]:
        """Read the text of a value; returns the closing behind it, "" at the end of the answer.

        The tag of a parameter that is still to come shows that the closing before it is missing: it
        is returned, and comes next again. is_whole: whether what has been put is a value that
        cannot go on, or one that must; None if what follows decides.
        """
        reader = self._reader
        missing = [name for name in self._known if name not in self._given]
        if self._value:
            keys = [self._parameter]
        else:
            key = self._calls.markers[self._tags.key]
            keys = [key + name + self._end_key for name in missing] if self._known else [key]
        closings = Patterns(*self._closings, *keys)
        line_break, in_line = "", False  # a line break is held back

        def put_all_but_line_break(text: str) -> None:
            nonlocal line_break, in_line
            text = line_break + text
            body = text.removesuffix("\n")
            line_break = text[len(body) :]
            in_line = not line_break
            if body:
                put(body)

        if breaks_lines:
            yield from reader.skip("\n")
        while found := (yield from reader.until(closings, put_all_but_line_break)):
            whole = is_whole()
            if whole is False and not line_break:
                pass  # a line break is in no value that is open
            elif found in keys:
                is_key = not in_line
                if self._value:
                    is_key = bool(missing or not self._known) and (yield from self._is_key(missing))
                if is_key:
                    reader.unread(found)
                    return self._parameter
            elif (found == self._end_parameter and whole) or (yield from self._is_closing(found)):
                if line_break and not breaks_lines:
                    put(line_break)
                return found
            put_all_but_line_break(found)
        if line_break and not (breaks_lines and reader.natural):
            put(line_break)
        return ""

    def _is_closing(self, tag: str) -> Reading[bool]:
        """Whether something follows that may follow a closing; nothing is read."""
        return self._reader.ahead(self._follows(tag))

    def _follows(self, tag: str) -> Reading[bool]:
        reader = self._reader
        yield from reader.match(BLANK_RUN)
        if tag != self._end_call:
            openings = self._openings if tag == self._end_parameter else (self._opening,)
            following = self._closings[self._closings.index(tag) + 1 :]
            found = yield from reader.begins(*openings, *following)
            return found or (bool(self._value) and (yield from self._is_key(self._known)))
        if not (yield from reader.begins(self._call)):
            return False
        yield from reader.skip(self._call)
        yield from reader.match(BLANK_RUN)
        if self._function:
            return (yield from reader.begins(self._function))
        yield from reader.match(TOOL_NAME)
        yield from reader.match(BLANK_RUN)
        return (yield from reader.begins(self._parameter, self._end_call))
