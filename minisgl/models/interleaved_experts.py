"""The tensors of experts that a checkpoint has stacked, as gpt-oss has them.

Each of the two maps is one tensor of all experts, [num_experts, inputs, outputs], with a bias
[num_experts, outputs]. The outputs of the first are a gate and an up in turn. Here an expert's
gates come first, as in every mixture of experts, and the rows of a matrix are its outputs. In MXFP4
a map is two tensors, of which each row is an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.errors import CheckpointError
from minisgl.kernels.moe.mxfp4 import (
    BLOCK,
    EXPONENT_BIAS,
    LARGEST_EXPONENT,
    Mxfp4Experts,
    Mxfp4Weights,
    pack_e2m1,
    packed_scales,
)
from minisgl.layers.experts import FusedExperts
from minisgl.models.packing import covering
from minisgl.models.target import Target, copy
from minisgl.shards import Shard, whole


def expert_targets(path: str, module: FusedExperts) -> dict[str, Target]:
    """Where the tensors of `module` go, by their names."""
    experts, hidden, inner, product = module.own, module.hidden, module.inner, module.product
    weights = product.weights
    gate_up = inner.times(2)
    summed = hidden if module.holds_bias else Shard(hidden.size, hidden.size, hidden.size)
    found = {
        "gate_up_proj_bias": Target(
            weights["gate_up_proj_bias"], (experts, gate_up), store=_store_in_turn
        ),
        "down_proj_bias": Target(weights["down_proj_bias"], (experts, summed)),
    }
    if isinstance(product, Mxfp4Experts):
        up_cut, down_cut = (experts, gate_up, hidden), (experts, hidden, inner)
        found |= _mxfp4("gate_up_proj", product.gate_up, up_cut, in_turn=True)
        found |= _mxfp4("down_proj", product.down, down_cut, in_turn=False)
    else:
        found["gate_up_proj"] = Target(
            weights["gate_up_proj"],
            (experts, hidden, gate_up),
            store=lambda weight, part: _store_in_turn(weight, part.mT),
        )
        found["down_proj"] = Target(
            weights["down_proj"],
            (experts, inner, hidden),
            store=lambda weight, part: copy(weight, part.mT),
        )
    return {f"{path}.{kind}": target for kind, target in found.items()}


def _mxfp4(
    name: str, weights: Mxfp4Weights, cut: tuple[Shard, Shard, Shard], *, in_turn: bool
) -> dict[str, Target]:
    """Blocks [num_experts, outputs, blocks of inputs, 16], two numbers in a byte, the lower bits
    first, and their exponents. in_turn: whether the outputs are gates and ups in turn."""
    experts, outputs, inputs = cut
    blocks = covering(inputs, BLOCK)
    store = _store_in_turn if in_turn else copy

    def ordered(part: Tensor) -> Tensor:
        """Of all rows and blocks of the weights, with zeros for those that the checkpoint lacks."""
        rows = part.new_empty((len(part), outputs.size, blocks.size, *part.shape[3:]))
        store(rows, part)
        return rows

    def store_blocks(data: Tensor, part: Tensor) -> None:
        for words, of_expert in zip(data, part.split(1), strict=True):
            [codes] = ordered(of_expert.to(data.device))
            pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
            words.copy_(pack_e2m1(pairs.flatten(1)))

    def store_exponents(scale: Tensor, part: Tensor) -> None:
        if part.numel() and int(part.max()) > EXPONENT_BIAS + LARGEST_EXPONENT:
            raise CheckpointError(
                f"holds scales that are no numbers, or larger than 2 ** {LARGEST_EXPONENT}"
            )
        scale.copy_(packed_scales(ordered(part.to(scale.device))))

    bytes_of = whole(BLOCK // 2)
    return {
        f"{name}_blocks": Target(
            weights.data, (experts, outputs, blocks, bytes_of), ("U8",), store_blocks
        ),
        f"{name}_scales": Target(
            weights.scale, (experts, outputs, blocks), ("U8",), store_exponents
        ),
    }


def _store_in_turn(weight: Tensor, part: Tensor) -> None:
    """Rows of gates and ups in turn [num_experts, rows, ...], the gates first. What the checkpoint
    lacks of either is zero."""
    gates, ups = weight.chunk(2, dim=1)
    copy(gates, part[:, 0::2])
    copy(ups, part[:, 1::2])
