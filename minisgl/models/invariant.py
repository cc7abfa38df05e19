"""Models whose bits do not depend on the other rows of a step (--batch-invariant).

What they depend on elsewhere: the number of rows chooses the GEMM, its tiles and the splits of its
sums; attention splits keys by the lengths of all rows; a norm of a thousand rows or more adds up in
another order; torch's kernels on a CPU depend on shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minisgl.attention.base import Attention, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.attention.state import LayerState
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.float32_product import Float32Product
from minisgl.kernels.linear.invariant_product import InvariantProduct
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.tuning import ManyTiles, tuning_of
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models.around import AroundDecoder
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.decoder import Decoder, Taps
from minisgl.models.transformer import CausalLM

PAIRS_PER_EXPERT = 48  # that the tiles of experts are made for, whatever their number


def is_pinned(model: ModelConfig) -> bool:
    """Whether all kernels of such a model are."""
    if not isinstance(model, NativeConfig) or model.quantization is not None:
        return False
    facts, experts = model.facts(), model.experts
    plain = not facts.states and not any(spec.extras() for spec in facts.attention)
    return plain and (experts is None or (experts.routing is None and not experts.shared_size))


def make_invariant(model: Decoder, device: torch.device) -> Decoder:
    """The model with one way to compute any number of rows, of fewer than `many_rows` of
    DeviceTuning. Call it before `prepare`, with a model that is pinned."""
    if device.type == "cpu":
        return RowByRow(model)
    assert isinstance(model, CausalLM), "a pinned model is native"
    for module in model.modules():
        if isinstance(module, Linear):
            assert isinstance(module.product, DenseProduct)
            module.product = InvariantProduct(module.product)
        elif isinstance(module, FusedExperts):
            _pin_experts(module)
    if isinstance(model.head, Float32Product):
        model.head = InvariantProduct(model.head.product, torch.float32)
    elif isinstance(model.head, DenseProduct):
        model.head = InvariantProduct(model.head)
    return model


def _pin_experts(module: FusedExperts) -> None:
    from minisgl.kernels.moe.expert_tiles import choose_tiles

    product = module.product
    assert isinstance(product, DenseExperts)
    down = product.experts.down
    num_pairs = PAIRS_PER_EXPERT * len(down)
    tiles = choose_tiles(num_pairs, product.experts, 1, down.dtype, tuning_of(down.device))
    assert isinstance(tiles, ManyTiles)
    product.tiles = tiles


class RowByRow(AroundDecoder):
    """Runs another decoder on a CPU with a step for each row, in which it is a decode row: shapes
    depend on its position alone."""

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        assert received is None and taps is None, "stages and drafters are refused"
        return torch.cat([self._inner(row, states, attention) for row in _steps(batch)])

    def logits(self, hidden: Tensor) -> Tensor:
        # Copies, since products depend on the alignment of their operands.
        return torch.cat([self._inner.logits(row.clone()) for row in hidden.split(1)])


def _steps(batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """Each row as a step, in their order: a row of a chunk sees those before it."""
    decodes, chunks = batch.decodes, batch.chunks
    tables = [*decodes.page_table]
    lengths = decodes.lengths.tolist()
    starts, ends = chunks.row_starts.tolist(), chunks.ends.tolist()
    for chunk, end in enumerate(ends):
        num_rows = starts[chunk + 1] - starts[chunk]
        tables += [chunks.page_table[chunk]] * num_rows
        lengths += range(end - num_rows + 1, end + 1)
    none = PrefillBatch.of(decodes.page_table[:0], (), ())
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        part = slice(row, row + 1)
        rows = batch.rows.part(part)
        yield ForwardBatch(
            token_ids=batch.token_ids[part],
            rows=rows,
            own=rows,
            slot_mapping=batch.slot_mapping[part],
            decodes=DecodeBatch(table[None], torch.tensor([length], dtype=torch.int32), length),
            chunks=none,
            slots=batch.slots,
        )
