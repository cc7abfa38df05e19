"""The products of a layer's experts, whatever their weights are made of: a subclass for each format
of weights. select_experts.py computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from minisgl.kernels.adapters import ExpertAdapters
from minisgl.kernels.moe.reference import Choice, Expert, weighted_sum
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import ManyTiles

Adapted = tuple[ExpertAdapters, Tensor]  # the tensor: [num_rows] int32, 0 for rows without one


class ExpertsProduct(ABC):
    """The weighted sum over each row's chosen experts e of down[e] · gated_mul(gate_up[e] · x).

    x: [num_rows, hidden_size]; it and the tensors of a choice are contiguous, and of the model's
    dtype.
    """

    tiles: ManyTiles | None = None  # of kernels; None: they are chosen by the number of rows

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that a checkpoint fills in place, by the names of the layer's parameters; the
        first is that of all gates and ups."""
        ...

    @property
    def plain(self) -> ExpertsProduct:
        """The product without what adapters add."""
        return self

    @abstractmethod
    def expert(self, index: int) -> Expert:
        """One of those that this product has, from 0 on."""
        ...

    def adapted(self, rows: Rows | None) -> Adapted | None:
        """What adapters add for the rows of a step, and which row has which."""
        return None

    def reference(self, x: Tensor, choice: Choice, rows: Rows | None = None) -> Tensor:
        """The sum without kernels: a new tensor like x. rows: as of Product."""
        return weighted_sum(x, self.expert, choice)
