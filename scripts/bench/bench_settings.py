"""Runs a benchmark of minisgl with several settings, and compares each with the first.

    python scripts/bench/bench_settings.py --side="--cache naive" --side="--cache radix" -- \\
        --model FOLDER --load-format dummy --workload shared-prefix

Each side is `minisgl bench VERB SIDE OPTIONS`, in a process of its own, for every --verb. In the
options, TEMP stands for a folder that all sides share and that is deleted at the end.

    python scripts/bench/bench_settings.py --served --verb serve \\
        --side="--num-requests 512" --side="--num-requests 1024 | --replicas 2" -- --model FOLDER

Versions of minisgl are settings, too. Each side runs with each --version, a folder that one was
installed into (pip install --no-deps --no-build-isolation --target /tmp/a OLD_CHECKOUT). With
--rounds the sides take turns, A-B-A-B, and the median of each figure counts:

    python scripts/bench/bench_settings.py --version /tmp/a --version /tmp/b --rounds 2 \\
        --verb latency --verb offline -- --model FOLDER --load-format dummy

With --served the options are those of `minisgl serve`, which runs while `minisgl bench VERB SIDE`
measures it; what follows a bar in a side goes to the server, too. NAME=VALUE there is a variable of
its environment:

    python scripts/bench/bench_settings.py --served --verb serve --rounds 3 --side="" \\
        --side="| OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 --log-format json \\
        --max-queue-seconds 60" -- --model FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-m", "minisgl")
SHARED = "TEMP"  # in options
VARIABLE = re.compile("[A-Z][A-Z_]*=")
START_SECONDS = 900
STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Side:
    """One setting: the words after `minisgl bench` and, if one is started, `minisgl serve`."""

    name: str
    bench: list[str]
    serve: list[str] | None
    version: Path | None  # None: the one that is installed


def sides_of(arguments: argparse.Namespace, verb: str) -> list[Side]:
    found = []
    for version, side in itertools.product(arguments.version or [None], arguments.side):
        bench, serve = map(shlex.split, side.partition("|")[::2])
        words, options = [*shlex.split(verb), *bench], arguments.options
        name = " ".join(filter(None, (version and str(version), side)))
        if arguments.served:
            found.append(Side(name, words, [*options, *serve], version))
        else:
            found.append(Side(name, [*words, *options], None, version))
    return found


def run(side: Side, report: Path, shared: Path) -> int:
    """Measure one side. Returns the exit code."""
    with contextlib.ExitStack() as leaving:
        words = [word.replace(SHARED, str(shared)) for word in side.bench]
        if side.serve is not None:
            url = leaving.enter_context(serving(side.serve, side.version))
            words += ["--url", f"{url}/v1"]
        command = [*PROGRAM, "bench", *words, "--json", str(report)]
        return subprocess.run(command, **options_of(side.version)).returncode


def options_of(version: Path | None) -> dict[str, Any]:
    """What has a process run that version, and no checkout in the current folder."""
    if version is None:
        return {}
    paths = [str(version.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"env": os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}}


def median_of(reports: Sequence[Any]) -> Any:
    """A report with the median of each number; all else is that of the first."""
    first = reports[0]
    if isinstance(first, dict):
        known = [name for name in first if all(name in report for report in reports)]
        return {name: median_of([report[name] for report in reports]) for name in known}
    if isinstance(first, list):
        return [median_of(each) for each in zip(*reports, strict=False)]
    if isinstance(first, float) and all(isinstance(number, float | int) for number in reports):
        return statistics.median(reports)
    return first


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(options: Sequence[str], version: Path | None = None) -> Iterator[str]:
    """The URL of a server whose replicas are all ready. Raises SystemExit if it does not start."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    variables = dict(word.split("=", 1) for word in options if VARIABLE.match(word))
    words = [word for word in options if not VARIABLE.match(word)]
    command = [*PROGRAM, "serve", "--port", str(port), *words]
    started = options_of(version)
    started["env"] = started.get("env", os.environ) | variables
    server = subprocess.Popen(command, **started)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server with {shlex.join(options)} did not start.")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        finally:
            server.kill()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            health = json.load(answer)
    except (urllib.error.URLError, OSError):
        return False
    return bool(health.get("ready") == health.get("replicas"))


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", action="append", help="a setting; give several, or versions")
    parser.add_argument("--version", action="append", type=Path, help="where one is installed")
    parser.add_argument("--rounds", type=int, default=1, help="of all sides [default: 1]")
    parser.add_argument("--verb", action="append", help="of `minisgl bench` [default: offline]")
    parser.add_argument("--served", action="store_true", help="start `minisgl serve` for each side")
    parser.add_argument("--folder", type=Path, help="where TEMP is [default: the system's]")
    parser.add_argument("options", nargs="*", help="options of all sides, after --")
    arguments = parser.parse_args(words)
    arguments.side = arguments.side or [""]
    if len(arguments.side) * len(arguments.version or [None]) < 2:
        parser.error("argument --side: give two or more, or two of --version")
    if not arguments.served and "|" in "".join(arguments.side):
        parser.error("argument --side: options of a server need --served")
    return arguments


def main() -> int:
    arguments = parsed()
    with tempfile.TemporaryDirectory(prefix="minisgl-", dir=arguments.folder) as folder:
        shared = Path(folder, "shared")
        shared.mkdir(0o700)  # as --disk-cache asks
        for verb in arguments.verb or ["offline"]:
            sides = sides_of(arguments, verb)
            reports: list[list[Any]] = [[] for _ in sides]
            files = [Path(folder, f"{index}.json") for index in range(len(sides))]
            for _ in range(arguments.rounds):
                for side, file, found in zip(sides, files, reports, strict=True):
                    print(f"{verb} {side.name}", flush=True)
                    if code := run(side, file, shared):
                        return code
                    found.append(json.loads(file.read_text()))
            for file, found in zip(files, reports, strict=True):
                file.write_text(json.dumps(median_of(found)))
            for side, file in zip(sides[1:], files[1:], strict=True):
                print(f"{sides[0].name} (A) against {side.name} (B)", flush=True)
                subprocess.run([*PROGRAM, "bench", "compare", files[0], file], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
