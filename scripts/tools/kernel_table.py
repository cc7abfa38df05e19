"""What is known of compiled kernels: the table that is kept, its comparison, and the machine code.
Needs no Triton."""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "minisgl"
KEPT = Path(__file__).with_name("compiled_kernels.txt")

_HEADER = """\
# Compiled kernels of minisgl, by scripts/tools/compile_kernels.py (minisgl/kernels/README.md).
# Triton {release}
# kernel target registers spilled shared code variant
"""
_RELEASE = "# Triton "


class Key(NamedTuple):
    """A kernel, compiled with some types, constants and options for a target."""

    kernel: str  # module.function
    variant: str
    target: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.target} {self.variant}"


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int  # of a thread
    spilled: int  # bytes that a thread stores and loads because its registers do not suffice
    shared: int  # bytes of a program
    code: str  # digest of the machine code


Table = Mapping[Key, Compiled]


# -- the kept table --------------------------------------------------------------------------------


def format_table(table: Table, release: str) -> str:
    """A line a kernel and target. release: of Triton."""
    lines = (_line(key, table[key]) for key in sorted(table))
    return _HEADER.format(release=release) + "".join(lines)


def _line(key: Key, found: Compiled) -> str:
    figures = f"{found.registers} {found.spilled} {found.shared} {found.code}"
    return f"{key.kernel} {key.target} {figures} {key.variant}\n"


def parse_table(text: str) -> tuple[dict[Key, Compiled], str]:
    """The table and the release of Triton that it holds for."""
    table: dict[Key, Compiled] = {}
    release = ""
    for line in text.splitlines():
        if line.startswith(_RELEASE):
            release = line.removeprefix(_RELEASE)
        if not line.startswith("#"):
            kernel, target, registers, spilled, shared, code, variant = line.split(" ", 6)
            key = Key(kernel, variant, target)
            table[key] = Compiled(int(registers), int(spilled), int(shared), code)
    return table, release


# -- comparison ------------------------------------------------------------------------------------


def changes(kept: Table, found: Table) -> list[str]:
    """A line for each kernel that differs, that is new, or that is not compiled any more."""
    lines: list[str] = []
    for key in sorted(kept.keys() | found.keys()):
        if key not in found:
            lines.append(f"{key}: gone")
        elif key not in kept:
            lines.append(f"{key}: new, {_figures(found[key])}")
        elif kept[key] != found[key]:
            lines.append(f"{key}: {', '.join(_differences(kept[key], found[key]))}")
    return lines


def _figures(found: Compiled) -> str:
    return f"registers {found.registers}, spilled {found.spilled}, shared {found.shared}"


def _differences(before: Compiled, after: Compiled) -> Iterator[str]:
    for field in fields(Compiled):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name == "code":
            yield "machine code differs" if old != new else "same machine code"
        elif old != new:
            yield f"{field.name} {old} -> {new}"


def new_spills(kept: Table, found: Table, allowed: Collection[str]) -> list[str]:
    """A line for each kernel that spills more than the kept one, or did not exist and spills.
    allowed: parts of the names of kernels that may."""
    lines: list[str] = []
    for key in sorted(found):
        before = kept[key].spilled if key in kept else 0
        is_allowed = any(name in key.kernel for name in allowed)
        if found[key].spilled > before and not is_allowed:
            lines.append(f"{key}: spilled {before} -> {found[key].spilled}")
    return lines


# -- the log of ptxas ------------------------------------------------------------------------------


def figures_of(log: str) -> tuple[int, int]:
    """The registers and the spilled bytes that ptxas (-v) logs for its one kernel."""
    (registers,) = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return int(registers), sum(map(int, spills))


# -- the kernels of the package --------------------------------------------------------------------


def launched_kernels(package: Path = PACKAGE) -> set[str]:
    """The kernels that the package launches, as `module.function`: what is called as
    `kernel[grid](...)`, where it was defined."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    names = {path: _module(path, package) for path in trees}
    defined = {f"{names[path]}.{name}" for path, tree in trees.items() for name in _jitted(tree)}
    launched = {
        _origin(name, tree, names[path]) for path, tree in trees.items() for name in _called(tree)
    }
    return defined & launched


def _module(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def _jitted(tree: ast.Module) -> Iterator[str]:
    """The functions of a module that Triton compiles."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
            yield node.name


def _is_jit(decorator: ast.expr) -> bool:
    return "triton.jit" in ast.unparse(decorator)


def _called(tree: ast.Module) -> Iterator[str]:
    """The names that are called with a subscript."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                yield name


def _origin(name: str, tree: ast.Module, module: str) -> str:
    """The module.function of a name, which may be imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return f"{node.module}.{alias.name}"
    return f"{module}.{name}"


# -- machine code ----------------------------------------------------------------------------------

_PROGBITS, _ALLOCATED = 1, 2  # ELF: a section with content, that is loaded onto the device
_SECTION = struct.Struct("<IIQQQQIIQQ")


def code_digest(cubin: bytes) -> str:
    """A digest of what is loaded onto the device: code and constants, no debug information."""
    digest = sha256()
    for name, content in _loaded_sections(cubin):
        digest.update(name + b"\0" + content)
    return digest.hexdigest()[:12]


def _loaded_sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and contents of the sections of an ELF file of 64 bits, little endian."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [_SECTION.unpack_from(cubin, start + size * index) for index in range(count)]
    names = headers[names_at][4]
    for name, kind, flags, _, offset, length, *_ in headers:
        if kind == _PROGBITS and flags & _ALLOCATED:
            at = names + name
            yield cubin[at : cubin.index(b"\0", at)], cubin[offset : offset + length]
