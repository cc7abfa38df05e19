"""Products of adapted rows whose GEMM adds the delta: the same as its separate steps."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.fp8_cases import weights as fp8_weights
from support.mailboxes import make_mailboxes

from minisgl.config import Activations
from minisgl.kernels.adapters import AdapterWeights, Delta, b_of
from minisgl.kernels.elementwise.reference import rms_norm
from minisgl.kernels.linear.dense_product import DenseProduct, LinearKernels
from minisgl.kernels.linear.dense_tiles import MAX_ROWS, allocate_workspace
from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct, share_kernels
from minisgl.kernels.linear.product import Product
from minisgl.kernels.lora import expand_kernel, reference, shrink_kernel, sort_kernel
from minisgl.kernels.lora.select_kernels import AdapterKernels
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import H200
from minisgl.lora.adding import Adding, AddingDense
from minisgl.lora.adding_fp8 import AddingFp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, SIZE, INNER, RANK = torch.float16, 128, 64, 16
PLAIN = AdapterKernels(
    reference.sort_rows, reference.shrink, reference.shrink_norm, reference.expand
)


def expand(y: Tensor, delta: Delta) -> None:
    assert len(y) > 64, "a GEMM that adds is faster"
    expand_kernel.expand(y, delta)


KERNELS = AdapterKernels(
    sort_kernel.sort_rows, shrink_kernel.shrink, shrink_kernel.shrink_norm, expand
)


def adapters(k: int, *widths: int) -> AdapterWeights:
    """Three, in slots that have other numbers between them, which nothing may read."""
    a_size, b_size = len(widths) * RANK * k, sum(widths) * RANK
    slots = torch.full((3, 48 + a_size + b_size), torch.nan, dtype=HALF, device=DEVICE)
    slots[:, 16:-32] = 0.3 * torch.randn(3, a_size + b_size, device=DEVICE) * RANK**-0.5
    a, b = slots[:, 16 : 16 + a_size], slots[:, 16 + a_size : -32]
    ranks = torch.tensor([RANK, 0, RANK], dtype=torch.int32, device=DEVICE)
    starts = tuple(sum(widths[:part]) for part in range(len(widths)))
    found = AdapterWeights(a.unflatten(1, (len(widths), RANK, k)), b, ranks, starts)
    assert b_of(found, 2, RANK).data_ptr() == b[2].data_ptr()
    return found


def dense(n: int, k: int) -> DenseProduct:
    product = DenseProduct(torch.randn(n, k, device=DEVICE).to(HALF) * k**-0.5)
    workspace = allocate_workspace([(n, k)], MAX_ROWS, DEVICE)
    product.kernels = LinearKernels(H200, workspace, None)
    return product


def fp8(n: int, k: int) -> TensorCoreProduct:
    product = TensorCoreProduct(fp8_weights(n, k, None, DEVICE), activations=Activations.TOKEN)
    share_kernels([product])
    return product


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_rows", [1, 6, 130])
@pytest.mark.parametrize(("make", "adding"), [(dense, AddingDense), (fp8, AddingFp8)])
def test_a_gemm_adds_the_delta_in_each_of_its_epilogues(
    make: type[Product], adding: type[Adding], num_rows: int
) -> None:
    of_rows = torch.arange(1, 1 + num_rows, device=DEVICE).int() % 4
    rows = sort_kernel.sort_rows(of_rows.flip(0).contiguous(), 3)
    bases = make(2 * INNER, SIZE), make(SIZE, INNER)
    slots = adapters(SIZE, INNER, INNER), adapters(INNER, SIZE)
    up, down = (
        adding(base, of, rows, KERNELS)  # type: ignore[arg-type]
        for base, of in zip(bases, slots, strict=True)
    )
    plain_up, plain_down = (
        Adding(base, of, rows, PLAIN)  # type: ignore[arg-type]
        for base, of in zip(bases, slots, strict=True)
    )
    x = torch.randn(num_rows, SIZE, device=DEVICE).to(HALF)
    norm = SimpleNamespace(weight=torch.ones(SIZE, device=DEVICE).to(HALF), eps=1e-6)
    normed = rms_norm(x, norm.weight, norm.eps)
    y = plain_up(normed)
    check(up(normed), y)
    assert (y - bases[0](normed)).abs().max() > 0.1
    squares = x.float().square().unflatten(1, (4, -1)).sum(2)
    for residual in Residual(x.clone()), Residual(x.clone(), squares=squares):
        check(up.of_norm(residual, norm)[0], y)
        kept, found, stream = up.of_kept_norm(residual, norm)
        check(kept, normed)
        check(found, y)
        assert torch.equal(stream, x)
    inner = plain_down.gated_mul(y)
    for residual in Residual(x.clone(), squares=squares), Residual(x.clone()):
        hidden, stream = up.gated_mul_of_norm(residual, norm, down)
        check(hidden, inner)
    check(up.gated_mul_of(normed, down), inner)
    after = down.add_to(inner, stream)
    wanted = x + plain_down(inner)
    check(after.rows if after.delta is None else after.rows + after.delta, wanted)

    boxes = make_mailboxes(2, MAX_ROWS, SIZE, 2, DEVICE)
    sent = [down.send(inner, box) for box in boxes]
    assert (sent[0] is None) == (num_rows > 64)
    if sent[0] is not None:
        _, summed = sent[0](x.clone(), norm.weight, norm.eps)
        check(summed, x + 2 * plain_down(inner))
