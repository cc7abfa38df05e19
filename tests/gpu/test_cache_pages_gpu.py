"""Pages on a GPU: the kernel, and the lanes that carry them to host memory and back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.page_cases import CASES, check_round_trip, planes_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("case", [*CASES, (torch.bfloat16, 16, (8,) * 32)], ids=str)
def test_the_kernel_moves_pages_bit_by_bit(case: tuple[torch.dtype, int, tuple[int, ...]]) -> None:
    check_round_trip(DEVICE, planes_of(*case))
