"""A decoder in which the rows of an image see each other, those behind them as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import (
    Attention,
    AttentionBackend,
    AttentionCall,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.declaration import is_installed
from minisgl.attention.state import LayerState
from minisgl.attention.torch_backend import TorchAttention
from minisgl.models.around import AroundDecoder
from minisgl.models.decoder import Decoder, Taps


class BothWaysModel(AroundDecoder):
    """Runs another decoder. In a step that `last_seen` is set for, chunks attend by backends that
    are told by it, whichever those of other steps are."""

    def __init__(self, model: Decoder, device: torch.device, *, only_windowed: bool) -> None:
        """only_windowed: layers without a window see earlier rows only."""
        super().__init__(model)
        self._only_windowed = only_windowed
        # [num_chunk_rows] int32: the last position that each row sees, its own or a later one.
        self.last_seen: Tensor | None = None
        self._backend: Any = TorchAttention()
        if device.type == "cuda" and is_installed("triton"):
            from minisgl.attention.triton_attention import TritonAttention

            self._backend = TritonAttention()

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        if self.last_seen is not None:
            attention = self._told(attention, self.last_seen)
        return super().__call__(batch, states, attention, received, taps)

    def _told(self, attention: Attention, last_seen: Tensor) -> Attention:
        base, windowed = attention.prefill_backend, attention.windowed
        told = _Told(base, self._backend, last_seen, self._only_windowed)
        if windowed is not None:
            windowed = self._told(windowed, last_seen)
        return replace(attention, prefill_backend=told, windowed=windowed)


class _Told:
    """Implements AttentionBackend for the chunks of one step."""

    def __init__(
        self, base: AttentionBackend, backend: Any, last_seen: Tensor, only_windowed: bool
    ) -> None:
        self._base, self._backend = base, backend
        self._last_seen, self._only_windowed = last_seen, only_windowed

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        return self._base.decode(call, batch)

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        if self._only_windowed and call.spec.window is None:
            return self._base.prefill(call, batch)
        found: Tensor = self._backend.prefill(call, batch, self._last_seen)
        return found
