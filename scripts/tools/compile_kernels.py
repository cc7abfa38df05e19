"""Compiles every Triton kernel that the engine launches, at the sizes that ship.

bash scripts/tools/try_compiled.sh                       # all of them, 12 minutes of CPU time
bash scripts/tools/try_compiled.sh --only stream_kernel --target sm_90  # 30 s

Needs Triton, and no GPU. Fails if a kernel does not compile, if one of the package was not reached,
if one spills more than SPILLS of spilled_kernels.py says, if one writes registers that tensor cores
may still read, or if launches break the rule by which they overlap; the last only with all kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory

import triton
from launch_order import Uses, broken, uses_of
from pretended_gpu import DEVICES
from recorded_launches import Launch, Recording, record
from spilled_kernels import SPILLS, kernels_of, spilled_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from unfinished_products import overwritten

ALL = [""]  # a part of every name


def main() -> int:
    given = _parse_arguments()
    reached: set[str] = set()
    errors: list[str] = []
    for target in given.target:
        recording = _recorded(target)
        launches = [
            one for one in recording.launches if any(name in one.name for name in given.only)
        ]
        reached |= {one.name for one in launches}
        with _processes(given.jobs) as pool:
            results = [pool.submit(compile_launch, one, target) for one in launches]
        uses: list[tuple[str, Uses]] = []
        for launch, result in zip(launches, results, strict=True):
            told = f"{launch.name} {target} {launch.chosen}"
            allowed = SPILLS.get(launch.name.removeprefix("minisgl.kernels."), {})
            most = allowed.get(target, 0)
            # Where the compiler ended its process, that is the error of the kernels after it, too.
            if error := result.exception():
                errors.append(f"{told}: {type(error).__name__}: {error}")
                continue
            spilled, early, used = result.result()
            uses.append((launch.name, used))
            if spilled > most:
                errors.append(f"{told}: spills {spilled} bytes, and SPILLS allows {most}")
            if early:
                errors.append(f"{told}: writes {early} registers that tensor cores may still read")
        if len(uses) == len(recording.launches):
            errors += [f"{target}: {error}" for error in broken(recording.order, uses)]
        print(f"{target}: {len(launches)} compiled", flush=True)
    if given.only == ALL and set(given.target) == set(DEVICES):
        unreached = kernels_of() - reached
        errors += [f"{name}: not reached; SERVED of recorded_launches.py" for name in unreached]
    print("\n".join(sorted(errors)) or "All compile.")
    return int(bool(errors))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=ALL, metavar="NAME", help="parts of names")
    parser.add_argument("--target", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args()


def _recorded(target: str) -> Recording:
    """The launches on a target, from a process of their own, which pretends to have it."""
    with _processes(1) as process:
        return process.submit(record, DEVICES[target]).result()


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("fork"))


def compile_launch(launch: Launch, target: str) -> tuple[int, int, Uses]:
    """The bytes that it spills, the number of registers that it writes while tensor cores may read
    them, and what it uses. Compiles anew, since a cached result has no log."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    gpu = GPUTarget("cuda", DEVICES[target].arch, 32)
    log = io.StringIO()
    with (
        TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        asm = triton.compile(source, target=gpu, options=launch.options).asm
    return spilled_bytes(log.getvalue()), len(overwritten(asm["ptx"])), uses_of(asm["ttir"])


if __name__ == "__main__":
    sys.exit(main())
