"""Runs a benchmark of minisgl with several settings, and compares each with the first.

    python scripts/bench/bench_settings.py --side="--cache naive" --side="--cache radix" -- \\
        --model FOLDER --load-format dummy --workload shared-prefix

Each side is `minisgl bench VERB SIDE OPTIONS`, in a process of its own, for every --verb. In the
options, TEMP stands for a folder that all sides share and that is deleted at the end.

    python scripts/bench/bench_settings.py --served --verb serve \\
        --side="--num-requests 512" --side="--num-requests 1024 | --replicas 2" -- --model FOLDER

With --served the options are those of `minisgl serve`, which runs while `minisgl bench VERB SIDE`
measures it; what follows a bar in a side goes to the server, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = (sys.executable, "-m", "minisgl")
SHARED = "TEMP"  # in options
START_SECONDS = 900
STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Side:
    """One setting: the words after `minisgl bench` and, if one is started, `minisgl serve`."""

    name: str
    bench: list[str]
    serve: list[str] | None


def sides_of(arguments: argparse.Namespace, verb: str) -> list[Side]:
    found = []
    for name in arguments.side:
        bench, serve = map(shlex.split, name.partition("|")[::2])
        words, options = [*shlex.split(verb), *bench], arguments.options
        if arguments.served:
            found.append(Side(name, words, [*options, *serve]))
        else:
            found.append(Side(name, [*words, *options], None))
    return found


def run(side: Side, report: Path, shared: Path) -> int:
    """Measure one side. Returns the exit code."""
    with contextlib.ExitStack() as leaving:
        words = [word.replace(SHARED, str(shared)) for word in side.bench]
        if side.serve is not None:
            words += ["--url", f"{leaving.enter_context(serving(side.serve))}/v1"]
        return subprocess.run([*PROGRAM, "bench", *words, "--json", str(report)]).returncode


@contextlib.contextmanager
def serving(options: Sequence[str]) -> Iterator[str]:
    """The URL of a server whose replicas are all ready. Raises SystemExit if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([*PROGRAM, "serve", "--port", str(port), *options])
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
    parser.add_argument("--side", action="append", required=True, help="a setting; give several")
    parser.add_argument("--verb", action="append", help="of `minisgl bench` [default: offline]")
    parser.add_argument("--served", action="store_true", help="start `minisgl serve` for each side")
    parser.add_argument("--folder", type=Path, help="where TEMP is [default: the system's]")
    parser.add_argument("options", nargs="*", help="options of all sides, after --")
    arguments = parser.parse_args(words)
    if len(arguments.side) < 2:
        parser.error("argument --side: give two or more")
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
            reports = [Path(folder, f"{index}.json") for index in range(len(sides))]
            for side, report in zip(sides, reports, strict=True):
                print(f"{verb} {side.name}", flush=True)
                if code := run(side, report, shared):
                    return code
            for side, report in zip(sides[1:], reports[1:], strict=True):
                print(f"{sides[0].name} (A) against {side.name} (B)", flush=True)
                subprocess.run([*PROGRAM, "bench", "compare", reports[0], report], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
