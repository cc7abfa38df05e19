"""The tensors of experts that a checkpoint has stacked, as gpt-oss has them.

Each of the two maps is one tensor of all experts, [num_experts, inputs, outputs], with a bias
[num_experts, outputs]. The outputs of the first are a gate and an up in turn. Here an expert's
gates come first, as in every mixture of experts, and the rows of a matrix are its outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minisgl.layers.experts import FusedExperts
from minisgl.models.target import Target, copy
from minisgl.shards import Shard, whole


def expert_targets(path: str, module: FusedExperts) -> dict[str, Target]:
    """Where the tensors of `module` go, by their names."""
    experts, hidden, inner = whole(module.num_experts), module.hidden, module.inner
    weights, gate_up = module.product.weights, inner.times(2)
    summed = hidden if module.holds_bias else Shard(hidden.size, hidden.size, hidden.size)
    found = {
        "gate_up_proj": Target(
            weights["gate_up_proj"],
            (experts, hidden, gate_up),
            store=lambda weight, part: _store_in_turn(weight, part.mT),
        ),
        "down_proj": Target(
            weights["down_proj"],
            (experts, inner, hidden),
            store=lambda weight, part: copy(weight, part.mT),
        ),
        "gate_up_proj_bias": Target(
            weights["gate_up_proj_bias"], (experts, gate_up), store=_store_in_turn
        ),
        "down_proj_bias": Target(weights["down_proj_bias"], (experts, summed)),
    }
    return {f"{path}.{kind}": target for kind, target in found.items()}


def _store_in_turn(weight: Tensor, part: Tensor, store: Callable[..., None] = copy) -> None:
    """Rows of gates and ups in turn [num_experts, rows, ...], the gates first. What the checkpoint
    lacks of either is zero."""
    gates, ups = weight.chunk(2, dim=1)
    store(gates, part[:, 0::2])
    store(ups, part[:, 1::2])
