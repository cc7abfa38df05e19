"""The kernels around attention over latents against their references, in Triton's interpreter where
there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.latent_cases import (
    LATENTS,
    Latents,
    check_store_latents,
    check_values_of_latents,
)

from minisgl.kernels.tuning import H200, LatentMapTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Small, so that a head's map has several blocks and tiles, and filled by none of the small sizes.
TILES = LatentMapTiles(to_latents=16, nope_k=16, to_values=16, rank_k=16)
SEPARATE = H200.latent_map_rows + 1  # rows that the kernels do not map


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("latents", LATENTS, ids=str)
def test_rows_are_those_of_the_reference(latents: Latents, dtype: torch.dtype, fp8: bool) -> None:
    check_store_latents(5, latents, dtype, DEVICE, fp8=fp8)


@pytest.mark.parametrize("num_rows", [1, 17, SEPARATE])
@pytest.mark.parametrize("tiles", [TILES, None], ids=["small", ""])
@pytest.mark.parametrize("latents", LATENTS[:2], ids=str)
def test_any_number_of_rows(latents: Latents, num_rows: int, tiles: LatentMapTiles | None) -> None:
    check_store_latents(num_rows, latents, torch.bfloat16, DEVICE, fp8=False, tiles=tiles)
    check_values_of_latents(num_rows, latents, torch.bfloat16, DEVICE, tiles=tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("latents", LATENTS, ids=str)
def test_values_are_those_of_the_reference(latents: Latents, dtype: torch.dtype) -> None:
    check_values_of_latents(5, latents, dtype, DEVICE)


def test_no_rows() -> None:
    check_store_latents(0, LATENTS[0], torch.float32, DEVICE, fp8=False)
    check_values_of_latents(0, LATENTS[0], torch.float32, DEVICE)
