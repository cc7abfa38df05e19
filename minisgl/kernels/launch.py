"""How the Triton kernels are launched, and the rule by which their launches may overlap.

With programmatic dependent launch (CUDA Programming Guide, of that name; Hopper and later) a
kernel starts while the one before it in the stream still runs, and waits inside. Our kernels hold
to three things:

1. Before `gdc_wait` a kernel writes nothing, and reads only what was written at least two launches
   earlier: weights, the rotary table, a step's positions and KV indices.
2. After `gdc_wait` all that the stream's earlier kernels wrote is there, and what they read may be
   overwritten.
3. `gdc_launch_dependents` stands behind `gdc_wait`, never before it. So when the next kernel
   starts, every program of this one is past its wait and the kernel before it is complete, which
   is what makes two launches enough in 1. It costs nothing: the next kernel still starts while
   this one works.

The same must hold for kernels that are not ours. One launched without the attribute starts when
all before it is complete, and so does one behind a copy; one that triggers before it waits would
break 1.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def pdl_options(device: torch.device, wanted: bool) -> dict[str, bool]:
    """The arguments that say whether the launch overlaps: it does where wanted and possible.

    Triton's interpreter knows no `launch_pdl`, so it is left out where it would be False.
    """
    if wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"pdl": True, "launch_pdl": True}
    return {"pdl": False}


@cache
def compiles_gated_norm(device: torch.device) -> bool:
    """Of compute capability 10, Triton 3.6 fails to compile the gated stream of linear/launch.py
    with a norm."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10


def warps_for(num_elements: int, per_thread: int) -> int:
    """Warps for a tile (a power of two) of which a thread holds about so many elements."""
    return min(max(num_elements // (32 * per_thread), 1), 16)
