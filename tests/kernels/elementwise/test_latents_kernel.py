"""The kernel that norms, rotates and stores latents against its reference, in Triton's interpreter
where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.latent_cases import LATENTS, Latents, check_store_latents

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("latents", LATENTS, ids=str)
def test_rows_are_those_of_the_reference(latents: Latents, dtype: torch.dtype, fp8: bool) -> None:
    check_store_latents(5, latents, dtype, DEVICE, fp8=fp8)


def test_no_rows() -> None:
    check_store_latents(0, LATENTS[0], torch.float32, DEVICE, fp8=False)
