"""Which registers a kernel writes while tensor cores may still read them. Needs no Triton.

A wgmma of PTX may take its first matrix from registers, and reads them until a wgmma.wait_group
waits for it; what is written into them before is undefined. Triton 3.6 writes so, where a loop has
several of them a step (triton-lang/triton#9433).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LABEL = re.compile(r"(\$\w+):")
_BRANCH = re.compile(r"bra(?:\.uni)?\s+(\$\w+)")
_PRODUCT = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\}\s*,\s*\{([^}]*)\}")
_WAIT = re.compile(r"wgmma\.wait_group\S*\s+(\d+)")
_REGISTER = re.compile(r"%\w+")
_NO_RESULT = ("st.", "stmatrix", "bar.", "bra", "cp.", "red.", "fence", "prefetch", "wgmma", ".")


def overwritten(ptx: str) -> set[str]:
    """The registers, for all loops of a kernel: each is followed for two steps."""
    if _PRODUCT.search(ptx) is None:
        return set()
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    found: set[str] = set()
    for i, line in enumerate(lines):
        branch = _BRANCH.search(line)
        first = i if branch is None else labels.get(branch[1], i)
        if first < i:
            found |= set(_written_early(lines[first:i] * 2))
    return found


def _written_early(lines: list[str]) -> Iterator[str]:
    groups: list[set[str]] = [set()]  # that are read, the last one by what is not committed yet
    read = set[str]()
    for line in ";".join(lines).split(";"):
        if product := _PRODUCT.search(line):
            groups[-1].update(_REGISTER.findall(product[1]))
        elif "wgmma.commit_group" in line:
            groups.append(set())
        elif wait := _WAIT.search(line):
            groups = groups[-1 - int(wait[1]) :]
        else:
            yield from read & _results(line)
            continue
        read = set().union(*groups)


def _results(line: str) -> set[str]:
    """The registers that an instruction writes."""
    words = re.sub(r"^\s*\{?\s*(@!?%\w+)?\s*", "", line).split(None, 1)
    if len(words) < 2 or words[0].startswith(_NO_RESULT):
        return set()
    operands = words[1]
    end = operands.find("}") if operands.startswith("{") else operands.find(",")
    return set(_REGISTER.findall(operands[:end]))
