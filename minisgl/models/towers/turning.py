"""A decoder whose rows are rotated by positions in three directions, where they have these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.models.decoder import Taps
from minisgl.models.transformer import CausalLM


class TurningModel:
    """Runs another decoder. Implements Decoder.

    A step that `rope` is set for has a rotary table of its own, whose rows are those of the step:
    each number is that of the position which rotates it.
    """

    def __init__(self, model: CausalLM, axes: Sequence[int], device: torch.device) -> None:
        """axes: as of Sight."""
        self._model = model
        num_pairs = next(iter(model.rotary_tables.values())).shape[1] // 2
        of_pairs = torch.tensor(axes[:num_pairs])
        # [3, rotary_dim]: which numbers of a table, cos and then sin, are those of each position.
        self._is_axis = (of_pairs.repeat(2) == torch.arange(3)[:, None]).to(device)
        self.rope: Tensor | None = None  # [3, num_chunk_rows] int64, of the rows behind the others

    @property
    def dense_copy_bytes(self) -> int:
        return self._model.dense_copy_bytes

    def prepare(self, *, dense_copies: bool = False) -> None:
        self._model.prepare(dense_copies=dense_copies)

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return self._model.layer_specs(kv_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        model, rope = self._model, self.rope
        if rope is None:
            hidden: Tensor = model(batch, states, attention, received, taps)
            return hidden
        decodes = batch.rows.rope[: len(batch.rows.rope) - rope.shape[1]]
        rope = torch.cat((decodes.expand(3, -1), rope), dim=1)
        rows = replace(batch.rows, rope=torch.arange(rope.shape[1], device=rope.device))
        tables = model.rotary_tables
        made = {id(table): self._table(table, rope) for table in tables.values()}
        model.rotary_tables = {layer: made[id(table)] for layer, table in tables.items()}
        try:
            hidden = model(replace(batch, rows=rows, own=rows), states, attention, received, taps)
        finally:
            model.rotary_tables = tables
        return hidden

    def _table(self, table: Tensor, rope: Tensor) -> Tensor:
        """The rotations of the rows of a step, [num_rows, rotary_dim], from those of positions."""
        by_frame, by_line, in_line = (table[positions] for positions in rope)
        rotations = by_frame.where(self._is_axis[0], by_line)
        return in_line.where(self._is_axis[2], rotations)
