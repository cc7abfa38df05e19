"""Defines what drafting needs of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec


class Drafted(NamedTuple):
    """What a network computes of its rows."""

    rows: Tensor  # [num_rows, hidden_size], for `logits`
    hidden: Tensor | None  # [num_rows, hidden_size], for the row that follows each


class DraftNetwork(Protocol):
    """One rank's part of a network that guesses the tokens of a target.

    A row has a token and a position. A network that `follows` takes, beside the token, what is
    `hidden` of it: of rows that the target has computed, what `combine` makes of the target's
    results one token before, and of drafted ones what the network has returned for the row before.
    So its row at a position has the token at the next.
    """

    @property
    def follows(self) -> bool: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target whose Taps `combine` takes; none: it takes the target's rows
        after the final norm."""
        ...

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """What each layer keeps between steps, with the KV cache in `kv_dtype`."""
        ...

    def prepare(self) -> None:
        """Prepare the kernels for the weights. Must be called before anything is captured."""
        ...

    def combine(self, target: Tensor) -> Tensor:
        """target: [num_rows, any]. Returns a `hidden`, which may be the same tensor."""
        ...

    def __call__(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        states: Sequence[LayerState],
        attention: Attention,
    ) -> Drafted:
        """Run rows, and write what they add into the states. May overwrite hidden: None if the
        network does not follow."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """rows: [n, hidden_size], of Drafted. Returns [n, part] like the target's Decoder: the
        rank's part of the target's vocabulary with its padding; -inf for a token that is never
        drafted."""
        ...
