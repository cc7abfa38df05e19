r"""Chooses the lexemes of a grammar that describes characters, and writes it in Lark.

llguidance cuts a text into lexemes first, and takes as many characters for each as it can. With a
lexeme of its own for `ws ::= [ \n]*` the grammar `root ::= "5" ws "\n"` could never end, since the
blanks take the last line break as well. So each lexeme is as large as it can be without taking a
character that might begin what comes next.

Every place in the grammar where a character stands is a state of one nondeterministic automaton,
in which a recursive rule goes on wherever any of its uses does. Two transitions compete if one text
can lead to both and the next byte may be the same. If one of them ends a lexeme, the other must not
lie within one: that lexeme is split into its parts, in the last resort into single characters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from minisgl.grammar.gbnf import ANY, ROOT, SURROGATES, Part, Ranges, walk


def to_lark(rules: dict[str, Part]) -> str:
    """Raises RecursionError."""
    grammar = _Grammar(rules)
    grammar.split()
    return _Writer(grammar).lark()


@dataclass(eq=False, slots=True)
class _Placed:
    """A part at one place of the grammar."""

    part: Part
    parent: _Placed | None
    parts: list[_Placed] = field(default_factory=list)
    state: int = 0  # of its character
    is_regular: bool = True  # without recursion: it can be a lexeme
    is_split: bool = False

    @property
    def kind(self) -> str:
        return self.part.kind

    @property
    def is_lexical(self) -> bool:
        """Whether it is a lexeme, or lies within one."""
        return self.is_regular and not self.is_split


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
        self._ranges: list[Ranges] = []  # by state
        # Transitions by the state that they leave, and by the part that makes them.
        self._transitions: list[list[tuple[int, _Placed]]] = []
        self._made: dict[_Placed, list[tuple[int, int]]] = defaultdict(list)
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
        self._transitions = [[] for _ in self._ranges]
        for rule in self.rules.values():
            self.ends_of(rule, record=True)
        leads = [_leads(ranges) for ranges in self._ranges]
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

    def _split(self, part: _Placed) -> Iterator[tuple[int, int]]:
        """Split a part and all in which it lies. Yields what leads from lexeme to lexeme now."""
        around: _Placed | None = part
        while around is not None and around.is_lexical:
            around.is_split = True
            yield from self._made[around]
            around = around.parent

    def _placed(self, part: Part, rules: dict[str, Part], parent: _Placed | None = None) -> _Placed:
        """The part, in which rules that do not recur are written out."""
        if part.kind == "rule" and part.name not in self._recursive:
            return self._placed(rules[part.name], rules, parent)
        placed = _Placed(part, parent, is_regular=part.kind != "rule")
        for each in part.parts:
            placed.parts.append(inner := self._placed(each, rules, placed))
            placed.is_regular &= inner.is_regular
        if part.kind == "chars":
            placed.state = len(self._ranges)
            self._ranges.append(part.ranges)
        if part.kind in ("sequence", "choice") and not placed.is_regular:
            placed.parts = [*_grouped(placed)]
        return placed

    def ends_of(self, part: _Placed, *, record: bool = False) -> _Ends:
        """record: note the transitions within the part."""
        match part.kind:
            case "chars":
                return _Ends(False, 1 << part.state, 1 << part.state)
            case "rule":
                return self._ends[part.part.name]
            case "choice":
                ends = [self.ends_of(each, record=record) for each in part.parts]
                first = last = 0
                for each in ends:
                    first, last = first | each.first, last | each.last
                return _Ends(any(each.is_empty for each in ends), first, last)
            case "repeat":
                inner = self.ends_of(part.parts[0], record=record)
                if record and part.part.most != 1:
                    self._connect(inner.last, inner.first, part)
                return _Ends(inner.is_empty or not part.part.least, inner.first, inner.last)
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

    def _connect(self, lasts: int, firsts: int, made: _Placed) -> None:
        targets = [*_bits(firsts)]
        for state in _bits(lasts):
            self._transitions[state] += [(after, made) for after in targets]
            self._made[made] += [(state, after) for after in targets]

    def _reached_together(self) -> list[set[int]]:
        """By state: all states that some text leads to as well."""
        masks = _masks(self._ranges)
        targets = [{after for after, _ in each} for each in self._transitions]
        together: list[set[int]] = [set() for _ in self._ranges]
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


def _recursive(rules: dict[str, Part]) -> set[str]:
    """The rules that can come to themselves again."""
    used = {
        name: {part.name for part in walk(rule) if part.kind == "rule"}
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


def _grouped(part: _Placed) -> Iterator[_Placed]:
    """The parts, neighbours without recursion as one. The order of choices does not count."""
    ordered = part.parts
    if part.kind == "choice":
        ordered = sorted(part.parts, key=attrgetter("is_regular"))
    for is_regular, run in groupby(ordered, key=attrgetter("is_regular")):
        parts = [*run]
        if is_regular and len(parts) > 1:
            whole = _Placed(Part(part.kind), part, parts)
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

    def _rule(self, part: _Placed) -> str:
        if part.is_lexical:
            return self._lexeme(part)
        if part.kind == "rule":
            return self._names[part.part.name]
        inner = [self._rule(each) for each in part.parts]
        match part.kind:
            case "choice":
                return f"({' | '.join(inner)})"
            case "repeat":
                return f"({inner[0]}){_count(part.part)}"
        return f"({' '.join(inner)})"

    def _lexeme(self, part: _Placed) -> str:
        """A lexeme has at least one character; without any it is left out."""
        ends = self._grammar.ends_of(part)
        if not ends.first:
            return '""'
        definition = f"/{_regex(part)}/{' & /(?s:.+)/' if ends.is_empty else ''}"
        name = self._terminals.setdefault(definition, f"T{len(self._terminals)}")
        return f"{name}?" if ends.is_empty else name


def _regex(part: _Placed) -> str:
    inner = [_regex(each) for each in part.parts]
    match part.kind:
        case "chars":
            if part.part.ranges == ANY:
                return "(?s:.)"
            return f"[{''.join(f'{_escaped(a)}-{_escaped(b)}' for a, b in part.part.ranges)}]"
        case "choice":
            return f"(?:{'|'.join(inner)})"
        case "repeat":
            return f"(?:{inner[0]}){_count(part.part)}"
    return "".join(inner)


def _escaped(code: int) -> str:
    return f"\\x{{{code:X}}}"


def _count(part: Part) -> str:
    return f"{{{part.least},{'' if part.most is None else part.most}}}"
