"""Launch options of the Triton kernels, and the rule by which their launches may overlap.

With programmatic dependent launch (CUDA Programming Guide, chapter of that name; Hopper and later)
a kernel starts while the previous one in the stream still runs, and waits inside. Our kernels
follow four rules:

1. Before `gdc_wait` a kernel writes nothing, and reads only what was written before the last *late*
   launch in front of it: weights, the rotary table, a step's positions and slot mapping.
2. After `gdc_wait` everything that earlier kernels of the stream wrote is visible, and what they
   read may be overwritten. At least one program of each kernel waits.
3. A launch is late unless it says otherwise: `gdc_launch_dependents` comes after `gdc_wait`. When
   the next kernel starts, the programs of this one are past their wait and the launch before it is
   complete: what was written two launches earlier may be read before the wait.
4. An *early* launch lets the next one start with its first instruction. Then loads of weights for
   several kernels are in flight at once, if their programs find room. The order holds: what follows
   an early launch waits for it to end, and so for what it has waited for itself. Early are the
   shrink of adapters, and with few rows the dense GEMMs and decode attention. Kernels that read
   before their wait what two launches before them wrote, as the second ones of experts of few rows
   do, are launched behind a late one.

scripts/tools/launch_order.py finds what breaks the first rule in any step of the models that
recorded_launches.py serves, without a GPU.

Functions that launch kernels take `pdl`: whether their launches overlap, where the device can.

The same must hold for other libraries' kernels. One launched without the attribute starts when all
earlier work is complete, and so does one after a copy; one that triggers before it waits would
break rule 1 unseen.
"""

from __future__ import annotations

from functools import cache

import torch

from minisgl.kernels.hardware import ComputeCapability, kernels_have_run
from minisgl.kernels.tuning import DeviceTuning

EARLY = 2  # a value of `pdl` that kernels are compiled for, beside False and True


@cache
def pdl_options(device: torch.device, wanted: bool, *, early: bool = False) -> dict[str, int]:
    """The launch arguments that let the launch overlap if `wanted`, possible, and tried on GPUs of
    this generation. early: the next launch may start before this one waits, if the kernel has
    `let_next_start` in its first line.

    Triton's interpreter does not accept `launch_pdl`, so it is absent unless True.
    """
    if wanted and device.type == "cuda" and _may_overlap(torch.cuda.get_device_capability(device)):
        return {"pdl": EARLY if early else True, "launch_pdl": True}
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
