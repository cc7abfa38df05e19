"""Finds launches that break the first rule of minisgl/kernels/launch_options.py: what a kernel
reads before its wait was written before the last late launch in front of it. Needs no Triton.

What a kernel reads before its wait, and what it writes, are the arguments from which Triton's IR of
it computes the addresses. Inline assembly is not looked into.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NONE: frozenset[int] = frozenset()
NAME = re.compile(r"%[\w.$-]+")
ARGUMENT = re.compile(r"(%[\w.$-]+): (\S+)")
DEFINED = re.compile(r"(%[^=]*) = (.*)")
PASSED = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+)")  # into a loop
JUMP = re.compile(r"(\^\w+)(?:\(([^)]*)\))?")
WRITES = ("tt.store", "tt.atomic")


class Span(NamedTuple):
    """Bytes of a storage."""

    storage: int
    first: int
    end: int

    def meets(self, other: Span) -> bool:
        return self.storage == other.storage and self.first < other.end and other.first < self.end


class Launched(NamedTuple):
    kernel: int | None  # its place in a list; None: work of torch
    spans: tuple[Span | None, ...]  # of the arguments, None if not tensors; of torch, the results


@dataclass(frozen=True, slots=True)
class Uses:
    """Places of the arguments from which a kernel computes addresses."""

    read_early: frozenset[int]  # before its wait
    written_early: frozenset[int]
    written: frozenset[int]
    is_early: bool  # whether it lets the next kernel start before its wait


def broken(order: Iterable[Launched], kernels: Sequence[tuple[str, Uses]]) -> list[str]:
    """What breaks the rule, once for each two kernels and argument. kernels: names and uses."""
    found: dict[str, None] = {}
    recent: list[tuple[str, Span]] = []  # written by the last late launch, and behind it
    for launch in order:
        # Launched without the attribute, it starts when all before it is complete.
        name, uses = "torch", Uses(NONE, NONE, frozenset(range(len(launch.spans))), is_early=False)
        if launch.kernel is not None:
            name, uses = kernels[launch.kernel]
        for place in sorted(uses.written_early):
            found[f"{name} writes its argument {place} before its wait"] = None
        for place in sorted(uses.read_early):
            span = launch.spans[place]
            for writer, written in recent:
                if span is not None and span.meets(written):
                    found[f"{name} reads its argument {place}, by {writer}, before its wait"] = None
        spans = [span for place in uses.written if (span := launch.spans[place]) is not None]
        recent = (recent if uses.is_early else []) + [(name, span) for span in spans]
    return list(found)


@dataclass(slots=True)
class _State:
    """What is known at a line of a function."""

    has_waited: bool = False
    sources: dict[str, frozenset[int]] = field(default_factory=dict)  # arguments, by a value's name
    # By a block's name: whether all that jump there have waited, and sources of what they pass.
    waited_at: dict[str, bool] = field(default_factory=dict)
    passed_to: defaultdict[str, frozenset[int]] = field(
        default_factory=lambda: defaultdict(frozenset[int])
    )

    def of(self, text: str) -> frozenset[int]:
        return NONE.union(*(self.sources.get(name, NONE) for name in NAME.findall(text)))

    def jump(self, text: str) -> None:
        for label, passed in JUMP.findall(text):
            self.waited_at[label] = self.waited_at.get(label, True) and self.has_waited
            self.passed_to[label] |= self.of(passed)


def uses_of(ir: str) -> Uses:
    """Of a kernel's Triton IR, in which its functions are inlined. An address that is loaded is
    nobody's. A kernel that does not wait reads and writes nothing early."""
    head, *lines = ir[ir.index("tt.func public") :].splitlines()
    state = _State()
    for place, (name, kind) in enumerate(ARGUMENT.findall(head)):
        state.sources[name] = frozenset([place]) if kind.startswith("!tt.ptr") else NONE
    waits, is_early, opened = False, False, False
    read: dict[bool, frozenset[int]] = {False: NONE, True: NONE}  # by whether it has waited
    written = dict(read)
    regions: list[tuple[list[str], bool]] = []  # the results of each, and has_waited in front of it
    for line in map(str.strip, lines):
        if line.startswith("}") and regions:
            results, state.has_waited = regions[-1]
            if not line.endswith("{"):
                regions.pop()
        if block := JUMP.match(line):
            label = block[1]
            if not opened:  # else it is the first block of a region
                state.has_waited = state.waited_at.get(label, False)
            for name in NAME.findall(line):
                state.sources[name] = state.passed_to[label]
            opened = False
            continue
        opened = line.endswith("{")
        defined = DEFINED.match(line)
        results, text = (NAME.findall(defined[1]), defined[2]) if defined else ([], line)
        if "griddepcontrol.wait" in text:
            waits = state.has_waited = True
        is_early |= "griddepcontrol.launch_dependents" in text and not state.has_waited
        operation, _, operands = text.partition(" ")
        sources = state.of(text)
        if operation.startswith(("cf.br", "cf.cond_br")):
            state.jump(text)
        elif operation.startswith("scf.yield") and regions:
            for name in regions[-1][0]:
                state.sources[name] |= sources
        elif operation.startswith(("tt.load", *WRITES)):
            address = state.of((NAME.search(operands) or [""])[0])
            table = written if operation.startswith(WRITES) else read
            table[state.has_waited] |= address
            sources = NONE
        for name, value in PASSED.findall(text):
            state.sources[name] = state.of(value)
        for name in results:
            state.sources[name] = sources
        if opened and not line.startswith("}"):
            regions.append((results, state.has_waited))
    everything = written[False] | written[True]
    early = (read[False], written[False]) if waits else (NONE, NONE)
    return Uses(*early, everything, is_early and waits)
