"""Gathering and scattering pages: the torch references."""

from __future__ import annotations

import pytest
import torch
from support.page_cases import CASES, CPU, check_round_trip, planes_of

from minisgl.kernels.cache_pages.planes import Planes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_survive_a_round_trip_bit_by_bit(
    case: tuple[torch.dtype, int, tuple[int, ...]],
) -> None:
    check_round_trip(CPU, planes_of(*case))


def test_pages_of_an_odd_number_of_bytes_are_copied_byte_by_byte() -> None:
    planes = [torch.arange(27, dtype=torch.uint8).view(9, 1, 1, 3) for _ in range(2)]
    assert Planes.of(planes).word == torch.uint8
    check_round_trip(CPU, planes)
