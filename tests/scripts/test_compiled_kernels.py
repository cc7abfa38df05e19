"""What is known of compiled kernels without Triton: their names, what they spill, and the GPU that
is pretended while they are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretended_gpu import GPU, MetaAsGPU, PretendedLanes
from spilled_kernels import SPILLS, launched_kernels, may_spill, spilled_bytes


def test_the_spilled_bytes_are_those_of_the_compilers_log() -> None:
    log = """ptxas info    : Compiling entry function 'norm' for 'sm_90a'
ptxas info    : Function properties for norm
    16 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size
"""
    assert spilled_bytes(log) == 24
    for other in ("", log + log):
        with pytest.raises(ValueError, match="one kernel"):
            spilled_bytes(other)


def test_a_kernel_spills_no_more_than_is_listed_for_its_target() -> None:
    (kernel, target), most = next(iter(SPILLS.items()))
    assert may_spill(f"minisgl.kernels.{kernel}", target, most)
    assert not may_spill(f"minisgl.kernels.{kernel}", target, most + 1)
    assert may_spill("minisgl.kernels.other", target, 0)
    assert not may_spill("minisgl.kernels.other", target, 1)


def test_what_may_spill_is_a_kernel_of_the_package() -> None:
    assert {f"minisgl.kernels.{kernel}" for kernel, _ in SPILLS} <= launched_kernels()


# -- the kernels of the package --------------------------------------------------------------------

_KERNELS = """
import triton

@triton.jit
def helper(x):
    return x

@triton.jit(do_not_specialize=["x"])
def shown(x):
    helper(x)

def launch(x):
    shown[(1,)](x)

@triton.jit
def hidden(x):
    helper(x)
"""
_LAUNCH = """
def launch(x):
    from package.kernels import hidden as kernel

    kernel[(1,)](x)
    x.views[0](x)
"""


def test_kernels_are_found_by_their_launches(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernels.py").write_text(_KERNELS)
    assert launched_kernels(package) == {"package.kernels.shown"}
    (package / "launch.py").write_text(_LAUNCH)
    assert launched_kernels(package) == {"package.kernels.shown", "package.kernels.hidden"}


# -- the pretended GPU -----------------------------------------------------------------------------


def test_tensors_of_the_pretended_gpu_say_that_they_are_there() -> None:
    with MetaAsGPU():
        x = torch.empty(4, 8, device=GPU)
        with GPU:
            y = torch.zeros(4, 8)
        moved = torch.ones(4, 8).to(GPU, non_blocking=True)
        assert x.device == y.device == moved.device == (x + y).device == GPU
        assert x.is_cuda and not torch.ones(4).is_cuda
        assert x[2:].data_ptr() == 2 * 8 * 4  # by which Triton knows what is aligned
        with pytest.raises(RuntimeError, match="meta"):
            x.tolist()


def test_pretended_lanes_upload_to_the_pretended_gpu() -> None:
    with MetaAsGPU():
        first, second = PretendedLanes(GPU).upload([[1, 2], [3]])
        assert first.device == second.device == GPU
        assert (len(first), len(second)) == (2, 1)
