"""Snapshots the current options and commands for the next training of the demo model.

`python scripts/demo/snapshot_demo.py` writes them into minisgl/assets/demo/minisgl.json, which
training and evaluation read, and prints the hash of the evaluation's questions that follow from
them: freeze it in demo_model/evaluation.py, then run train_demo.py. Until then the bundled model
knows the old ones.
"""

from __future__ import annotations

import argparse
import json

from demo_model.evaluation import evaluation_hash
from demo_model.tables import SNAPSHOT, snapshot, todays_tables
from minisgl import __version__


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    taken = snapshot() | {"release": __version__, "tables": todays_tables()}
    SNAPSHOT.write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")
    snapshot.cache_clear()
    print(f'{SNAPSHOT}\nFROZEN_HASH = "{evaluation_hash()}"')


if __name__ == "__main__":
    main()
