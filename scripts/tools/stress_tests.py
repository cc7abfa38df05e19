"""Runs the tests many times, to find those that depend on timing or on their order.

python scripts/tools/stress_tests.py /tmp/stress        5 runs under load, 2 in random order
python scripts/tools/stress_tests.py /tmp/stress --loaded 1 --shuffled 0 -- tests/server

In a loaded run an endless loop keeps each core busy beside the tests. In a shuffled run the files,
and the tests of each, come in a random order, whose seed is recorded. A run is cut into shards, a
few files each. The results are kept in the folder, shard by shard: the same call goes on where an
earlier one stopped, and ends with a table of what failed how often. What follows -- goes on to
pytest. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("loaded", "shuffled")


@dataclass(frozen=True)
class Shard:
    """A few test files in one run, which one pytest process runs."""

    kind: str
    run: int
    seed: int
    index: int
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.run}-{self.index:02}"

    def command(self, report: Path, arguments: list[str]) -> list[str]:
        order = ["--random-order", f"--random-order-seed={self.seed}"]
        return [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"),
            "--tb=native",  # the only one that shows frames which an alarm interrupted anywhere
            f"--junitxml={report}",
            *(order if self.kind == "shuffled" else []),
            *arguments,
            *self.files,
        ]


@dataclass(frozen=True)
class Outcome:
    """What a shard's report says. `problems` are the ids of tests that failed or had an error."""

    passed: int
    skipped: int
    problems: tuple[str, ...]


def main() -> int:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    shards = [
        shard
        for kind, runs in zip(KINDS, (options.loaded, options.shuffled), strict=True)
        for run in range(1, runs + 1)
        for shard in shards_of(kind, run, seed_of(options.folder, kind, run), options)
    ]
    for kind in KINDS:
        waiting = [shard for shard in shards if shard.kind == kind and not done(shard, options)]
        with busy_cores(kind == "loaded" and bool(waiting)):
            run_all(waiting, options)
    return print_table(shards, options.folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the results are kept")
    parser.add_argument("--loaded", type=int, default=5, metavar="N", help="runs beside busy loops")
    parser.add_argument("--shuffled", type=int, default=2, metavar="N", help="in random order")
    parser.add_argument("--shards", type=int, default=16, metavar="N", help="parts of a run")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="shards at a time"
    )
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.pytest = sys.argv[split + 1 :]
    return options


def seed_of(folder: Path, kind: str, run: int) -> int:
    """The seed of a run, drawn when it is asked for first."""
    path = folder / "seeds.json"
    seeds: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    seed = seeds.setdefault(f"{kind}-{run}", random.SystemRandom().randrange(1_000_000))
    path.write_text(json.dumps(seeds, indent=1))
    return seed


def shards_of(kind: str, run: int, seed: int, options: argparse.Namespace) -> list[Shard]:
    """Deals the test files out, the large ones first, so that shards take equally long."""
    paths, arguments = split_paths(options.pytest)
    options.arguments = arguments
    files = sorted(paths, key=lambda file: (-(ROOT / file).stat().st_size, file))
    if kind == "shuffled":
        random.Random(seed).shuffle(files)
    count = min(options.shards, len(files))
    return [Shard(kind, run, seed, i, tuple(files[i::count])) for i in range(count)]


def split_paths(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The test files that pytest's arguments name, all of them without any, and the others."""
    named = [ROOT / argument for argument in arguments if (ROOT / argument).exists()]
    others = [argument for argument in arguments if not (ROOT / argument).exists()]
    found = {
        str(file.relative_to(ROOT))
        for path in named or [ROOT / "tests"]
        for file in ([path] if path.is_file() else path.rglob("test_*.py"))
    }
    return sorted(found), others


@contextmanager
def busy_cores(wanted: bool) -> Iterator[None]:
    """Keeps each core busy with an endless loop meanwhile, if that is wanted."""
    context = multiprocessing.get_context("spawn")
    loops = [
        context.Process(target=spin, args=(os.getpid(),), daemon=True)
        for _ in range(os.cpu_count() or 1 if wanted else 0)
    ]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()
            loop.join()


def spin(parent: int) -> None:
    """Loops until the parent has ended."""
    while os.getppid() == parent:
        sum(range(1_000_000))


def run_all(shards: list[Shard], options: argparse.Namespace) -> None:
    with ThreadPoolExecutor(options.jobs) as pool:
        for shard, code in pool.map(lambda shard: (shard, run_one(shard, options)), shards):
            print(f"{shard.name}: pytest ended with {code}", flush=True)


def run_one(shard: Shard, options: argparse.Namespace) -> int:
    """Runs a shard and returns pytest's exit code. Its report is there once it has ended."""
    report = options.folder / f"{shard.name}.xml"
    unfinished = report.with_suffix(".unfinished")
    with report.with_suffix(".log").open("w") as log:
        command = shard.command(unfinished, options.arguments)
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    if code == 5:  # -k or -m left none of its tests
        unfinished.write_text("<testsuites/>")
    elif not unfinished.exists():
        case = f'<testcase classname="{shard.name}" name="ended with {code}"><error/></testcase>'
        unfinished.write_text(f"<testsuites>{case}</testsuites>")
    unfinished.rename(report)
    return code


def done(shard: Shard, options: argparse.Namespace) -> bool:
    return (options.folder / f"{shard.name}.xml").exists()


def outcome_of(report: Path) -> Outcome:
    cases = list(ElementTree.parse(report).iter("testcase"))
    problems = {
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(len(cases) - skipped - len(problems), skipped, tuple(sorted(problems)))


def print_table(shards: list[Shard], folder: Path) -> int:
    """Prints each run's counts and what failed how often. Returns the exit code."""
    failures: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    print("| run | seed | passed | skipped | failed |\n|---|---|---|---|---|")
    for kind, run, seed in dict.fromkeys((s.kind, s.run, s.seed) for s in shards):
        outcomes = [
            outcome_of(folder / f"{shard.name}.xml")
            for shard in shards
            if (shard.kind, shard.run) == (kind, run)
        ]
        problems = [problem for outcome in outcomes for problem in outcome.problems]
        failures[kind].update(problems)
        passed, skipped = sum(o.passed for o in outcomes), sum(o.skipped for o in outcomes)
        shown = seed if kind == "shuffled" else ""
        print(f"| {kind} {run} | {shown} | {passed} | {skipped} | {len(problems)} |")
    failed = sorted({test for counter in failures.values() for test in counter})
    if failed:
        print("\n| failed | " + " | ".join(KINDS) + " |\n|---|---|---|")
    for test in failed:
        print(f"| {test} | " + " | ".join(str(failures[kind][test]) for kind in KINDS) + " |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
