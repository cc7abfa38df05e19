"""Towers that are filled from the files of a whole model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.image_cases import QWEN, image_case, tower_in, tower_of
from support.quantized import edit_tensors

from minisgl.errors import CheckpointError

Written = Callable[[str], Path]


@pytest.fixture
def with_tensor(tmp_path: Path) -> Written:
    """A checkpoint with one tensor more than the model takes."""

    def write(name: str) -> Path:
        folder = shutil.copytree(image_case(QWEN).folder, tmp_path / "copy")
        edit_tensors(folder, lambda tensors: tensors.update({name: torch.randn(64, 128)}))
        return folder

    return write


@pytest.mark.parametrize("drafter", ["mtp.fc.weight", "mtp.layers.0.mlp.gate_proj.weight"])
def test_layers_that_draft_are_left_out(drafter: str, with_tensor: Written) -> None:
    """Official checkpoints of Qwen3.5 to 3.8 have them beside the tower."""
    weights = tower_in(with_tensor(drafter)).module.state_dict()
    wanted = tower_of(QWEN).module.state_dict()
    assert weights.keys() == wanted.keys() and wanted
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights.items())


def test_others_that_the_tower_does_not_take_are_refused(with_tensor: Written) -> None:
    with pytest.raises(CheckpointError, match=r"does not take: model\.visual\.more\.weight"):
        tower_in(with_tensor("model.visual.more.weight"))
