"""Compares the speed of two versions of minisgl on one machine, in the order A-B-A-B:

pip install --no-deps --no-build-isolation --target /tmp/a OLD_CHECKOUT   (and /tmp/b NEW_CHECKOUT)
python scripts/bench/bench_ab.py /tmp/a /tmp/b --model FOLDER [--model FOLDER ...]

Each round runs `minisgl bench latency` and, unless --no-offline, `minisgl bench` of each model,
with the one version and then with the other, on random weights (see scripts/tools/dummy_config.py).
The table has the median of each figure over the rounds, and by how much B differs from A. Options
that are not this script's go to the benchmarks; --only-a and --only-b have those of one version,
so that two settings of the same version can be compared:

python scripts/bench/bench_ab.py /tmp/b /tmp/b --model FOLDER --only-b="--model-impl adopted"
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

VERSIONS = ("A", "B")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, help="folder that A was installed into")
    parser.add_argument("b", type=Path, help="folder that B was installed into")
    parser.add_argument("--model", action="append", required=True, help="folder with config.json")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--max-prefill-length", default="16384")
    parser.add_argument("--only-a", default="", metavar="OPTIONS")
    parser.add_argument("--only-b", default="", metavar="OPTIONS")
    arguments, others = parser.parse_known_args()

    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(1, arguments.rounds + 1):
        for model in arguments.model:
            sides = ((arguments.a, arguments.only_a), (arguments.b, arguments.only_b))
            for version, (site, own) in zip(VERSIONS, sides, strict=True):
                options = [
                    *("--model", model, "--load-format", "dummy"),
                    *("--max-prefill-length", arguments.max_prefill_length),
                    *(*others, *shlex.split(own)),
                ]
                name = Path(model).name
                figures = latencies(site, name, options)
                if not arguments.no_offline:
                    figures |= throughput(site, name, options)
                for figure, value in figures.items():
                    found[figure][version].append(value)
                    print(f"round {number} {version} {figure} {value:,.3f}", flush=True)
    print(table(found))


def latencies(site: Path, model: str, options: list[str]) -> dict[str, float]:
    """The median TPOT of each batch size, in milliseconds."""
    report = run(site, "latency", *options)
    return {
        f"{model} TPOT batch {batch['sizes']['num_requests']}, ms": (
            batch["figures"]["tpot_s"]["p50"] * 1e3
        )
        for batch in report["batches"]
    }


def throughput(site: Path, model: str, options: list[str]) -> dict[str, float]:
    report = run(site, *options)
    return {f"{model} offline, tok/s": report["figures"]["output_tokens_per_s"]}


def run(site: Path, *arguments: str) -> dict:
    """The report of one benchmark of the version in `site`."""
    paths = [str(site.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "minisgl", "bench", *arguments, "--json", str(file)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=folder,  # or a checkout in the current folder would be taken for the package
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(file.read_text())


def table(found: dict[str, dict[str, list[float]]]) -> str:
    rows = ["| figure | A | B | B / A |", "|---|---|---|---|"]
    for figure, values in found.items():
        a, b = (median(values[version]) for version in VERSIONS)
        rows.append(f"| {figure} | {a:,.3f} | {b:,.3f} | {b / a - 1:+.2%} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
