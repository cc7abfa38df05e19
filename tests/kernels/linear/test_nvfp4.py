"""NVFP4 weights as they lie in memory."""

from __future__ import annotations

import pytest
import torch
from support.weight_only_cases import nvfp4_weights

from minisgl.kernels.linear.e2m1 import pack_e2m1, tiled, unpack_e2m1, untiled
from minisgl.kernels.linear.nvfp4 import pack_scales, unpack_scales

CPU = torch.device("cpu")


def test_numbers_come_back_from_either_order() -> None:
    codes = torch.randint(0, 16, (3, 32, 192), dtype=torch.uint8)
    words = pack_e2m1(codes)
    assert words.shape == (3, 32, 48) and words.dtype == torch.int16
    assert torch.equal(unpack_e2m1(words), codes)
    assert torch.equal(untiled(tiled(words)), words)
    assert not torch.equal(tiled(words), words)


def test_every_scale_comes_back() -> None:
    """Subnormal ones and 0, too."""
    scale = torch.arange(128, dtype=torch.uint8)[:-1].view(torch.float8_e4m3fn).float()
    scale = torch.cat((scale, scale[:1])).view(16, 8)
    packed = pack_scales(scale)
    assert packed.shape == (2, 16) and packed.dtype == torch.int32
    assert torch.equal(unpack_scales(packed), scale)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_weights_are_what_they_stand_for(is_tiled: bool) -> None:
    weights, exact = nvfp4_weights(2, 48, 128, device=CPU, is_tiled=is_tiled)
    assert torch.equal(weights.dequantized().double(), exact)
    assert torch.equal(weights.expert(1).dequantized().double(), exact[1])
    rows = weights.expert(0).rows(16, 32)
    assert torch.equal(rows.dequantized().double(), exact[0, 16:])
    bits = sum(tensor.nbytes for tensor in (weights.data, weights.scale)) * 8
    assert bits == 4.5 * exact.numel()
