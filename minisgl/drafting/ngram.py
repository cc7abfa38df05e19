"""Drafts from the request's own tokens: prompt lookup (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.config import LayerSpec
from minisgl.device.lanes import Lanes
from minisgl.drafting.drafter import DraftStep, Draw
from minisgl.kernels.slots.ngrams import draft_ngrams


class NgramDrafter:
    """Keeps the tokens of all slots on the device, 4 bytes each, and looks for the last place in
    them that agrees with their end."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_slots: int, max_seq_len: int, lanes: Lanes) -> None:
        self._lanes = lanes
        size = num_slots + 1, max_seq_len + 1
        self._history = torch.zeros(size, dtype=torch.int32, device=lanes.device)

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return ()

    def join(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for slot, ids in zip(slots, self._lanes.upload(token_ids), strict=True):
            self._history[slot, : len(ids)] = ids

    def draft(self, step: DraftStep, token_ids: Tensor, draw: Draw) -> None:
        if not len(token_ids):
            return
        draft_ngrams(
            self._history,
            step.state,
            step.slots,
            step.output_index,
            token_ids,
            step.num_decode_rows,
            step.run,
        )
