"""The experts' kernels where each rank has some of the experts: on a GPU if there is one, or else
in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.rank_expert_cases import (
    FORMATS,
    check_choose_of,
    check_parts,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8_TOLERANCE = 1e-2  # rounding of the inputs may fall either way


# What is dropped is not written, and no product reads it.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("num_rows", [1, 3, 24])
@pytest.mark.parametrize("name", FORMATS)
def test_the_parts_of_all_ranks_add_up_to_the_whole(name: str, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    tolerance = FP8_TOLERANCE if name.startswith("fp8") else 1e-4
    check_parts(FORMATS[name](DEVICE), num_rows, device=DEVICE, tolerance=tolerance)


def test_a_rank_chooses_its_own_experts() -> None:
    check_choose_of(9, device=DEVICE)
