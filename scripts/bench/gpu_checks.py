"""Runs what a GPU must still show, most important first, as far as the time reaches.

python scripts/bench/gpu_checks.py --list                  # the checks, and how each last ended
python scripts/bench/gpu_checks.py --minutes 9             # as many as fit
python scripts/bench/gpu_checks.py --only 'tests-*' fp8-14b-latency
python scripts/bench/gpu_checks.py --only 'tests-*' --jobs 6   # what measures no time, side by side

gpu_checks.json beside this script lists claims, kernels and paths, each with its command, the
figures expected, the GPUs and the time that it takes, and its last run on each kind of GPU. Checks
that never ran come first, then those that have shown nothing yet, then those that have not shown it
on GPUs of this generation, then the one that ran longest ago; what is equal keeps the order of the
list. Checks that need more GPUs, memory or packages than there are here are left out.

Each check is a process group of its own with a time limit. After each the file is written, so that
nothing is lost if the script is stopped. Models have random weights: in a command, {Qwen3-14B} is a
folder with its config, {Qwen3-14B:int4} with that of a quantised checkpoint, and
{Qwen3-14B:tokenizer} with a tokenizer, too. The exit code is 1 if a check failed, was cut off or
gave a worse figure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from dummy_config import config_of
from dummy_tokenizer import write_tokenizer
from pages import as_table

from minisgl.bench.environment import checkout_commit

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".json")
WITHIN = 0.05  # of the expected figure; GPUs of one kind and single runs differ by that much
STOP_S = 10  # from asking a check to end until it is killed
LAST_LINES = 15  # that are shown of the output of a check that failed
SHOWN = ("ok", "worse", "ran")  # verdicts of a check that came to its end
NOT_SHOWN = ("failed", "cut off")
Number = int | float  # which is written as it was read

# Asks in a process of its own, so that this one holds no memory of the GPU.
PROBE = """
import json, torch, triton
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({
    "gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "gpus": torch.cuda.device_count(),
    "memory_gb": gpu.total_memory / 1e9, "torch": torch.__version__,
    "triton": triton.__version__}))
