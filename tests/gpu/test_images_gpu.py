"""Requests with images on a GPU, against transformers on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.image_cases import (
    GEMMA_3,
    GEMMA_4,
    GLMS,
    LLAVA,
    QWEN,
    QWEN_3_VL,
    check,
    lined_picture,
    tower_of,
)

from minisgl.device.copy_lanes import copy_lane
from minisgl.device.lanes import Lanes
from minisgl.images.levels import numbers_of
from minisgl.models import lfm2
from minisgl.models.towers.repeated import Inputs, RepeatedTower
from minisgl.models.towers.tower import pixels_of

pytestmark = pytest.mark.gpu

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 4}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"max_prefill_length": 17, "page_size": 4},
        {"num_pages": 28, "page_size": 4, "schedule_conservativeness": 0.02},  # so few: retracted
        {"speculative": "ngram"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "architecture", [LLAVA, QWEN, QWEN_3_VL, *GLMS, GEMMA_3, GEMMA_4, lfm2.WITH_TOWER]
)
def test_tokens_equal_those_of_transformers(architecture: str, options: dict[str, Any]) -> None:
    """Batches over 4 run without graphs."""
    check(architecture, **ON_GPU | options)


@pytest.mark.parametrize("architecture", [LLAVA, QWEN])
def test_images_come_back_from_host_memory(architecture: str) -> None:
    options = {"num_pages": 28, "page_size": 4, "host_cache": 0.01}
    found, _ = check(architecture, alone=True, times=2, **ON_GPU | options)
    assert sum(request.num_cached_tokens for request in found)


def test_levels_stand_for_the_same_numbers_on_any_device() -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (1000, 3 * 256), dtype=np.uint8)
    table = rng.standard_normal((2, 3, 256)).astype(np.float32)
    found = pixels_of(torch.from_numpy(levels).cuda(), torch.from_numpy(table).cuda())
    assert torch.equal(found.cpu(), torch.from_numpy(numbers_of(levels, table)))


@pytest.mark.parametrize("architecture", [QWEN, QWEN_3_VL])
def test_images_of_a_shape_that_comes_again_are_captured(architecture: str) -> None:
    tower, lanes = tower_of(architecture, "cuda"), Lanes(torch.device("cuda"))
    lane, pool = copy_lane(lanes, priority=0), lanes.graph_pool()
    captured: list[int] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        replay = lanes.capture_here(work, pool)
        captured.append(1)
        return replay

    repeated, found = RepeatedTower(tower, capture), list[torch.Tensor]()
    # Of 6 seeds each has another shape, and 6 later comes the same again with other pixels.
    images = [lined_picture(tower.module.config, seed).inputs for seed in (0, 1, 6, 12, 7, 0, 13)]

    def encode(image: Inputs) -> None:
        found.append(repeated.rows(image).clone())

    for image in images:
        lane.queue(partial(encode, image), []).wait()
    assert len(captured) == 2
    for image, rows in zip(images, found, strict=True):
        torch.testing.assert_close(rows, tower.rows(image), rtol=1e-4, atol=1e-4)
