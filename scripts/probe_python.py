"""Tells scripts/venv.sh what the interpreter that runs this file has to offer.

Exit code 1: not a Python for minisgl. Otherwise, if a torch that minisgl can use is installed, one
line for each folder of packages it lives with. Nothing is imported that takes time.
"""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(1)

import re
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def torch_in_range() -> bool:
    wanted = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', PYPROJECT.read_text())
    assert wanted, "pyproject.toml bounds torch in another form than this script reads"
    low, high = (tuple(map(int, wanted.group(i, i + 1))) for i in (1, 3))
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    found = tuple(map(int, version.split(".")[:2]))
    return low <= found < high


if torch_in_range():
    for path in sys.path:
        if path.endswith(("site-packages", "dist-packages")):
            print(path)
