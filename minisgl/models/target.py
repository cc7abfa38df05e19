"""The destination of a tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.shards import Shard

FLOATS = ("F32", "F16", "BF16")  # as safetensors names them
Store = Callable[[Tensor, Tensor], None]  # stores what was read in the weight


def copy(weight: Tensor, part: Tensor) -> None:
    """part: as far as the checkpoint has it. The rest of the weight is zero padding."""
    weight.zero_()
    weight[tuple(slice(size) for size in part.shape)].copy_(part)


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checkpoint tensor."""

    weight: Tensor | None  # a parameter, or a part of one; None: the tensor is only checked
    cut: tuple[Shard, ...]  # the range of each of the tensor's dimensions that is read
    dtypes: tuple[str, ...] = FLOATS
    store: Store = copy  # raises CheckpointError with the end of a sentence
    scalar: bool = False  # one number, as [1] or []
    scale: Tensor | None = None  # a parameter that `store` fills, too
    is_required: bool = True
    any_shape: bool = False  # of a tensor that is only checked, and read as a whole
    of_outputs: int | None = 0  # the dimension that the outputs of a linear map divide

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes that the tensor may have in the checkpoint."""
        shape = [shard.whole for shard in self.cut]
        return [[1], []] if self.scalar else [shape]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.scale) if tensor is not None)

    def fill(self, part: Tensor) -> None:
        """part: the cut as far as the checkpoint has it."""
        self.store(torch.empty(0) if self.weight is None else self.weight, part)


def storing(convert: Callable[[Tensor], Tensor]) -> Store:
    """Stores what `convert` makes of a part, where the weight is."""

    def store(weight: Tensor, part: Tensor) -> None:
        weight.copy_(convert(part.to(weight.device)))

    return store


def ignored(dtypes: tuple[str, ...], check: Store = lambda weight, part: None) -> Target:
    """Of a tensor of any shape that says nothing new, as `check` makes sure."""
    return Target(None, (), dtypes, check, is_required=False, any_shape=True)
