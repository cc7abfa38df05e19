"""The contents of a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest
from support.folders import ROOT

FOLDERS = {"minisgl": "minisgl", "cli": "minisgl_cli"}  # in the checkout, and installed


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Built from a copy, because setuptools leaves its intermediate files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        without_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=without_caches)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_contains_exactly_the_modules_and_assets(wheel_names: set[str]) -> None:
    """The READMEs of the packages are left out."""
    modules = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    assert "minisgl/py.typed" in modules
    assert {name for name in wheel_names if ".dist-info/" not in name} == modules


def test_the_wheel_contains_the_licence(wheel_names: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
