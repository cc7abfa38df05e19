"""Compiles every Triton kernel that the engine launches, and compares with what is kept.

bash scripts/tools/try_compiled.sh                       # all of them, 12 minutes of CPU time
bash scripts/tools/try_compiled.sh --only stream_kernel --target sm_90  # 30 s
bash scripts/tools/try_compiled.sh --write               # keep what was found

Needs Triton, and no GPU. Of each kernel it compares registers, bytes that are spilled, shared
memory and a digest of the machine code with compiled_kernels.txt, and fails if anything differs, if
a kernel of the package was not reached, or if a kernel spills that did not. With --write the file
takes what was found, but new spills must be named (--spills).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from tempfile import TemporaryDirectory

import triton
from kernel_table import (
    KEPT,
    Compiled,
    Key,
    changes,
    code_digest,
    figures_of,
    format_table,
    launched_kernels,
    new_spills,
    parse_table,
)
from pretended_gpu import DEVICES
from recorded_launches import Launch, record
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True, slots=True)
class Scope:
    """What is compiled."""

    targets: tuple[str, ...]
    only: tuple[str, ...]  # parts of kernels' names; none: all

    def takes(self, kernel: str) -> bool:
        return not self.only or any(part in kernel for part in self.only)

    def holds(self, key: Key) -> bool:
        return key.target in self.targets and self.takes(key.kernel)

    @property
    def is_everything(self) -> bool:
        return not self.only and set(self.targets) == set(DEVICES)


def main() -> int:
    given = _parse_arguments()
    scope = Scope(tuple(given.target), tuple(given.only))
    kept, release = _kept()
    if release != triton.__version__ and not (given.write and scope.is_everything):
        print(
            f"{KEPT.name} holds for Triton {release}, and this is {triton.__version__}: nothing "
            "can be compared. Install that release, or write all of the file with --write."
        )
        return 1
    found, errors = compile_all(scope, given.jobs)
    if scope.is_everything:
        unreached = sorted(launched_kernels() - {key.kernel for key in found})
        errors += [f"{kernel}: not reached; SERVED of recorded_launches.py" for kernel in unreached]
    before = {key: figures for key, figures in kept.items() if scope.holds(key)}
    spills = new_spills(before, found, given.spills)
    changed = changes(before, found)
    for title, lines in (("Errors", errors), ("New spills", spills), ("Changes", changed)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")
    if errors or spills:
        return 1
    if given.write:
        others = {key: figures for key, figures in kept.items() if not scope.holds(key)}
        KEPT.write_text(format_table(others | found, triton.__version__), encoding="utf-8")
    elif not changed:
        print("As kept.")
    return int(bool(changed) and not given.write)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--target", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument("--write", action="store_true", help="keep what is found")
    parser.add_argument(
        "--spills", nargs="+", default=[], metavar="NAME", help="parts of names that may spill more"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args()


def _kept() -> tuple[dict[Key, Compiled], str]:
    """The kept table, and its release of Triton."""
    return parse_table(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else ({}, "none")


def compile_all(scope: Scope, jobs: int) -> tuple[dict[Key, Compiled], list[str]]:
    """The table of the scope, and the kernels that do not compile."""
    table: dict[Key, Compiled] = {}
    errors: list[str] = []
    for target in scope.targets:
        launches = [launch for launch in _recorded(target) if scope.takes(launch.name)]
        with _processes(jobs) as pool:
            results = [pool.submit(compile_launch, one, DEVICES[target].arch) for one in launches]
        for launch, result in zip(launches, results, strict=True):
            key = Key(launch.name, launch.variant, target)
            if (error := result.exception()) is None:
                table[key] = result.result()
            else:  # where the compiler ended its process, that of the kernels after it, too
                errors.append(f"{key}: {type(error).__name__}: {error}")
        print(f"{target}: {len(launches)} compiled; {_cpu_seconds():.0f} s of CPU time so far")
    return table, errors


def _recorded(target: str) -> list[Launch]:
    """The launches on a target, from a process of their own, which pretends to have it."""
    with _processes(1) as process:
        return process.submit(record, DEVICES[target]).result()


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("fork"))


def _cpu_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(times.ru_utime + times.ru_stime for times in used)


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile without line information, so that moving a line changes nothing, and anew, since a
    cached result has no log."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    log = io.StringIO()
    with (
        TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.disable_line_info = True
        triton.knobs.nvidia.dump_ptxas_log = True
        found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    registers, spilled = figures_of(log.getvalue())
    return Compiled(registers, spilled, found.metadata.shared, code_digest(found.asm["cubin"]))


if __name__ == "__main__":
    sys.exit(main())
