"""MXFP4 as gpt-oss's checkpoints have it, packed by the published layout (OCP microscaling formats
v1.0; `*_blocks` [experts, rows, groups, 16] and `*_scales`), and without minisgl's own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# By all four bits.
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks and scales of a matrix [..., n, k], and the numbers that they stand for."""
    blocks = matrix.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1)
    exponent = torch.floor(torch.log2(largest.clamp(min=1e-30))) - 2
    scale = torch.exp2(exponent)[..., None]
    codes = ((blocks / scale)[..., None] - NUMBERS).abs().argmin(-1)
    values = (NUMBERS[codes] * scale).flatten(-2)
    low, high = codes[..., 0::2], codes[..., 1::2]
    return (low | high << 4).to(torch.uint8), (exponent + 127).to(torch.uint8), values


def quantised(folder: Path, exact: Path, target: Path) -> None:
    """Of a gpt-oss checkpoint in `folder` make one with experts in MXFP4 in `target`, and one with
    what these stand for in `exact`."""
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    rounded, stored = dict(weights), dict(weights)
    for name in weights:
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, values = packed(stored.pop(name).mT)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            rounded[name] = values.mT.contiguous()
    config = json.loads((folder / "config.json").read_text())
    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    for place, tensors, more in (
        (exact, rounded, {}),
        (target, stored, {"quantization_config": scheme}),
    ):
        shutil.copytree(folder, place)
        (place / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, place / file.name, {"format": "pt"})
