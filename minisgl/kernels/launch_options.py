"""Launch options of the Triton kernels, and the rule by which their launches may overlap.

With programmatic dependent launch (CUDA Programming Guide, chapter of that name; Hopper and later)
a kernel starts while the previous one in the stream still runs, and waits inside. Our kernels
follow three rules:

1. Before `gdc_wait` a kernel writes nothing, and reads only what was written at least two launches
   earlier: weights, the rotary table, a step's positions and slot mapping.
2. After `gdc_wait` everything that earlier kernels of the stream wrote is visible, and what they
   read may be overwritten.
3. `gdc_launch_dependents` comes after `gdc_wait`, never before it. So when the next kernel starts,
   every program of this one is past its wait and the previous kernel is complete, which is why two
   launches are enough in 1. It costs nothing: the next kernel still starts while this one works.

Only the shrink of adapters lets the next kernel start before it waits, so that a GEMM has its W
fetched meanwhile. What follows a shrink reads before its wait only what is older than three
launches. When that wait is over, so is the launch before the shrink, for which the shrink waits.

Functions that launch kernels take `pdl`: whether their launches overlap, where the device can.

The same must hold for other libraries' kernels. One launched without the attribute starts when all
earlier work is complete, and so does one after a copy; one that triggers before it waits would
break rule 1.
"""

from __future__ import annotations

from functools import cache

import torch

from minisgl.kernels.hardware import ComputeCapability, kernels_have_run
from minisgl.kernels.tuning import DeviceTuning


@cache
def pdl_options(device: torch.device, wanted: bool) -> dict[str, bool]:
    """The launch arguments that let the launch overlap if `wanted`, possible, and tried on GPUs of
    this generation.

    Triton's interpreter does not accept `launch_pdl`, so it is absent unless True.
    """
    if wanted and device.type == "cuda" and _may_overlap(torch.cuda.get_device_capability(device)):
        return {"pdl": True, "launch_pdl": True}
    return {"pdl": False}


def _may_overlap(capability: ComputeCapability) -> bool:
    return capability >= (9, 0) and kernels_have_run(capability)


@cache
def compiles_gated_norm(device: torch.device) -> bool:
    """False for compute capability 10, where Triton 3.6 fails to compile the gated stream kernel
    with a norm."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10


def warps_for(num_elements: int, per_thread: int) -> int:
    """The number of warps for a tile of `num_elements` (a power of two), `per_thread` in each
    thread."""
    return min(max(num_elements // (32 * per_thread), 1), 16)


def tile_of_rows(num_rows: int, size: int, tuning: DeviceTuning) -> dict[str, int]:
    """The launch arguments of a kernel whose programs hold whole rows in registers.

    A row is spread over as many threads as 16-byte loads of half precision allow, which shortens
    the reduction; with many rows a thread has twice as much in flight.
    """
    block = 1 << (size - 1).bit_length()
    tile, per_thread = (2048, 16) if num_rows >= tuning.many_rows else (1024, 8)
    rows = max(tile // block, 1)
    return {"block": block, "rows": rows, "num_warps": warps_for(rows * block, per_thread)}
