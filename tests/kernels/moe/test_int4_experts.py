"""The kernels for experts in INT4 at awkward sizes: on a GPU if there is one, or else in the
interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.int4_expert_cases import check, random_experts

from minisgl.kernels.moe import select_experts
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.reference import ByRouter, Routing

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("groups", [(128, 64), (64, 32), (32, 64)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_fused_experts_match_the_reference(symmetric: bool, groups: tuple[int, int]) -> None:
    dtype = torch.float32 if symmetric else torch.float16
    check(3, 4, 2, 128, 64, groups, symmetric=symmetric, dtype=dtype, device=DEVICE, pdl=False)


def test_experts_with_gelu_and_scales_match_the_reference() -> None:
    how = {"symmetric": True, "dtype": torch.float32, "device": DEVICE, "pdl": False}
    check(3, 4, 2, 128, 64, (64, 32), **how, gelu=True)


def test_a_nan_row_harms_no_other_row() -> None:
    experts = random_experts(4, 64, 64, (64, 64), symmetric=False, device=DEVICE)
    routing = Routing(2, normalize=True)
    x, logits = torch.randn(3, 64, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    clean, _ = fused_experts(x, ByRouter(logits, routing), experts, pdl=False)
    x[1, 40], logits[2] = torch.nan, torch.nan
    out, _ = fused_experts(x, ByRouter(logits, routing), experts, pdl=False)
    assert torch.equal(out[0], clean[0]) and bool(out[1:].isnan().all())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_kernels_are_selected_where_they_run(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and added to the stream."""
    monkeypatch.setattr(select_experts, "runs_triton", lambda device: on_gpu)
    monkeypatch.setattr(select_experts, "_fused", lambda experts, x, choice, rows, to=None: (x, to))
    experts = random_experts(4, 64, 64, (64, 64), symmetric=True, device=DEVICE)
    x, logits = torch.randn(2, 64, device=DEVICE), torch.randn(2, 4, device=DEVICE)
    choice = ByRouter(logits, Routing(2, normalize=True))
    assert (select_experts.weighted_sum(experts, x, choice) is x) == on_gpu
    stream = select_experts.add_weighted_sum(experts, x, choice, x.clone())
    assert (stream.delta is None) == on_gpu


def test_no_rows() -> None:
    experts = random_experts(4, 64, 64, (64, 64), symmetric=True, device=DEVICE)
    x, logits = torch.randn(0, 64, device=DEVICE), torch.randn(0, 4, device=DEVICE)
    out, _ = fused_experts(x, ByRouter(logits, Routing(2, normalize=True)), experts, pdl=False)
    assert out.shape == (0, 64)