"""


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A number in the output of a check, and what it should be."""

    name: str
    find: str  # regular expression; its group is the number, and its last match counts
    # By a part of the GPU's name, such as H200. Without one for this GPU the figure is only noted.
    expected: dict[str, Number] = {}
    better: str | None = None  # less or more, than expected

    def read(self, output: str) -> float | None:
        found = re.findall(self.find, output)
        return float(found[-1].replace(",", "")) if found else None

    def wanted(self, gpu: str) -> float | None:
        return next((value for name, value in self.expected.items() if name in gpu), None)

    def is_worse(self, value: float, wanted: float) -> bool:
        if self.better == "less":
            return value > wanted * (1 + WITHIN)
        return value < wanted * (1 - WITHIN)


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last run of a check on GPUs of one kind; of runs before this script less is known."""

    date: str
    capability: str
    verdict: str  # of SHOWN or NOT_SHOWN
    figures: dict[str, Number] = {}
    seconds: Number | None = None
    gpus: int | None = None  # of the machine
    torch: str | None = None
    triton: str | None = None
    commit: str | None = None
    why: str | None = None  # it failed


class Check(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    shows: str
    command: str
    minutes: Number  # estimate
    gpus: int
    hosts: int = 1  # with more, the command is one to be given by hand
    memory_gb: Number = 0.0  # of each GPU
    needs: list[str] = []  # modules that minisgl does not depend on
    covers: list[str] = []  # files below minisgl/ that it is about
    figures: list[Figure] = []
    again: str | None = None  # why it must be shown again, until it was
    runs: dict[str, Run] = {}  # by the GPU's name

    def why_not(self, machine: Machine) -> str | None:
        """Why it cannot run there; None if it can."""
        if self.hosts > 1:
            return f"needs {self.hosts} hosts"
        if self.gpus > machine.gpus:
            return f"needs {self.gpus} GPUs"
        if self.memory_gb > machine.memory_gb:
            return f"needs a GPU of {self.memory_gb:g} GB"
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"needs {', '.join(missing)}" if missing else None

    def seconds(self, machine: Machine) -> float:
        """What it will take: the time of the last whole run on such a GPU, or the estimate."""
        run = self.runs.get(machine.gpu)
        if run is None or run.seconds is None or run.verdict not in SHOWN:
            return self.minutes * 60
        return run.seconds * 1.1

    def rank(self, machine: Machine) -> tuple[int, str]:
        """The lower, the sooner: see the script's docstring."""
        if self.again or not self.runs:
            return 0, ""
        shown = [run for run in self.runs.values() if run.verdict in SHOWN]
        here = [run for run in shown if generation(run) == generation(machine)]
        for place, runs in ((3, here), (2, shown), (1, [*self.runs.values()])):
            if runs:
                return place, max(run.date for run in runs)
        raise AssertionError("it has run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpu: str
    capability: str
    gpus: int
    memory_gb: float
    torch: str
    triton: str

    @classmethod
    def found(cls) -> Machine:
        """Raises SystemExit without a GPU."""
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            sys.exit(f"gpu_checks.py needs a GPU that PyTorch can use, and Triton: {last}")
        return cls(**json.loads(done.stdout.splitlines()[-1]))


def generation(of: Run | Machine) -> str:
    return of.capability.partition(".")[0]


# -- the file ------------------------------------------------------------------------------------


def read_checks(path: Path) -> list[Check]:
    return msgspec.json.decode(path.read_bytes(), type=list[Check])


def write_checks(path: Path, checks: Sequence[Check]) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(_lines(msgspec.to_builtins(checks), depth=3) + "\n")
    new.replace(path)


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """JSON with a line for each value, but for those deeper than `depth`, and lists of names."""
    is_list = isinstance(value, list)
    if depth == 0 or not value or not isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    if is_list and isinstance(value[0], str):
        return json.dumps(value, ensure_ascii=False)
    inner = f"{indent} "
    if is_list:
        parts = [_lines(each, depth - 1, inner) for each in value]
    else:
        parts = [f"{json.dumps(k)}: {_lines(v, depth - 1, inner)}" for k, v in value.items()]
    opening, closing = "[]" if is_list else "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


# -- a check -------------------------------------------------------------------------------------


def command_line(command: str, folder: Path) -> list[str]:
    """The words of a command; makes the folders of models that it names."""

    def made(match: re.Match[str]) -> str:
        return str(make_model(folder, *match[1].split(":")))

    words = [re.sub(r"\{([^{}]+)\}", made, word) for word in shlex.split(command)]
    return [sys.executable if word == "python" else word for word in words]


def make_model(folder: Path, model: str, kind: str | None = None) -> Path:
    """A folder for random weights. kind: a quantisation of dummy_config, or tokenizer."""
    made = folder / "-".join(filter(None, (model, kind)))
    if not made.exists():
        made.mkdir(parents=True)
        quantization = None if kind == "tokenizer" else kind
        (made / "config.json").write_text(json.dumps(config_of(model, quantization)))
        if kind == "tokenizer":
            write_tokenizer(made)
    return made


def run_check(
    check: Check, machine: Machine, folder: Path, limit_s: float, commit: str | None
) -> Run:
    """Run it in `folder`, where its output stays in a file."""
    log, began = folder / f"{check.name}.log", time.monotonic()
    words = command_line(check.command, folder)
    code = run_group(words, log, limit_s, python_path())
    output = log.read_text(errors="replace")
    verdict, figures, why = judge(check, machine.gpu, code, output)
    return Run(
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        capability=machine.capability,
        verdict=verdict,
        figures=figures,
        seconds=round(time.monotonic() - began, 1),
        gpus=machine.gpus,
        torch=machine.torch,
        triton=machine.triton,
        commit=commit,
        why=why,
    )


def python_path() -> str:
    """Has the checkout run, whatever is installed."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "packages"), *given])


def run_group(command: Sequence[str], log: Path, limit_s: float, python_path: str) -> int | None:
    """The exit code; None if it took longer. No process of its group is left."""
    env = os.environ | {"PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, process_group=0
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        return None
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def judge(
    check: Check, gpu: str, code: int | None, output: str
) -> tuple[str, dict[str, float], str | None]:
    """The verdict, the figures that the output has, and why it is bad."""
    read = {figure.name: figure.read(output) for figure in check.figures}
    figures = {name: value for name, value in read.items() if value is not None}
    if code is None:
        return "cut off", figures, "its time limit was reached"
    if code != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return "failed", figures, f"exit code {code}: {last[:200]}"
    if missing := [name for name, value in read.items() if value is None]:
        return "failed", figures, f"its output has no {', '.join(missing)}"
    wanted = {figure.name: figure.wanted(gpu) for figure in check.figures}
    worse = [
        f"{figure.name} {figures[figure.name]:g} instead of {expected:g}"
        for figure in check.figures
        if (expected := wanted[figure.name]) is not None
        and figure.is_worse(figures[figure.name], expected)
    ]
    if worse:
        return "worse", figures, "; ".join(worse)
    has_expectation = not check.figures or any(value is not None for value in wanted.values())
    return "ok" if has_expectation else "ran", figures, None


# -- all of them ---------------------------------------------------------------------------------


def in_order(checks: Sequence[Check], machine: Machine) -> list[Check]:
    """Those that can run here, the most important first."""
    able = [check for check in checks if check.why_not(machine) is None]
    return sorted(able, key=lambda check: check.rank(machine))


def run_checks(
    checks: Sequence[Check],
    chosen: Sequence[Check],
    machine: Machine,
    arguments: argparse.Namespace,
    folder: Path,
) -> bool:
    """Run those of `chosen` that fit into the time; whether all ended well."""
    ends, told_one = time.monotonic() + arguments.minutes * 60, threading.Lock()

    def run_one(check: Check) -> bool | None:
        """Whether it ended well; None if it did not fit."""
        left_s = ends - time.monotonic() - STOP_S
        if check.seconds(machine) > left_s:
            return None
        limit_s = min((2 * check.seconds(machine) + 60) * arguments.jobs, left_s)
        run = run_check(check, machine, folder, limit_s, arguments.commit)
        with told_one:
            check.runs[machine.gpu] = run
            if run.verdict in SHOWN:
                check.again = None
            write_checks(arguments.file, checks)
            print(f"{run.seconds:6.0f} s  {check.name}: {told(run)}", flush=True)
            if run.verdict in NOT_SHOWN:
                print(last_lines(folder / f"{check.name}.log"), flush=True)
        return run.verdict in ("ok", "ran")

    if arguments.jobs == 1:
        ended = [run_one(check) for check in chosen]
    else:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            ended = list(pool.map(run_one, chosen))
    num_left = ended.count(None)
    print(f"{len(chosen) - num_left} of {len(chosen)} checks ran; {num_left} did not fit")
    return False not in ended


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"          {line[:200]}" for line in lines)


def told(run: Run) -> str:
    figures = ", ".join(f"{name} {value:g}" for name, value in run.figures.items())
    return " | ".join(filter(None, (run.verdict, figures, run.why)))


def listed(checks: Sequence[Check]) -> str:
    """A table in Markdown."""
    rows = []
    for check in checks:
        runs = [
            f"{', '.join(filter(None, (gpu, run.date[:10], run.commit)))}: {told(run)}"
            for gpu, run in check.runs.items()
        ] or ["never"]
        runs += [f"again: {check.again}"] if check.again else []
        cells = (check.name, check.shows, str(check.gpus), f"{check.minutes:g}", "; ".join(runs))
        rows.append([cell.replace("|", "/") for cell in cells])
    return as_table(["check", "shows", "GPUs", "minutes", "last runs"], rows)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all [default: 60]")
    parser.add_argument(
        "--jobs", type=int, default=1, help="at once, for what measures no time [default: 1]"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these; * stands for any")
    parser.add_argument("--list", action="store_true", help="print the checks, and run none")
    parser.add_argument("--file", type=Path, default=LIST, help="the list [default: beside this]")
    parser.add_argument(
        "--folder", type=Path, help="for models and outputs [default: one that is deleted]"
    )
    parser.add_argument(
        "--commit", default=checkout_commit(ROOT), help="that runs [default: that of the checkout]"
    )
    return parser.parse_args(words)


def named(checks: Sequence[Check], patterns: Sequence[str] | None) -> list[Check]:
    """Raises SystemExit if a pattern names none."""
    for pattern in patterns or ():
        if not any(fnmatch(check.name, pattern) for check in checks):
            sys.exit(f"gpu_checks.py: --only {pattern}: no check has this name; see --list")
    return [
        check
        for check in checks
        if patterns is None or any(fnmatch(check.name, pattern) for pattern in patterns)
    ]


def main(words: Sequence[str] | None = None) -> int:
    arguments = parsed(words)
    checks = read_checks(arguments.file)
    chosen = named(checks, arguments.only)
    if arguments.list:
        print(listed(chosen), end="")
        return 0
    machine = Machine.found()
    print(f"{machine.gpus} x {machine.gpu}, torch {machine.torch}, triton {machine.triton}")
    for check in chosen:
        if reason := check.why_not(machine):
            print(f"       not  {check.name}: {reason}")
    with contextlib.ExitStack() as leaving:
        folder = arguments.folder
        if folder is None:
            folder = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-")))
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        good = run_checks(checks, in_order(chosen, machine), machine, arguments, folder)
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the check that runs, too
    sys.exit(main())
