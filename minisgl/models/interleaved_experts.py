"""The tensors of experts that a checkpoint has stacked, as gpt-oss has them.

Each of the two maps is one tensor of all experts, [num_experts, inputs, outputs], with a bias
[num_experts, outputs]. The outputs of the first are a gate and an up in turn. Here an expert's
gates come first, as in every mixture of experts, and the rows of a matrix are its outputs. In MXFP4
(formats/mxfp4.py) a map is two tensors, of which each row is an output.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.experts import FusedExperts
from minisgl.models.target import Target, copy
from minisgl.shards import Shard


def expert_targets(path: str, module: FusedExperts) -> dict[str, Target]:
    """Where the tensors of `module` go, by their names, if it is not quantised."""
    experts, hidden, inner, weights = (
        module.own,
        module.hidden,
        module.inner,
        module.product.weights,
    )
    return bias_targets(path, module) | {
        f"{path}.gate_up_proj": Target(
            weights["gate_up_proj"],
            (experts, hidden, inner.times(2)),
            store=lambda weight, part: store_in_turn(weight, part.mT),
        ),
        f"{path}.down_proj": Target(
            weights["down_proj"],
            (experts, inner, hidden),
            store=lambda weight, part: copy(weight, part.mT),
        ),
    }


def bias_targets(path: str, module: FusedExperts) -> dict[str, Target]:
    """Where their biases go."""
    experts, hidden, weights = module.own, module.hidden, module.product.weights
    gate_up = module.inner.times(2)
    summed = hidden if module.holds_bias else Shard(hidden.size, hidden.size, hidden.size)
    return {
        f"{path}.gate_up_proj_bias": Target(
            weights["gate_up_proj_bias"], (experts, gate_up), store=store_in_turn
        ),
        f"{path}.down_proj_bias": Target(weights["down_proj_bias"], (experts, summed)),
    }


def store_in_turn(weight: Tensor, part: Tensor) -> None:
    """Rows of gates and ups in turn [num_experts, rows, ...], the gates first. What the checkpoint
    lacks of either is zero."""
    gates, ups = weight.chunk(2, dim=1)
    copy(gates, part[:, 0::2])
    copy(ups, part[:, 1::2])
