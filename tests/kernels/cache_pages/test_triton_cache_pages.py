"""The kernel that gathers and scatters pages, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.page_cases import CASES, CPU, check_round_trip, planes_of

from minisgl.kernels.cache_pages import page_copies

DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_moves_pages_bit_by_bit(
    case: tuple[torch.dtype, int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copies, "runs_triton", lambda device: True)
    check_round_trip(DEVICE, planes_of(*case))
