"""The experts' kernels at awkward sizes: on a GPU if there is one, or else in the interpreter.

bfloat16 is left to tests/gpu, since the interpreter's is not exact.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton")

from expert_cases import check_choose, check_equals, check_mix, check_nan

from minisgl.kernels.experts import Routing

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (60, 4), (5, 5), (128, 8)])
def test_choose(num_experts: int, num_chosen: int, normalize: bool, dtype: torch.dtype) -> None:
    check_choose(
        3, num_experts, Routing(num_chosen, normalize), dtype=dtype, device=DEVICE, pdl=False
    )


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), [(3, 8, 3), (40, 6, 2)])
def test_nan(num_rows: int, num_experts: int, num_chosen: int, normalize: bool) -> None:
    check_nan(num_rows, num_experts, Routing(num_chosen, normalize), device=DEVICE, pdl=False)


def test_of_equals_the_lower_expert_comes_first() -> None:
    check_equals(DEVICE, pdl=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "hidden_size", "size"),
    [(1, 8, 2, 64, 32), (5, 60, 4, 48, 24), (40, 16, 4, 64, 48), (70, 6, 2, 40, 72)],
)
def test_mix(
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    hidden_size: int,
    size: int,
    crowded: bool,
    dtype: torch.dtype,
) -> None:
    check_mix(
        num_rows,
        num_experts,
        num_chosen,
        hidden_size,
        size,
        dtype=dtype,
        device=DEVICE,
        pdl=False,
        crowded=crowded,
    )
