"""How minisgl is installed: the contents of a wheel, and what the documents say about it."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from support.folders import ROOT, SCRIPTS

FOLDERS = {"minisgl": "minisgl", "cli": "minisgl_cli"}  # in the checkout, and installed
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
DOCKERFILE = (SCRIPTS / "Dockerfile").read_text()
EXTRA_VENV = SCRIPTS / "tools" / "extra_venv.sh"  # has the Triton of each torch
HINT = re.compile(r"pip install ([^`\n#]*)")


def copied() -> set[str]:
    """What scripts/Dockerfile copies of the checkout to build the wheel from."""
    [stage, _] = DOCKERFILE.split("\nFROM ")[1:]
    lines = re.findall(r"^COPY (.*) \S+$", stage, re.MULTILINE)
    return {name.rstrip("/") for line in lines for name in line.split()}


def build(kind: str, folder: Path, *more: str) -> Path:
    """A wheel, an editable one, or a source distribution of a copy of the checkout in `folder`:
    setuptools leaves its intermediate files beside the sources. The copy has what the image has,
    and `more`."""
    for name in (*copied(), *more):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            without = shutil.ignore_patterns("__pycache__", "README.md", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, ignore=without, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder / name)
    return build_there(kind, folder)


def build_there(kind: str, folder: Path) -> Path:
    command = f"from setuptools import build_meta; build_meta.build_{kind}('.')"
    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True, capture_output=True)
    [built] = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
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


def test_the_wheel_contains_the_licences(wheel_names: set[str]) -> None:
    """That of minisgl, and those of what others have written in it."""
    for licence, says in (
        ("LICENSE", "Version 2.0, January 2004"),
        ("minisgl/assets/temml/LICENSE", "The MIT License"),
    ):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in wheel_names)
        assert says in (ROOT / licence).read_text()


def test_a_source_distribution_has_what_makes_the_same_wheel_and_nothing_else(
    tmp_path: Path, wheel: Path
) -> None:
    added = {"README.md", "tests/test_packaging.py"}  # by setuptools, of itself
    source = build("sdist", tmp_path, *added)
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [folder] = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build_there("wheel", folder)) as again, zipfile.ZipFile(wheel) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
        assert {name: again.read(name) for name in again.namelist()} == parts
    with tarfile.open(source) as archive:
        names = {Path(*Path(each.name).parts[1:]).as_posix() for each in archive if each.isfile()}
    packaged = {f"scripts/packages/{name}" for name in parts if ".dist-info/" not in name}
    licences = set(PYPROJECT["project"]["license-files"])
    generated = {"PKG-INFO", "setup.cfg"}
    found = {name for name in names if ".egg-info/" not in name}
    assert found == packaged | licences | generated | {"pyproject.toml"} | added


def test_a_script_beside_an_installed_checkout_finds_the_packages(tmp_path: Path) -> None:
    """Python takes the folder of the checkout for a package too, which has nothing in it."""
    wheel = build("editable", tmp_path / "minisgl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    script = tmp_path / "script.py"
    script.write_text(
        "import site\n"
        f"site.addsitedir({str(installed)!r})\n"
        "from minisgl import RequestOutput, SamplingParams\n"
        "import minisgl, minisgl_cli\n"
        "print(minisgl.__file__, minisgl_cli.__file__, sep='\\n')\n"
    )
    # Without the packages of this Python, where minisgl is installed, too.
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = [Path(line).resolve() for line in done.stdout.splitlines()]
    assert found == [tmp_path / "minisgl" / name / "__init__.py" for name in FOLDERS]


def test_the_description_on_an_index_has_no_link_into_the_repository(wheel: Path) -> None:
    """There, a relative link leads nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert "minisgl serve --model" in description
    targets = re.findall(r"\]\(([^)]*)|(?:src|href)=\"([^\"]*)", description)
    assert [target for pair in targets for target in pair if target and "://" not in target] == []


