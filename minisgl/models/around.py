"""A decoder around another one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.models.decoder import Decoder, Taps


class AroundDecoder:
    """Implements Decoder by another one, of which it may change the steps."""

    def __init__(self, model: Decoder) -> None:
        self._inner = model

    @property
    def dense_copy_bytes(self) -> int:
        return self._inner.dense_copy_bytes

    def prepare(self, *, dense_copies: bool = False) -> None:
        self._inner.prepare(dense_copies=dense_copies)

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return self._inner.layer_specs(kv_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._inner.logits(hidden)

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        return self._inner(batch, states, attention, received, taps)
