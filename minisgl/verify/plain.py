"""The weights of a quantised checkpoint as plain matrices.

Written from the layouts of the formats alone, and in a few lines: it shares no code with the
loader, which it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minisgl.models.config_reader import CONFIG_FILE, quantization_fields, read_json
from minisgl.models.hub import safetensors_files

_BLOCK = 128
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight columns
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits, after the sign
_PARTS = frozenset(  # of a matrix, beside that which stands for it
    """weight_scale weight_scale_inv weight_shape weight_zero_point weight_g_idx input_scale
    weight_scale_2 weight_global_scale input_global_scale activation_scale qzeros scales g_idx
    k_scale v_scale output_scale""".split()
)


def plain_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their names, matrices in `dtype`."""
    stored: dict[str, Tensor] = {}
    for file in safetensors_files(folder):
        with safe_open(file, framework="pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    plain: dict[str, Tensor] = {}
    config = quantization_fields(read_json(folder / CONFIG_FILE))
    first_zero = 1 if config is None or "gptq_v2" not in config.values.values() else 0
    for name in [*stored]:
        path, _, kind = name.rpartition(".")
        if kind in _PARTS:
            continue
        tensor, its = stored[name], {part: stored.get(f"{path}.{part}") for part in _PARTS}
        if tensor.dtype == torch.uint8 and kind in ("weight", "weight_packed"):
            name, tensor = f"{path}.weight", _nvfp4(tensor, its)
        elif kind == "weight_packed":
            name, tensor = f"{path}.weight", _packed(tensor, its)
        elif kind == "qweight":
            name, tensor = f"{path}.weight", _transposed(tensor, its, first_zero)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.int8):
            tensor = _of_bytes(tensor, its)
        plain[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return plain


def _of_bytes(weight: Tensor, its: dict[str, Any]) -> Tensor:
    """FP8 and INT8: scales of blocks, of rows or of all."""
    n, k = weight.shape
    scale: Tensor = its["weight_scale_inv"] if its["weight_scale"] is None else its["weight_scale"]
    if scale.element_size() == 1:  # of MXFP8: the exponent of each 32 columns
        exponent = _spread(scale.view(torch.uint8).float() - 127, 32)
        return weight.float() * torch.exp2(exponent[:, :k])
    scale = scale.float()
    if scale.numel() == n and k > _BLOCK:
        scale = scale.view(n, 1)
    elif scale.dim() == 2:
        scale = scale.repeat_interleave(_BLOCK, 0)[:n].repeat_interleave(_BLOCK, 1)[:, :k]
    return weight.float() * scale


def _nvfp4(weight: Tensor, its: dict[str, Any]) -> Tensor:
    """Two columns in a byte; 16 share a scale, and all one that multiplies, or divides."""
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1).long()
    numbers = torch.tensor(_E2M1)[codes & 7] * (1 - 2 * (codes >> 3))
    factor, divisor = its["weight_scale_2"], its["weight_global_scale"]
    scale = its["weight_scale"].float() * (1 / divisor if factor is None else factor)
    return numbers * _spread(scale, 16)


def _packed(weight: Tensor, its: dict[str, Any]) -> Tensor:
    """Of compressed-tensors: eight columns in an integer; zero points of eight rows in one."""
    numbers = _nibbles(weight, _IN_ORDER)
    scale, zero = its["weight_scale"].float(), its["weight_zero_point"]
    group = numbers.shape[1] // scale.shape[1]
    zeros = 8 if zero is None else _spread(_nibbles(zero.T, _IN_ORDER).T[: len(scale)], group)
    return (numbers - zeros) * _spread(scale, group)


def _transposed(weight: Tensor, its: dict[str, Any], first_zero: int) -> Tensor:
    """Of AWQ, eight outputs in an integer, or GPTQ, eight inputs."""
    scale, zero = its["scales"].float(), its["qzeros"]
    if weight.shape[1] == scale.shape[1]:
        numbers = _nibbles(weight.T, _IN_ORDER)
        zeros = _nibbles(zero, _IN_ORDER).T + first_zero
    else:
        numbers, zeros = _nibbles(weight, _AWQ_ORDER).T, _nibbles(zero, _AWQ_ORDER).T
    group = numbers.shape[1] // scale.shape[0]
    return (numbers - _spread(zeros, group)) * _spread(scale.T, group)


def _nibbles(packed: Tensor, order: Sequence[int]) -> Tensor:
    """[rows, columns] integers as [rows, 8 columns]."""
    return torch.stack([(packed >> 4 * place) & 15 for place in order], -1).flatten(1)


def _spread(values: Tensor, group: int) -> Tensor:
    """[rows, groups] as [rows, columns]."""
    return values.repeat_interleave(group, 1)
