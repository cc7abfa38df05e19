"""Towers whose images of one shape are captured: the rows of each image are those of the tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.image_cases import GLMS, QWEN, QWEN_3_VL, lined_picture, tower_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.images.levels import LEVELS, PIXELS, TABLE
from minisgl.models.towers import repeated, tower
from minisgl.models.towers.repeated import Inputs, RepeatedTower
from minisgl.models.towers.tower import Tower

NUM_SHAPES = 6  # of lined_picture, by its seed


def inputs_of(made: Tower, seed: int) -> Inputs:
    return lined_picture(made.module.config, seed).inputs


def in_levels(made: Tower, seed: int) -> Inputs:
    """The same shapes, with levels in the place of pixels."""
    inputs = dict(inputs_of(made, seed))
    num_patches, size = inputs.pop(PIXELS).shape
    rng = np.random.default_rng(seed)
    num_frames = made.config.temporal_patch_size
    inputs[LEVELS] = rng.integers(0, 256, (num_patches, size // num_frames), dtype=np.uint8)
    inputs[TABLE] = rng.standard_normal((num_frames, 3, 256)).astype(np.float32)
    return inputs


class Recorder:
    """Captures, as a CPU can: what it returns runs the work again."""

    def __init__(self) -> None:
        self.num_captured = self.num_replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


@pytest.mark.parametrize("architecture", [QWEN, QWEN_3_VL])
@pytest.mark.parametrize("made_of", [inputs_of, in_levels])
def test_the_second_image_of_a_shape_is_captured_and_later_ones_are_replays(
    architecture: str,
    made_of: Callable[[Tower, int], Inputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, recorder = tower_of(architecture), Recorder()
    found = RepeatedTower(made, recorder)
    assert made.repeats
    grids: list[Any] = []
    derive = tower.derive
    images = [made_of(made, seed) for seed in (0, 1, NUM_SHAPES, 2 * NUM_SHAPES, 1, 0)]
    wanted = [made.rows(each) for each in images]

    def noting(visual: Any, grid: Any, device: torch.device) -> dict[str, Tensor]:
        grids.append(grid.tolist())
        return derive(visual, grid, device)

    monkeypatch.setattr(tower, "derive", noting)
    assert all(
        torch.equal(found.rows(image), rows) for image, rows in zip(images, wanted, strict=True)
    )
    assert (recorder.num_captured, recorder.num_replays) == (2, 4)
    assert len(grids) == 4, "what depends on the shape alone is derived again"


def test_few_shapes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "MOST_SHAPES", 1)
    monkeypatch.setattr(repeated, "MOST_SEEN", 2)
    made, recorder = tower_of(QWEN), Recorder()
    found = RepeatedTower(made, recorder)
    for seed in (0, 1, 2, 0, 2, 0, 1, 2):  # by the second 0, the first is forgotten
        assert torch.equal(found.rows(inputs_of(made, seed)), made.rows(inputs_of(made, seed)))
    assert (recorder.num_captured, recorder.num_replays) == (1, 2)


def test_a_tower_that_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    made, tried = tower_of(QWEN), list[int]()

    def failing(work: Callable[[], None]) -> Callable[[], None]:
        tried.append(1)
        raise RuntimeError("out of luck")

    found = RepeatedTower(made, failing)
    for seed in (0, 0, 0, 1, 1):
        assert torch.equal(found.rows(inputs_of(made, seed)), made.rows(inputs_of(made, seed)))
    assert tried == [1] and "out of luck" in caplog.text


class NoTransfers(TorchDispatchMode):
    """Fails where something goes from one device to another, which a graph would not repeat."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        given = {each.device for each in args if isinstance(each, Tensor)}
        if isinstance(made, Tensor) and given:
            assert made.device in given, f"{function} sends"
        return made


@pytest.mark.parametrize("architecture", [QWEN, QWEN_3_VL])
@pytest.mark.parametrize("made_of", [inputs_of, in_levels])
def test_what_is_captured_sends_nothing(
    architecture: str, made_of: Callable[[Tower, int], Inputs]
) -> None:
    made = tower_of(architecture, "meta")
    inputs = made_of(made, 0)
    given = made.sent(inputs, made.derived(inputs))
    with torch.inference_mode(), NoTransfers():
        assert len(made.compute(given))


@pytest.mark.parametrize("architecture", GLMS)
def test_a_tower_that_sends_its_grid_is_not_captured(architecture: str) -> None:
    made = tower_of(architecture, "meta")
    inputs = inputs_of(made, 0)
    given = made.sent(inputs, made.derived(inputs))
    assert not made.repeats
    with torch.inference_mode(), NoTransfers(), pytest.raises(AssertionError, match="sends"):
        made.compute(given)
