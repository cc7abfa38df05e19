r"""GBNF, the grammars of llama.cpp, made into Lark for llguidance.

GBNF describes characters; llguidance cuts a text into lexemes first, and takes as many characters
for each as it can. With a lexeme of its own for `ws ::= [ \n]*` the grammar `root ::= "5" ws "\n"`
could never end, since the blanks take the last line break as well. So the lexemes are chosen here:
each is as large as it can be without taking a character that might begin what comes next.

Every place in the grammar where a character stands is a state of one nondeterministic automaton,
in which a recursive rule goes on wherever any of its uses does. Two transitions compete if one text
can lead to both and the next byte may be the same. If one of them ends a lexeme, the other must not
lie within one: that lexeme is split into its parts, in the last resort into single characters.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

TOKEN = re.compile(
    r"""
    (?P<blank>   \s+ | \#[^\n]* )
  | (?P<name>    [\w-]+ )
  | (?P<literal> " (?: [^"\\] | \\. )* " )
  | (?P<chars>   \[ (?: [^\]\\] | \\. )* \] )
  | (?P<repeat>  [*+?] | \{ \s* (?P<least>\d+) \s* (?P<comma> , \s* (?P<most>\d*) )? \s* \} )
  | (?P<sign>    ::= | [|().] )
    """,
    re.X | re.S,
)
CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<sign>.?))|(?P<plain>.)",
    re.S,
)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '\\"[]'}}
COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
ROOT = "root"
ANY = ((0, sys.maxunicode),)
SURROGATES = range(0xD800, 0xE000)

Ranges = tuple[tuple[int, int], ...]  # of characters, first and last


@dataclass(eq=False, slots=True)
class Part:
    """A part of a rule, whose kind says which of the other fields it has."""

    kind: str  # chars, sequence, choice, repeat, rule
    parts: list[Part] = field(default_factory=list)
    ranges: Ranges = ()
    least: int = 0
    most: int | None = None
    name: str = ""
    place: int = 0  # in the text
    # Of a part that was placed:
    parent: Part | None = None
    state: int = 0  # of its character
    is_regular: bool = True  # without recursion: it can be a lexeme
    is_split: bool = False

    @property
    def is_lexical(self) -> bool:
        """Whether it is a lexeme, or lies within one."""
        return self.is_regular and not self.is_split


def to_lark(text: str) -> str:
    """Raises ValueError, which names the line; RecursionError."""
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise ValueError(f"it has no rule `{ROOT}`")
    grammar = _Grammar(rules)
    grammar.split()
    return _Writer(grammar).lark()


# -- reading ---------------------------------------------------------------------------------------


class _Reader:
    """Reads the rules of a grammar. A name with `::=` behind it begins the next one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*self._scan()]
        self._next = 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        while self._kind():
            if not self._begins_rule():
                raise self._wrong("expected a rule, `name ::= ...`")
            name = self._take()
            self._take()
            if name in rules:
                raise self._wrong(f"the rule `{name}` stands there twice", -2)
            rules[name] = self._choice()
        for part in (part for rule in rules.values() for part in _walk(rule)):
            if part.kind == "rule" and part.name not in rules:
                raise ValueError(f"{self._line(part.place)}there is no rule `{part.name}`")
        return rules

    def _choice(self) -> Part:
        parts = [self._sequence()]
        while self._is_sign("|"):
            self._take()
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Part("choice", parts)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._kind() and not self._is_sign("|", ")") and not self._begins_rule():
            part = self._item()
            while self._kind() == "repeat":
                part = self._repeated(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Part("sequence", parts)

    def _item(self) -> Part:
        kind, place = self._kind(), self._place()
        if kind == "name":
            return Part("rule", name=self._take(), place=place)
        if kind == "literal":
            codes = self._characters(self._take()[1:-1], place + 1)
            return Part("sequence", [Part("chars", ranges=((code, code),)) for code, _ in codes])
        if kind == "chars":
            return Part("chars", ranges=self._ranges(self._take()[1:-1], place + 1))
        if self._is_sign("."):
            self._take()
            return Part("chars", ranges=ANY)
        if self._is_sign("("):
            self._take()
            inner = self._choice()
            if not self._is_sign(")"):
                raise ValueError(f"{self._line(place)}this parenthesis is never closed")
            self._take()
            return inner
        raise self._wrong("expected a text, a class of characters, a name or a parenthesis")

    def _repeated(self, part: Part) -> Part:
        token = self._tokens[self._next]
        self._next += 1
        if (sign := token["repeat"]) in COUNTS:
            least, most = COUNTS[sign]
        else:
            least = int(token["least"])
            most = least if token["comma"] is None else int(token["most"] or -1)
            most = None if most == -1 else most
        if most is not None and most < least:
            raise self._wrong(f"at least {least} and at most {most} contradict each other", -1)
        if most == 0:
            return Part("sequence")
        return Part("repeat", [part], least=least, most=most)

    def _ranges(self, text: str, place: int) -> Ranges:
        inverted = text.startswith("^")
        codes = [*self._characters(text[inverted:], place + inverted)]
        found: list[tuple[int, int]] = []
        while codes:
            first = last = codes.pop(0)[0]
            if len(codes) >= 2 and codes[0] == (ord("-"), False):
                last = codes.pop(1)[0]
                codes.pop(0)
            if last < first:
                raise ValueError(f"{self._line(place)}a range of characters is upside down")
            found.append((first, last))
        ranges = _inverted(found) if inverted else _merged(found)
        if not ranges:
            raise ValueError(f"{self._line(place)}no character is in this class")
        return ranges

    def _characters(self, text: str, place: int) -> Iterator[tuple[int, bool]]:
        """Code points, and whether an escape stood there."""
        for found in CHARACTER.finditer(text):
            digits = found["x"] or found["u"] or found["U"]
            if digits is not None:
                code = int(digits, 16)
            elif found["plain"] is not None:
                code = ord(found["plain"])
            elif found["sign"] in ESCAPED:
                code = ord(ESCAPED[found["sign"]])
            else:
                raise ValueError(f"{self._line(place)}{found[0]} is no escape of GBNF")
            if code > sys.maxunicode or code in SURROGATES:
                raise ValueError(f"{self._line(place)}{found[0]} is not a character")
            yield code, found["plain"] is None

    def _scan(self) -> Iterator[re.Match[str]]:
        place = 0
        while place < len(self._text):
            found = TOKEN.match(self._text, place)
            if found is None:
                raise ValueError(f"{self._line(place)}this has no end, or means nothing there")
            if found.lastgroup != "blank":
                yield found
            place = found.end()

    def _kind(self, ahead: int = 0) -> str:
        """The kind of a token; "" behind the last."""
        index = self._next + ahead
        return str(self._tokens[index].lastgroup) if index < len(self._tokens) else ""

    def _begins_rule(self) -> bool:
        return self._kind() == "name" and self._is_sign("::=", ahead=1)

    def _is_sign(self, *signs: str, ahead: int = 0) -> bool:
        return self._kind(ahead) == "sign" and self._tokens[self._next + ahead][0] in signs

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1][0]

    def _place(self, ahead: int = 0) -> int:
        index = self._next + ahead
        return self._tokens[index].start() if index < len(self._tokens) else len(self._text)

    def _line(self, place: int) -> str:
        before = self._text[:place]
        return f"line {before.count(chr(10)) + 1}, column {place - before.rfind(chr(10))}: "

    def _wrong(self, reason: str, ahead: int = 0) -> ValueError:
        return ValueError(f"{self._line(self._place(ahead))}{reason}")


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _inverted(ranges: list[tuple[int, int]]) -> Ranges:
    left, rest = 0, []
    for first, last in (*_merged(ranges), (sys.maxunicode + 1, 0)):
        if left < first:
            rest.append((left, first - 1))
        left = last + 1
    return tuple(rest)


