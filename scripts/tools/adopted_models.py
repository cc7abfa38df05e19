"""Tests every adopted architecture, and writes the table in minisgl/models/README.md.

python scripts/tools/adopted_models.py            # 15 minutes on two cores
python scripts/tools/adopted_models.py --table    # the table alone, in two minutes

The table is left as it is if a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from pages import ROOT, as_table, with_table

sys.path.append(str(ROOT / "tests"))

from support.adopted_checkpoints import full_config

from minisgl.models.adopted.architectures import ADOPTED
from minisgl.models.adopted.discover import discover
from minisgl.models.adopted.division import divisibility
from minisgl.models.adopted.proof import prove
from minisgl.models.adopted.reader import model_class

PAGE = ROOT / "minisgl" / "models" / "README.md"
HEAD = ["architecture", "`--tp`", "`--pp`", "fused layers", "fused heads"]


def row(architecture: str) -> list[str]:
    config, model = full_config(architecture), model_class(architecture)
    found = discover(model, config)
    _, way = prove(model, config, found)
    with torch.device("meta"):
        made = model._from_config(config)
    divides = divisibility(made, found)
    cells = (divides.one_rank is None, divides.one_stage is None, way.fuses, way.defers)
    return [f"`{architecture}`", *("yes" if cell else "-" for cell in cells)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="run no tests")
    if not parser.parse_args().table:
        command = [sys.executable, "-m", "pytest", "-q", "tests/models/test_adopted.py"]
        if code := subprocess.call(command, cwd=ROOT, env=os.environ | {"ARCHITECTURES": "all"}):
            return code
    table = as_table(HEAD, map(row, sorted(ADOPTED)))
    PAGE.write_text(with_table(PAGE.read_text(), Path(__file__).name, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
