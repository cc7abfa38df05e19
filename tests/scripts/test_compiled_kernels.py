"""What is known of compiled kernels without Triton: their names, what they spill, and the GPU that
is pretended while they are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretended_gpu import GPU, MetaAsGPU, PretendedLanes
from spilled_kernels import SPILLS, kernels_of, spilled_bytes
from unfinished_products import overwritten


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


def test_what_may_spill_is_a_kernel_of_the_package() -> None:
    assert {f"minisgl.kernels.{kernel}" for kernel in SPILLS} <= kernels_of()


_STEP = """
$L__BB0_1:
	ld.shared.b32 %r1, [%r9];
	{{ mul.bf16x2 %r2, %r1, %r8; }}
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1,%f2}}, {{%r2,%r2}}, %rd1, 1, 1, 1;
	wgmma.commit_group.sync.aligned;
	{after}
	@%p1 bra $L__BB0_1;
"""


@pytest.mark.parametrize(
    ("after", "early"),
    [
        ("st.shared.b32 [%r2], %r8;", {"%r2"}),
        ("wgmma.wait_group.sync.aligned 1;", {"%r2"}),
        ("wgmma.wait_group.sync.aligned 0;", set()),
        ("mov.b32 {%r7, %r2}, %rd2; wgmma.wait_group.sync.aligned 0;", {"%r2"}),
    ],
)
def test_what_tensor_cores_may_still_read_is_not_written(after: str, early: set[str]) -> None:
    assert overwritten(_STEP.format(after=after)) == early


def test_registers_may_be_written_when_the_product_that_reads_them_is_waited_for() -> None:
    halves = [
        line.replace("%r2", f"%r{2 + half}")
        for half in range(2)
        for line in _STEP.format(after="wgmma.wait_group.sync.aligned 1;").splitlines()[2:-1]
    ]
    lines = ["$L__BB0_1:", *halves, "bra.uni $L__BB0_1;"]
    assert overwritten("\n".join(lines)) == set()
    assert overwritten("\n".join(lines).replace("aligned 1;", "aligned 2;")) == {"%r2", "%r3"}


# -- the kernels of the package --------------------------------------------------------------------

_KERNELS = """
import triton
from package.helpers import added

@triton.jit
def helper(x):
    return x

@triton.jit(do_not_specialize=["x"])
def one(x):
    '''Not two(x).'''
    helper(added(x))

@triton.jit
def two(x):
    helper(x)

def launch(x):
    one[(1,)](x)
    two[(1,)](x)
"""
_HELPERS = """
import triton

@triton.jit
def added(x):
    return twice(x)

@triton.jit
def twice(x):
    return x

@triton.jit
def helper(x):
    return x
"""


def test_kernels_are_what_no_other_compiled_function_calls(tmp_path: Path) -> None:
    """A function of another module is called only where it is imported."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernels.py").write_text(_KERNELS)
    (package / "helpers.py").write_text(_HELPERS)
    names = ("kernels.one", "kernels.two", "helpers.helper")
    assert kernels_of(package) == {f"package.{name}" for name in names}


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