def _walk(part: Part) -> Iterator[Part]:
    waiting = [part]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += part.parts


# -- the automaton ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ends:
    """What a part can begin and end with, as sets of states in bits."""

    is_empty: bool = False  # possible for its text
    first: int = 0
    last: int = 0


class _Grammar:
    """The recursive rules and the root, with all others written out in them."""

    def __init__(self, rules: dict[str, Part]) -> None:
        self._recursive = _recursive(rules)
        self._chars: list[Part] = []  # by state
        self._transitions: list[list[tuple[int, Part]]] = []  # by state: to which, and made where
        self._made: dict[Part, list[tuple[int, int]]] = defaultdict(list)  # the same by part
        self.rules = {
            name: self._placed(rules[name], rules)
            for name in rules
            if name in self._recursive or name == ROOT
        }
        self._ends = dict.fromkeys(self.rules, _Ends())
        while True:
            ends = {name: self.ends_of(rule) for name, rule in self.rules.items()}
            if ends == self._ends:
                break
            self._ends = ends

    def split(self) -> None:
        """Split each lexeme that would take what may come after it."""
        if self.rules[ROOT].is_regular and not self._recursive:
            return
        self._transitions = [[] for _ in self._chars]
        for rule in self.rules.values():
            self.ends_of(rule, record=True)
        leads = [_leads(part.ranges) for part in self._chars]
        together = self._reached_together()
        waiting = [  # transitions between two lexemes
            transition
            for made, transitions in self._made.items()
            for transition in transitions
            if not made.is_regular
        ]
        while waiting:
            state, after = waiting.pop()
            for other in together[state]:
                for competitor, made in self._transitions[other]:
                    if made.is_lexical and leads[after] & leads[competitor]:
                        waiting += self._split(made)

    def _split(self, part: Part) -> Iterator[tuple[int, int]]:
        """Split a part and all in which it lies. Yields what leads from lexeme to lexeme now."""
        around: Part | None = part
        while around is not None and around.is_lexical:
            around.is_split = True
            yield from self._made[around]
            around = around.parent

    def _placed(self, part: Part, rules: dict[str, Part], parent: Part | None = None) -> Part:
        """A copy in which rules that do not recur are written out."""
        if part.kind == "rule" and part.name not in self._recursive:
            return self._placed(rules[part.name], rules, parent)
        copy = Part(part.kind, [], part.ranges, part.least, part.most, part.name, parent=parent)
        copy.is_regular = part.kind != "rule"
        for each in part.parts:
            copy.parts.append(inner := self._placed(each, rules, copy))
            copy.is_regular &= inner.is_regular
        if part.kind == "chars":
            copy.state = len(self._chars)
            self._chars.append(copy)
        if part.kind in ("sequence", "choice") and not copy.is_regular:
            copy.parts = [*_grouped(copy)]
        return copy

    def ends_of(self, part: Part, *, record: bool = False) -> _Ends:
        """record: note the transitions within the part."""
        match part.kind:
            case "chars":
                return _Ends(False, 1 << part.state, 1 << part.state)
            case "rule":
                return self._ends[part.name]
            case "choice":
                ends = [self.ends_of(each, record=record) for each in part.parts]
                first = last = 0
                for each in ends:
                    first, last = first | each.first, last | each.last
                return _Ends(any(each.is_empty for each in ends), first, last)
            case "repeat":
                inner = self.ends_of(part.parts[0], record=record)
                if record and part.most != 1:
                    self._connect(inner.last, inner.first, part)
                return _Ends(inner.is_empty or not part.least, inner.first, inner.last)
        whole = _Ends(True)
        for following in part.parts:
            inner = self.ends_of(following, record=record)
            if record:
                self._connect(whole.last, inner.first, part)
            whole = _Ends(
                whole.is_empty and inner.is_empty,
                whole.first | inner.first if whole.is_empty else whole.first,
                whole.last | inner.last if inner.is_empty else inner.last,
            )
        return whole

    def _connect(self, lasts: int, firsts: int, made: Part) -> None:
        targets = [*_bits(firsts)]
        for state in _bits(lasts):
            self._transitions[state] += [(after, made) for after in targets]
            self._made[made] += [(state, after) for after in targets]

    def _reached_together(self) -> list[set[int]]:
        """By state: all states that some text leads to as well."""
        masks = _masks([part.ranges for part in self._chars])
        targets = [{after for after, _ in each} for each in self._transitions]
        together: list[set[int]] = [set() for _ in self._chars]
        starts = {*_bits(self._ends[ROOT].first)}
        waiting = [(starts, starts)]
        while waiting:
            some, others = waiting.pop()
            for a in some:
                for b in others:
                    if masks[a] & masks[b] and b not in together[a]:
                        together[a].add(b)
                        together[b].add(a)
                        waiting.append((targets[a], targets[b]))
        return together


