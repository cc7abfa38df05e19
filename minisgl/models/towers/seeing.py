"""A decoder that counts positions in three directions, or adds rows of images behind its first
layers, where a step has images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.kernels.residual import Residual, joined
from minisgl.models.around import AroundDecoder
from minisgl.models.decoder import Taps
from minisgl.models.transformer import CausalLM


class SeeingModel(AroundDecoder):
    """Runs another decoder.

    A step that `rope` is set for has a rotary table of its own, whose rows are those of the step on
    this rank: each number is that of the position which rotates it.
    """

    def __init__(
        self, model: CausalLM, axes: Sequence[int], rows: Tensor, hidden_size: int
    ) -> None:
        """axes: as of Sight. rows: the buffer, [num_rows, row_size]; empty on other stages than the
        first."""
        super().__init__(model)
        self._model, self._rows, self._hidden_size = model, rows, hidden_size
        num_pairs = next(iter(model.rotary_tables.values())).shape[1] // 2
        of_pairs = torch.tensor(axes[:num_pairs])
        # [3, rotary_dim]: which numbers of a table, cos and then sin, are those of each position.
        self._is_axis = (of_pairs.repeat(2) == torch.arange(3)[:, None]).to(rows.device)
        self.rope: Tensor | None = None  # [3, num_chunk_rows] int64, of its rows behind the others
        self._deep: Sequence[Tensor] = ()  # [num_rows, hidden_size]: what each layer's output gets
        self._num_deep = rows.shape[1] // hidden_size - 1 if len(rows) else 0
        for number in range(self._num_deep):
            layer = model.layers[str(number + 1)]  # as what the next one takes
            layer.register_forward_pre_hook(partial(self._add, number))

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        model, rope, tables = self._model, self.rope, self._model.rotary_tables
        if rope is not None:
            own = batch.own
            decodes = own.rope[: len(own.rope) - rope.shape[1]]
            rope = torch.cat((decodes.expand(3, -1), rope), dim=1)
            own = replace(own, rope=torch.arange(rope.shape[1], device=rope.device))
            batch = replace(batch, own=own, rows=batch.rows if batch.shares else own)
            made = {id(table): self._table(table, rope) for table in tables.values()}
            model.rotary_tables = {layer: made[id(table)] for layer, table in tables.items()}
            self._deep = self._deep_rows(batch.token_ids)
        try:
            return super().__call__(batch, states, attention, received, taps)
        finally:
            model.rotary_tables, self._deep = tables, ()

    def _table(self, table: Tensor, rope: Tensor) -> Tensor:
        """The rotations of the rows of a step, [num_rows, rotary_dim], from those of positions."""
        by_frame, by_line, in_line = (table[positions] for positions in rope)
        rotations = by_frame.where(self._is_axis[0], by_line)
        return in_line.where(self._is_axis[2], rotations)

    def _deep_rows(self, token_ids: Tensor) -> Sequence[Tensor]:
        """What is behind the first hidden_size numbers of the rows of images, and 0 for text."""
        if not self._num_deep:
            return ()
        rows = self._rows[(-1 - token_ids).clamp(min=0), self._hidden_size :]
        return torch.chunk(rows * (token_ids < 0)[:, None], self._num_deep, dim=1)

    def _add(self, number: int, layer: Any, args: tuple[Residual, Any]) -> tuple[Residual, Any]:
        residual, step = args
        if not self._deep:
            return args
        stream = joined(residual, layer.input_layernorm)
        return Residual(stream + self._deep[number]), step
