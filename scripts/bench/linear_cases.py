"""What the benchmarks of GEMMs share: shapes, workspaces, and compiling before the clock runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BYTES_PER_S, OPERATIONS_PER_S, NUM_SMS = 4.28e12, 800e12, 132  # of an H200, in bfloat16
ROTATED_BYTES = 320 << 20  # of weights that are used in turn, so that L2 holds none of them
WORKSPACE_FLOATS = 64 << 20
Job = TypeVar("Job")


@dataclass(frozen=True)
class Shape:
    """One product of a model. n counts both halves of a gated one."""

    name: str
    n: int
    k: int
    gated: bool = False

    @property
    def num_outputs(self) -> int:
        return self.n // (2 if self.gated else 1)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def make_workspace() -> LinearWorkspace:
    from minisgl.kernels.linear.tiles import LinearWorkspace

    return LinearWorkspace(
        partials=torch.empty(WORKSPACE_FLOATS, device=DEVICE),
        semaphores=torch.zeros(1 << 20, dtype=torch.int32, device=DEVICE),
    )


def spelled(how: LinearTiles) -> str:
    """Such as 64x16x128 w4 s2 st4 p512."""
    text = f"{how.block_n}x{how.block_m}x{how.block_k} w{how.num_warps}"
    text += f" g{how.groups}" if how.groups > 1 else ""
    if how.burst:
        return text + " burst"
    return text + f" s{how.splits} st{how.num_stages} p{how.prefetch}"


def compile_all(launch: Callable[[Job], object], jobs: Collection[Job]) -> None:
    """Launch each job once, in processes of their own; what these compile stays in Triton's cache.
    Prints those that fail, most likely for too much shared memory."""
    began = time.monotonic()
    with get_context("spawn").Pool(min(len(os.sched_getaffinity(0)), 16)) as pool:
        failures = [text for text in pool.imap_unordered(partial(_attempt, launch), jobs) if text]
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    for failure in failures:
        print("  not:", failure)


def _attempt(launch: Callable[[Job], object], job: Job) -> str:
    """Why a job fails; empty if it does not."""
    try:
        launch(job)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[:100]}"
    return ""
