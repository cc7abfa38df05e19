"""Levels stand for exactly the numbers that the processor of a checkpoint makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.image_checkpoints import (
    colourful,
    family_named,
    make_image_checkpoint,
    reference_processor,
)

from minisgl.images import checkpoint
from minisgl.images.checkpoint import CheckpointProcessor
from minisgl.images.levels import LEVELS, PIXELS, TABLE, LevelProcessor, numbers_of
from minisgl.models.towers.tower import pixels_of

BY_LINES = ("qwen3_5", "qwen2_5_vl")


@pytest.fixture(scope="module", params=BY_LINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(family_named(name), tmp_path_factory.mktemp("see") / "model")


@pytest.mark.parametrize("size", [(64, 64), (200, 90), (31, 300)], ids=str)
def test_they_become_the_numbers_of_transformers(
    folder: Path, name: str, size: tuple[int, int]
) -> None:
    image = colourful(*size)
    reference = reference_processor(folder, family_named(name))
    text = reference.image_token
    wanted = reference(images=[image], text=[text], return_tensors="np")
    made = CheckpointProcessor(folder).process(image)
    assert made.token_ids == wanted["input_ids"].ravel().tolist() and made.is_row.all()
    assert made.inputs.keys() == {LEVELS, TABLE, "image_grid_thw"}
    np.testing.assert_array_equal(made.inputs["image_grid_thw"], wanted["image_grid_thw"])
    levels, table = made.inputs[LEVELS], made.inputs[TABLE]
    assert levels.dtype == np.uint8 and 8 * levels.nbytes == wanted[PIXELS].nbytes
    np.testing.assert_array_equal(numbers_of(levels, table), wanted[PIXELS])
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.from_numpy(levels), torch.from_numpy(table).to(dtype)
        assert torch.equal(pixels_of(*given), torch.from_numpy(wanted[PIXELS]).to(dtype))


def _blurred(ids: list[int], inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Numbers that depend on others beside their level."""
    return ids, {**inputs, PIXELS: inputs[PIXELS] + np.roll(inputs[PIXELS], 1, axis=0)}


def _broken(ids: list[int], inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """A token behind each line of rows."""
    return [*ids, ids[0] + 1], inputs


def _with_more(ids: list[int], inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    return ids, {**inputs, "another": inputs[PIXELS]}


def _in_tiles(ids: list[int], inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    return ids, {**inputs, PIXELS: inputs[PIXELS][None]}


def _failing(ids: list[int], inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    raise TypeError("do_resize is no option")


@pytest.mark.parametrize("change", [_blurred, _broken, _with_more, _in_tiles, _failing])
def test_a_processor_that_makes_something_else_makes_numbers(
    folder: Path, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are then what the tower gets."""
    real = LevelProcessor.of

    def changed(images: Any, row_id: int, run: Callable[..., Any]) -> LevelProcessor | None:
        return real(images, row_id, lambda image, **options: change(*run(image, **options)))

    monkeypatch.setattr(checkpoint.LevelProcessor, "of", changed)
    made = CheckpointProcessor(folder).process(colourful(64, 64))
    assert made.inputs.keys() == {PIXELS, "image_grid_thw"}
