"""The order of imports between modules.

A module imports only from those before it in the table below, and no file imports one that imports
it, directly or through others. torch begins with the kernels. An import inside a function or under
TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest
from support.folders import ROOT

ROWS = (
    (
        *("errors", "printable", "events", "matcher", "parameters", "pooling", "request"),
        "places",
        *(
            "sampling_options",
            "shards",
            "config",
            "paths",
            "keys",
            "progress",
            "subprocesses",
            "interpreter",
        ),
    ),
    ("text", "kvcache", "images"),
    ("grammar", "scheduler", "parts", "client"),
    ("kernels", "device", "distributed", "attention", "layers", "models", "lora", "drafting"),
    ("tiers", "parts.device", "runner", "ranks"),
    ("engine", "llm"),
    ("server", "bench", "verify"),
    ("router",),
    ("ray",),
    ("cli",),
)
ORDER = {name: place for place, name in enumerate(name for row in ROWS for name in row)}
FIRST_WITH_TORCH = ORDER["kernels"]

SOURCES = {
    str(path.relative_to(ROOT)): path
    for folder in ("minisgl", "cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
# The exceptions: one runs the CLI, the other offers names of every row and imports them when asked.
EXCEPTIONS = ("minisgl/__main__.py", "minisgl/__init__.py")


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in EXCEPTIONS])
def test_each_file_imports_only_modules_above_it_in_the_table(name: str) -> None:
    module = module_of(Path(name).parts)
    assert module in ORDER, f"{name}: the module {module} has no place in the table"
    for line, imported in imports(SOURCES[name], Path(name)):
        if imported[0] == "torch":
            assert ORDER[module] >= FIRST_WITH_TORCH, f"{name}:{line} imports torch"
        elif imported[0] in ("minisgl", "cli") and imported[1:] not in ((), ("__version__",)):
            other = module_of(imported)
            assert other in ORDER, f"{name}:{line} imports {'.'.join(imported)}, not in the table"
            assert ORDER[other] <= ORDER[module], f"{name}:{line} imports {other}, which is later"


def test_files_have_no_import_circles() -> None:
    graph = {
        name: {file for _, imported in imports(path, Path(name)) if (file := file_of(imported))}
        for name, path in SOURCES.items()
        if name not in EXCEPTIONS
    }
    circles = circles_of(graph)
    assert not circles, "files import each other:\n" + "\n".join(map(" -> ".join, circles))


def test_the_files_and_folders_of_a_folder_have_no_import_circles() -> None:
    """In each folder, its files and its subfolders can be put in an order."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for name, path in SOURCES.items():
        for _, imported in imports(path, Path(name)):
            other = file_of(imported)
            if other is not None and other != name and name not in EXCEPTIONS:
                folder, own, others = where_they_part(Path(name).parts, Path(other).parts)
                graphs.setdefault(folder, {}).setdefault(own, set()).add(others)
    circles = [
        f"{folder}: {' -> '.join(circle)}"
        for folder, graph in sorted(graphs.items())
        for circle in circles_of(graph)
    ]
    assert not circles, "\n".join(["what a folder contains imports each other:", *circles])


def where_they_part(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str, str]:
    """The last folder that two paths have in common, and what each of them continues with."""
    depth = next(
        place for place, names in enumerate(zip(one, other, strict=False)) if len({*names}) > 1
    )
    return "/".join(one[:depth]), one[depth], other[depth]


def test_paths_part_at_a_folder_or_a_file() -> None:
    nodes, links = ("minisgl", "ranks", "nodes", "links.py"), ("minisgl", "ranks", "links.py")
    assert where_they_part(nodes, links) == ("minisgl/ranks", "nodes", "links.py")
    assert where_they_part(links, ("cli", "main.py")) == ("", "minisgl", "cli")


def file_of(imported: tuple[str, ...]) -> str | None:
    """The file that an import reads: a module, or a package's __init__.py. None: not of ours."""
    for length in range(len(imported), 0, -1):
        path = "/".join(imported[:length])
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in SOURCES:
                # A name that the package itself offers to users is no use of the package's files.
                return None if name in EXCEPTIONS else name
    return None


def circles_of(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """A shortest circle through each node that is on one. Circles of the same nodes count once.

    Each begins and ends with the first of its names by order.
    """
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        paths = [[start]]
        seen: set[str] = set()
        while paths:
            path = paths.pop(0)
            following = sorted(graph.get(path[-1], ()))
            if start in following:
                first = path.index(min(path))
                found.setdefault(frozenset(path), [*path[first:], *path[: first + 1]])
                break
            paths += [[*path, name] for name in following if name not in seen]
            seen.update(following)
    return list(found.values())


def test_the_search_finds_each_circle_once() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"e", "f"}, "f": set()}
    assert circles_of(graph) == [["a", "b", "c", "a"], ["e", "e"]]
    assert circles_of({"a": {"b"}, "b": set()}) == []
    two = {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}}
    assert circles_of(two) == [["a", "b", "a"], ["b", "c", "b"]]


def test_imports_are_resolved_to_files() -> None:
    assert file_of(("minisgl", "config")) is not None
    assert file_of(("minisgl", "kvcache", "radix", "RadixCache")) == "minisgl/kvcache/radix.py"
    assert file_of(("minisgl", "bench", "run")) == "minisgl/bench/__init__.py"
    assert file_of(("minisgl", "LLM")) is None  # offered by the package, which imports it lazily
    assert file_of(("torch", "nn")) is None


def module_of(parts: tuple[str, ...]) -> str:
    """('minisgl', 'models', 'hub') → 'models'; all of cli/ is one module. What parts have on the
    device is apart from what they have on the host."""
    if parts[0] == "cli":
        return "cli"
    names = [part.removesuffix(".py") for part in parts[1:]]
    if names[:1] == ["parts"] and any(name.startswith("device") for name in names):
        return "parts.device"
    return names[0] if names else ""


@functools.cache
def imports(path: Path, name: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Line and dotted name, relative ones made absolute, of everything that a file imports."""
    return [*imports_of(path, name)]


def imports_of(path: Path, name: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, absolute(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = list(name.parts[: -node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, absolute([*base, alias.name])
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "minisgl":
            yield node.lineno, ("minisgl", node.attr)  # what a bare `import minisgl` was for


def absolute(parts: list[str]) -> tuple[str, ...]:
    """cli/ is installed under another name."""
    return ("cli", *parts[1:]) if parts[0] == "minisgl_cli" else tuple(parts)


def test_the_walk_finds_every_kind_of_import(tmp_path: Path) -> None:
    source = tmp_path / "here.py"
    source.write_text(
        "from __future__ import annotations\n"
        "import minisgl.engine as engine, json\n"
        "from minisgl import config\n"
        "from . import pages\n"
        "from ..scheduler.plan import StepPlan\n"
        "def late():\n"
        "    import torch.nn\n"
        "if TYPE_CHECKING:\n"
        "    from minisgl_cli.main import main\n"
        "import minisgl\n"
        "minisgl.LLM\n"
    )
    found = dict(imports(source, Path("minisgl/kvcache/here.py")))
    assert found == {
        1: ("__future__", "annotations"),
        2: ("json",),
        3: ("minisgl", "config"),
        4: ("minisgl", "kvcache", "pages"),
        5: ("minisgl", "scheduler", "plan", "StepPlan"),
        7: ("torch", "nn"),
        9: ("cli", "main", "main"),
        10: ("minisgl",),
        11: ("minisgl", "LLM"),
    }
    assert ("minisgl", "engine") in [imported for _, imported in imports(source, Path("x/y.py"))]
