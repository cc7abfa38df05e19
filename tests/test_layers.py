"""Who may import whom.

A module imports only from those before it in the table below. torch begins with the kernels. An
import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ROWS = (
    ("errors", "request", "shards", "config", "keys", "progress", "printable"),
    ("text", "kvcache"),
    ("scheduler", "client"),
    ("kernels", "distributed", "attention", "layers", "models"),
    ("runner",),
    ("engine", "llm"),
    ("server", "bench"),
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
def test_imports_only_what_stands_before_it(name: str) -> None:
    module = module_of(Path(name).parts)
    assert module in ORDER, f"{name}: the module {module} has no place in the table"
    for line, imported in imports(SOURCES[name], Path(name)):
        if imported[0] == "torch":
            assert ORDER[module] >= FIRST_WITH_TORCH, f"{name}:{line} imports torch"
        elif imported[0] in ("minisgl", "cli") and imported[1:] not in ((), ("__version__",)):
            other = module_of(imported)
            assert other in ORDER, f"{name}:{line} imports {'.'.join(imported)}, not in the table"
            assert ORDER[other] <= ORDER[module], f"{name}:{line} imports {other}, which is later"


def module_of(parts: tuple[str, ...]) -> str:
    """('minisgl', 'models', 'hub') → 'models'; all of cli/ is one module."""
    return "cli" if parts[0] == "cli" else parts[1].removesuffix(".py") if len(parts) > 1 else ""


def imports(path: Path, name: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name, relative ones made absolute, of everything that a file imports."""
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


def test_the_walk_sees_every_kind_of_import(tmp_path: Path) -> None:
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
