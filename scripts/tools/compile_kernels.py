"""Compiles every Triton kernel that the engine launches, at the sizes that ship.

bash scripts/tools/try_compiled.sh                       # all of them, 12 minutes of CPU time
bash scripts/tools/try_compiled.sh --only stream_kernel --target sm_90  # 30 s
bash scripts/tools/try_compiled.sh --table before.txt    # write what was found

Needs Triton, and no GPU. Fails if a kernel does not compile, if one of the package was not reached,
or if one spills more than SPILLS of spilled_kernels.py says. A table has a line for each kernel:
registers of a thread, bytes that it spills, bytes of shared memory, a digest of the PTX, and what
it was compiled for. Tables of two commits, compared by diff, show what a change has touched.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import triton
from pretended_gpu import DEVICES
from recorded_launches import Launch, record
from spilled_kernels import figures_of, launched_kernels, may_spill
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel, compiled for a target."""

    launch: Launch
    target: str
    registers: int  # of a thread
    spilled: int  # bytes that a thread stores and loads because its registers do not suffice
    shared: int  # bytes of a program
    code: str  # digest of the PTX

    def __str__(self) -> str:
        figures = f"{self.registers} {self.spilled} {self.shared} {self.code}"
        return f"{self.launch.name} {self.target} {figures} {self.launch.variant}"


def main() -> int:
    given = _parse_arguments()
    found: list[Compiled] = []
    errors: list[str] = []
    for target in given.target:
        launches = [one for one in _recorded(target) if _is_named(one, given.only)]
        with _processes(given.jobs) as pool:
            results = [pool.submit(compile_launch, one, target) for one in launches]
        for launch, result in zip(launches, results, strict=True):
            if (error := result.exception()) is None:
                found.append(result.result())
            else:  # where the compiler ended its process, that of the kernels after it, too
                told = f"{type(error).__name__}: {error}"
                errors.append(f"{launch.name} {target} {launch.variant}: {told}")
        print(f"{target}: {len(launches)} compiled", flush=True)
    errors += [
        f"{one}: more is spilled than SPILLS of spilled_kernels.py allows"
        for one in found
        if not may_spill(one.launch.name, one.target, one.spilled)
    ]
    if not given.only and set(given.target) == set(DEVICES):
        unreached = launched_kernels() - {one.launch.name for one in found}
        errors += [f"{name}: not reached; SERVED of recorded_launches.py" for name in unreached]
    if given.table is not None:
        given.table.write_text("".join(f"{line}\n" for line in sorted(map(str, found))))
    print("\n".join(sorted(errors)) or "All compile.")
    return int(bool(errors))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--target", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument("--table", type=Path, help="write what is found to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args()


def _is_named(launch: Launch, names: list[str]) -> bool:
    return not names or any(name in launch.name for name in names)


def _recorded(target: str) -> list[Launch]:
    """The launches on a target, from a process of their own, which pretends to have it."""
    with _processes(1) as process:
        return process.submit(record, DEVICES[target]).result()


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("fork"))


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile without line information, so that moving a line changes nothing, and anew, since a
    cached result has no log."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    gpu = GPUTarget("cuda", DEVICES[target].arch, 32)
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
        made = triton.compile(source, target=gpu, options=launch.options)
    registers, spilled = figures_of(log.getvalue())
    code = sha256(made.asm["ptx"].encode()).hexdigest()[:12]
    return Compiled(launch, target, registers, spilled, made.metadata.shared, code)


if __name__ == "__main__":
    sys.exit(main())
