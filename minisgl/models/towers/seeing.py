"""A decoder that counts positions in three directions, or adds rows of images behind its first
layers, where a step has images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.kernels.residual import Residual, joined
from minisgl.models.adopted.heads import Angles
from minisgl.models.around import AroundDecoder
from minisgl.models.decoder import Decoder, Taps
from minisgl.models.transformer import CausalLM

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel

_ROTARY = "rotary_emb"  # what models of transformers call their module for rotations


class TurningModel(AroundDecoder):
    """Runs another decoder.

    A step that `rope` is set for rotates its rows on this rank by positions in three directions:
    each number of a rotation is that of the position which rotates it.
    """

    def __init__(self, model: Decoder, axes: Tensor) -> None:
        """axes: [width], which position rotates each number."""
        super().__init__(model)
        self._is_axis = axes == torch.arange(3, device=axes.device)[:, None]
        self.rope: Tensor | None = None  # [3, num_chunk_rows] int64, of the rows behind the others

    def _turned(self, batch: ForwardBatch, rope: Tensor) -> tuple[Tensor, ForwardBatch]:
        """The positions of all rows of a step on this rank, [3, num_rows], and the step, whose rows
        are rotated by their number."""
        own = batch.own
        decodes = own.rope[: len(own.rope) - rope.shape[1]]
        rope = torch.cat((decodes.expand(3, -1), rope), dim=1)
        own = replace(own, rope=torch.arange(rope.shape[1], device=rope.device))
        return rope, replace(batch, own=own, rows=batch.rows if batch.shares else own)

    def _of_axes(self, by_frame: Tensor, by_line: Tensor, in_line: Tensor) -> Tensor:
        """Rotations by each position, [..., width], as one."""
        rotations = by_frame.where(self._is_axis[0], by_line)
        return in_line.where(self._is_axis[2], rotations)


class SeeingModel(TurningModel):
    """Gives a step a rotary table of its own, whose rows are those of the step."""

    def __init__(
        self, model: CausalLM, axes: Sequence[int], rows: Tensor, hidden_size: int
    ) -> None:
        """axes: as of Sight. rows: the buffer, [num_rows, row_size]; empty on other stages than the
        first."""
        num_pairs = next(iter(model.rotary_tables.values())).shape[1] // 2
        # The numbers of a table are cos, and then sin.
        super().__init__(model, torch.tensor(axes[:num_pairs], device=rows.device).repeat(2))
        self._model, self._rows, self._hidden_size = model, rows, hidden_size
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
        model, tables = self._model, self._model.rotary_tables
        if self.rope is not None:
            rope, batch = self._turned(batch, self.rope)
            made = {
                id(table): self._of_axes(*(table[positions] for positions in rope))
                for table in tables.values()
            }
            model.rotary_tables = {layer: made[id(table)] for layer, table in tables.items()}
            self._deep = self._deep_rows(batch.token_ids)
        try:
            return super().__call__(batch, states, attention, received, taps)
        finally:
            model.rotary_tables, self._deep = tables, ()

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


class SeeingAdopted(TurningModel):
    """The same of transformers' code, whose module for rotations computes them of positions."""

    def __init__(self, model: AdoptedModel, axes: Sequence[int], device: torch.device) -> None:
        """axes: as of Sight."""
        (self._rotary,) = [
            module for name, module in model.module.named_modules() if name.endswith(_ROTARY)
        ]
        self._compute: Any = self._rotary.forward
        of_pairs = torch.tensor(axes, device=device)
        one = torch.ones((1, 1), dtype=torch.int64, device=device)
        cos, _ = self._compute(one.float(), one)
        width, half = _numbers(cos).shape[-1], len(axes)
        super().__init__(model, of_pairs.repeat(2))
        if not isinstance(cos, Angles) and not torch.equal(cos[..., :half], cos[..., half:]):
            self._is_axis = self._is_axis[:, :half].repeat_interleave(2, dim=1)
        assert width == 2 * half, "a rotation has other numbers"
        self._positions: Tensor | None = None  # [3, num_rows], while such a step runs
        self._rotary.forward = self._rotations

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        if self.rope is not None:
            self._positions, batch = self._turned(batch, self.rope)
        try:
            return super().__call__(batch, states, attention, received, taps)
        finally:
            self._positions = None

    def _rotations(self, x: Any, position_ids: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self._compute(x, position_ids)
        positions, angles = self._positions, found[0]
        if positions is None:
            return found
        if isinstance(angles, Angles):  # which are of all positions
            angles = Angles(self._of_axes(*(angles.table[each] for each in positions)))
            return angles, angles
        pairs = [self._compute(x, each[None]) for each in positions]
        cos, sin = (self._of_axes(*parts) for parts in zip(*pairs, strict=True))
        return cos, sin


def _numbers(found: Any) -> Tensor:
    return found.table if isinstance(found, Angles) else found