# -- writing ---------------------------------------------------------------------------------------


class _Writer:
    """Writes a grammar in Lark, with a terminal for each lexeme."""

    def __init__(self, grammar: _Grammar) -> None:
        self._grammar = grammar
        self._names = {name: f"r{i}" for i, name in enumerate(grammar.rules)} | {ROOT: "start"}
        self._terminals: dict[str, str] = {}  # names by definitions

    def lark(self) -> str:
        lines = [f"{self._names[name]}: {self._rule(p)}" for name, p in self._grammar.rules.items()]
        lines += [f"{name}: {definition}" for definition, name in self._terminals.items()]
        return "\n".join(lines)

    def _rule(self, part: Part) -> str:
        if part.is_lexical:
            return self._lexeme(part)
        if part.kind == "rule":
            return self._names[part.name]
        inner = [self._rule(each) for each in part.parts]
        match part.kind:
            case "choice":
                return f"({' | '.join(inner)})"
            case "repeat":
                return f"({inner[0]}){_count(part)}"
        return f"({' '.join(inner)})"

    def _lexeme(self, part: Part) -> str:
        """A lexeme has at least one character; without any it is left out."""
        ends = self._grammar.ends_of(part)
        if not ends.first:
            return '""'
        definition = f"/{_regex(part)}/{' & /(?s:.+)/' if ends.is_empty else ''}"
        name = self._terminals.setdefault(definition, f"T{len(self._terminals)}")
        return f"{name}?" if ends.is_empty else name


