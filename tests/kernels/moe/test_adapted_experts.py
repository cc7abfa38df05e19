"""Experts with adapters at awkward sizes: on a GPU if there is one, or else in the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support import expert_cases, fp8_expert_cases, int4_expert_cases, mxfp4_expert_cases
from support.adapted_expert_cases import check

from minisgl.config import Activations
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, FLOAT = torch.float16, torch.float32
NUM_EXPERTS = 5
Make = Callable[[int, int, torch.dtype], ExpertsProduct]


def dense(*, clamped: bool = False, gelu: bool = False) -> Make:
    def make(hidden: int, size: int, dtype: torch.dtype) -> ExpertsProduct:
        weights = expert_cases.random_experts(
            NUM_EXPERTS, hidden, size, dtype, DEVICE, clamped=clamped
        )
        return DenseExperts(weights._replace(gelu=gelu))

    return make


def fp8(blocks: fp8_expert_cases.Blocks, activations: Activations) -> Make:
    return lambda hidden, size, dtype: fp8_expert_cases.random_experts(
        NUM_EXPERTS, hidden, size, blocks, activations, DEVICE
    )


KINDS: dict[str, tuple[Make, int, int, torch.dtype, float]] = {
    "dense": (dense(), 40, 72, FLOAT, 1e-5),
    "dense, half": (dense(), 264, 48, HALF, 5e-3),
    "dense, clamped": (dense(clamped=True), 64, 24, FLOAT, 1e-5),
    "dense, gelu": (dense(gelu=True), 48, 40, HALF, 5e-3),
    # The rounding of inputs to FP8 may fall either way.
    "fp8, channels": (fp8(None, Activations.TOKEN), 72, 40, HALF, 2e-2),
    "fp8, static": (fp8(None, Activations.STATIC), 64, 48, FLOAT, 2e-2),
    "fp8, blocks": (fp8(((64, 128), (128, 64)), Activations.GROUP), 160, 64, FLOAT, 2e-2),
    "int4": (
        lambda hidden, size, dtype: int4_expert_cases.random_experts(
            NUM_EXPERTS, hidden, size, (64, 32), symmetric=False, device=DEVICE
        ),
        *(128, 64, FLOAT, 1e-4),
    ),
    "mxfp4": (
        lambda hidden, size, dtype: mxfp4_expert_cases.random_experts(
            NUM_EXPERTS, hidden, size, dtype=dtype, device=DEVICE
        ),
        *(64, 128, FLOAT, 1e-4),
    ),
}


# What is dropped is not written, and no product reads it.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "num_rows", "options"),
    [
        *((kind, 1, {}) for kind in KINDS),
        *((kind, 6, {"drops": True}) for kind in KINDS),
        *((kind, 40, {"as_many": 1000}) for kind in ("dense", "dense, half", "int4")),
    ],
    ids=str,
)
def test_each_pair_gets_what_the_adapter_of_its_row_adds(
    kind: str, num_rows: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(num_rows)
    make, hidden, size, dtype, tolerance = KINDS[kind]
    options |= {"dtype": dtype, "device": DEVICE, "tolerance": tolerance, "pdl": False}
    check(make(hidden, size, dtype), num_rows, NUM_EXPERTS, hidden, size, **options)