def test_the_image_is_sent_what_it_copies_and_nothing_else() -> None:
    lines = (SCRIPTS / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied()
    base = re.findall(r"^FROM python:(\S+)-slim", DOCKERFILE, re.MULTILINE)
    assert {f"Programming Language :: Python :: {version}" for version in base} <= {
        *PYPROJECT["project"]["classifiers"]
    }


def test_the_versions_of_python_and_torch_are_the_same_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = (re.fullmatch(r".*:: 3\.(\d+)", each) for each in PYPROJECT["project"]["classifiers"])
    pythons = [int(each[1]) for each in found if each]
    assert pythons == [*range(pythons[0], pythons[-1] + 1)]
    assert PYPROJECT["project"]["requires-python"] == f">=3.{pythons[0]}"
    [torch] = (each for each in PYPROJECT["project"]["dependencies"] if each.startswith("torch>"))
    low, high = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())  # type: ignore[union-attr]
    readme = (ROOT / "README.md").read_text()
    assert f"Python {', '.join(f'3.{each}' for each in pythons[:-1])} or 3.{pythons[-1]}." in readme
    assert f"PyTorch (2.{low} to 2.{high - 1})" in readme
    assert f"pip install '{torch}' --index-url" in readme
    setup = (SCRIPTS / "venv.sh").read_text()
    names = " ".join(f"python3.{each}" for each in reversed(pythons))
    assert f"for candidate in python python3 {names};" in setup
    assert f"Python 3.{pythons[0]} to 3.{pythons[-1]} on" in setup
    jobs = (ROOT / ".github/workflows/ci.yml").read_text()
    assert all(f'"3.{each}"' in jobs for each in pythons)
    assert all(f"2.{each}." in EXTRA_VENV.read_text() for each in range(low, high))
    for minor in (pythons[0] - 1, *pythons, pythons[-1] + 1):
        monkeypatch.setattr(sys, "version_info", (3, minor, 0, "final", 0))
        is_refused = False
        try:
            runpy.run_path(str(SCRIPTS / "probe_python.py"))
        except SystemExit:
            is_refused = True
        assert is_refused == (minor not in pythons)


def test_nothing_asks_the_installation_for_the_version() -> None:
    """An editable installation tells that with which it was made, whatever the checkout is now."""
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    asks = re.compile(r"metadata\.version\(\W*minisgl")
    assert [path for path in sources if asks.search(path.read_text())] == []


def test_the_page_about_installing_lists_the_extras_of_users() -> None:
    page = (ROOT / ".github/INSTALL.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert rows == {name: whats[0] for name, whats in EXTRAS.items() if name not in ("test", "dev")}


def test_the_wheel_that_hints_name_is_that_of_this_version(wheel: Path) -> None:
    named = {name for hint, _ in hints() for name in re.findall(r"[\w.-]+\.whl", hint)}
    assert named == {wheel.name}


def hints() -> list[tuple[str, str]]:
    """What `pip install` is followed by, and the file that says so."""
    files = [ROOT / "README.md", ROOT / ".github/INSTALL.md"]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [
        (found.strip(), str(file.relative_to(ROOT)))
        for file in files
        for found in HINT.findall(file.read_text())
    ]


def test_no_hint_takes_minisgl_from_an_index_where_it_is_not() -> None:
    found = hints()
    assert len(found) > 8
    named = re.compile(r"(^|[\s'\"])minisgl\b(?!-)")
    assert [hint for hint in found if named.search(hint[0])] == []


def test_hints_name_packages_as_the_extras_do() -> None:
    packages = {what for whats in EXTRAS.values() for what in whats}
    plain = re.compile(r"'?([A-Za-z][\w-]*(?:\[\w+\])?(?:>=[\d.]+)?)'?(?=\s|\"|$)")
    for hint, file in hints():
        if (first := plain.match(hint)) is not None and "/" not in hint.split()[0]:
            assert first[1] in packages, (hint, file)