def _regex(part: Part) -> str:
    inner = [_regex(each) for each in part.parts]
    match part.kind:
        case "chars":
            if part.ranges == ANY:
                return "(?s:.)"
            return f"[{''.join(f'{_escaped(a)}-{_escaped(b)}' for a, b in part.ranges)}]"
        case "choice":
            return f"(?:{'|'.join(inner)})"
        case "repeat":
            return f"(?:{inner[0]}){_count(part)}"
    return "".join(inner)


def _escaped(code: int) -> str:
    return f"\\x{{{code:X}}}"


def _count(part: Part) -> str:
    return f"{{{part.least},{'' if part.most is None else part.most}}}"


def _recursive(rules: dict[str, Part]) -> set[str]:
    """The rules that can come to themselves again."""
    used = {
        name: {part.name for part in _walk(rule) if part.kind == "rule"}
        for name, rule in rules.items()
    }
    found = set()
    for name in rules:
        seen: set[str] = set()
        waiting = [*used[name]]
        while waiting:
            if (each := waiting.pop()) not in seen:
                seen.add(each)
                waiting += used[each]
        if name in seen:
            found.add(name)
    return found


def _grouped(part: Part) -> Iterator[Part]:
    """The parts, neighbours without recursion as one. The order of choices does not count."""
    ordered = part.parts
    if part.kind == "choice":
        ordered = sorted(part.parts, key=attrgetter("is_regular"))
    for is_regular, run in groupby(ordered, key=attrgetter("is_regular")):
        parts = [*run]
        if is_regular and len(parts) > 1:
            whole = Part(part.kind, parts, parent=part)
            for each in parts:
                each.parent = whole
            yield whole
        else:
            yield from parts


def _bits(states: int) -> Iterator[int]:
    while states:
        lowest = states & -states
        yield lowest.bit_length() - 1
        states ^= lowest


def _masks(classes: list[Ranges]) -> list[int]:
    """Each class as a set, in bits, of the pieces into which all classes cut the characters."""
    cuts = sorted({cut for ranges in classes for a, b in ranges for cut in (a, b + 1)})
    return [
        sum((1 << bisect_left(cuts, b + 1)) - (1 << bisect_left(cuts, a)) for a, b in ranges)
        for ranges in classes
    ]


def _leads(ranges: Ranges) -> int:
    """The first bytes of the characters in UTF-8, as a set in bits."""
    leads = 0
    for first, last in ranges:
        leads |= (2 << _lead(last)) - (1 << _lead(first))
    return leads


def _lead(code: int) -> int:
    if code in SURROGATES:
        return 0xED
    return chr(code).encode()[0]
