"""The choice of kernels: Triton where it runs, plain torch everywhere else."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernels import dispatch
from minisgl.kernels.elementwise import reference
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.residual import Residual, norm
from minisgl.layers.norm import RMSNorm

GPU = torch.device("cuda", 0)
FAKE = dispatch.Kernels(*[lambda *args: torch.empty(0)] * len(dispatch.Kernels._fields))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which Triton runs, as far as the choice of kernels can see."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "triton_kernels", lambda: FAKE)
    monkeypatch.setattr(dispatch, "_start_triton", lambda: None)


def kernels_for(device: torch.device) -> dispatch.Kernels:
    """Chosen anew: nothing is remembered from one test to the next."""
    return dispatch._kernels_for.__wrapped__(device)


def test_a_cpu_uses_the_torch_reference_kernels() -> None:
    assert kernels_for(torch.device("cpu")) is dispatch.REFERENCE


@pytest.mark.usefixtures("hopper")
def test_a_gpu_uses_the_triton_kernels() -> None:
    assert kernels_for(GPU) is FAKE


@pytest.mark.usefixtures("hopper")
def test_an_old_gpu_uses_the_torch_reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernels_for(GPU) is dispatch.REFERENCE


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("part", ["triton_kernels", "_start_triton"])
def test_a_triton_that_fails_to_import_falls_back_to_torch(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(dispatch, part, fail)
    with caplog.at_level(logging.WARNING):
        assert kernels_for(GPU) is dispatch.REFERENCE
    assert "no C compiler" in caplog.text


def test_a_missing_triton_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels_for(GPU) is dispatch.REFERENCE


def test_add_rms_norm_equals_add_then_rms_norm() -> None:
    """To the bit, whether something is still to be added or not."""
    rows, delta = torch.randn(2, 3, 64).bfloat16()
    weights, weight = RMSNorm(64, 1e-6, torch.bfloat16), torch.randn(32, 64).bfloat16()
    weights.weight.normal_()
    product = DenseProduct(weight)
    for residual, total in [(Residual(rows), rows), (Residual(rows, delta), rows + delta)]:
        normed = reference.rms_norm(total, weights.weight, 1e-6)
        out, after = product.of_norm(residual, weights)
        assert torch.equal(out, F.linear(normed, weight)) and torch.equal(after, total)
        kept, out, after = product.of_kept_norm(residual, weights)
        assert torch.equal(out, F.linear(normed, weight)) and torch.equal(after, total)
        assert torch.equal(kept, normed)
        out, after = product.gated_mul_of_norm(residual, weights, product)
        expected = reference.gated_mul(F.linear(normed, weight))
        assert torch.equal(out, expected) and torch.equal(after, total)
        out, after = norm(residual, weights)
        assert torch.equal(out, normed) and torch.equal(after, total)
    added = DenseProduct(torch.ones(64, 64).bfloat16()).add_to(rows, rows)
    assert added.rows is rows and added.delta is not None and added.squares is None
