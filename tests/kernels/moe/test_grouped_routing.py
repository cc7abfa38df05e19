"""The choice of experts among groups: the Triton kernel against the reference, in Triton's
interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.grouped_cases import ROUTINGS, check_experts_of, check_grouped

from minisgl.kernels.moe.grouped import ByScores, GroupRouting
from minisgl.kernels.moe.grouped_kernel import choose_grouped

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "routing"), ROUTINGS, ids=str)
def test_the_choice_is_that_of_the_reference(
    num_experts: int, routing: GroupRouting, dtype: torch.dtype, has_bias: bool
) -> None:
    check_grouped(9, num_experts, routing, dtype, DEVICE, has_bias=has_bias)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "routing"), ROUTINGS[3:], ids=str)
def test_few_rows_choose_as_many_do(
    num_experts: int, routing: GroupRouting, dtype: torch.dtype, has_bias: bool
) -> None:
    check_experts_of(3, num_experts, routing, dtype, DEVICE, has_bias=has_bias)


def test_no_rows() -> None:
    [(num_experts, routing), *_] = ROUTINGS
    check_grouped(0, num_experts, routing, torch.float32, DEVICE, has_bias=False)


def test_of_equals_the_lower_comes_first_and_nan_chooses_experts_that_exist() -> None:
    routing = GroupRouting(3, normalize=True, sigmoid=True, num_groups=4, num_kept=2)
    logits = torch.zeros(2, 12, device=DEVICE)
    logits[1] = torch.nan
    chosen, weights = choose_grouped(ByScores(logits, routing))
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights[0].cpu(), torch.full((3,), 1 / 3))
    assert weights[1].isnan().all()
