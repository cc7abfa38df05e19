"""Defines what the runner needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor, nn

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.kernels.residual import NormWeights, Residual, joined


class Taps(NamedTuple):
    """Where a model leaves the residual stream as it enters some of its layers."""

    layers: tuple[int, ...]
    rows: Tensor  # [num_rows, len(layers) * hidden_size]: the streams side by side

    def tapped(self, residual: Residual, number: int, layer: nn.Module) -> Residual:
        """The same stream, as it enters layer `number`; copied if that is one of these."""
        if number not in self.layers:
            return residual
        rows = joined(residual, cast(NormWeights, layer.input_layernorm))
        width, place = rows.shape[1], self.layers.index(number)
        self.rows[:, place * width : (place + 1) * width] = rows
        return Residual(rows)


class Decoder(Protocol):
    """One rank's part of a model, or of one stage of it, with its weights."""

    @property
    def dense_copy_bytes(self) -> int:
        """The memory of the dense copies that `prepare` can make."""
        ...

    def prepare(self, *, dense_copies: bool = False) -> None:
        """Prepare the kernels for the weights. Must be called before anything is captured."""
        ...

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """What each layer keeps between steps, with the KV cache in `kv_dtype`."""
        ...

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the rows of one step: [num_rows, hidden_size], for `logits`; of a stage that is not
        the last, for the next one.

        states: one a layer, as of `layer_specs`; what the rows add is written into them. received:
        from the stage before, may be overwritten; None on the first. taps: filled, which only
        minisgl's own models can.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size], rows of what the last stage has returned. Returns [n, part],
        the rank's part of the vocabulary with its padding."""
        ...
