"""Drives a CausalLM by hand, as the runner will: pages, page tables and ForwardBatch.

Hostile on purpose: pages are scattered, unwritten slots hold NaN, and the undefined columns of a
page table point outside the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minisgl.attention.base import (
    Attention,
    AttentionBackend,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionSpec
from minisgl.kernels.adapters import AdaptedRows
from minisgl.kernels.rows import Rows
from minisgl.models.config import ModelConfig
from minisgl.models.transformer import CausalLM

UNDEFINED_PAGE = 2**30


@dataclass
class PagedSequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


def page_table(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows), default=0) + 2
    padded = [[*row, *[UNDEFINED_PAGE] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), width)


def spec_of(q: Tensor, kv: PagedKV, scale: float) -> AttentionSpec:
    """The attention of queries [n, num_heads, head_dim] over `kv`."""
    return AttentionSpec(
        num_heads=q.shape[1], num_kv_heads=kv.k.shape[2], head_dim=q.shape[2], scale=scale
    )


class PagedModel:
    """A model with a KV cache of its own. `step` is one forward pass over any mix of rows."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        page_size: int,
        backend: AttentionBackend | None = None,
        num_tokens: int = 1024,
        position_offset: int = 0,
        adapted: Callable[[Tensor], AdaptedRows] | None = None,
    ) -> None:
        """adapted: AdapterPool.rows of the model's."""
        self.model = model
        self.page_size = page_size
        backend = backend or TorchAttention()
        self.attention = Attention(backend, backend)
        self.position_offset = position_offset
        self.adapted = adapted
        num_pages = 1 + num_tokens // page_size
        parameters = getattr(model, "module", model).parameters()  # of an adopted model
        dtype = next(each.dtype for each in parameters if each.itemsize > 1)
        self.kv = [
            PagedKV.of(
                spec,
                *(
                    torch.full((num_pages, page_size, *its), torch.nan, dtype=dtype)
                    for its in spec.shapes
                ),
            )
            for spec in model.layer_specs(str(dtype).removeprefix("torch."))
        ]
        self.free_pages = random.Random(0).sample(range(1, num_pages), num_pages - 1)

    @torch.inference_mode()
    def step(
        self,
        decodes: Sequence[tuple[PagedSequence, int]] = (),
        chunks: Sequence[tuple[PagedSequence, Sequence[int]]] = (),
    ) -> list[Tensor]:
        """Logits after each token: one [num_tokens, vocab_size] per decode, then per chunk."""
        work = [(sequence, [token]) for sequence, token in decodes]
        work += [(sequence, list(tokens)) for sequence, tokens in chunks]
        starts = [sequence.length for sequence, _ in work]
        positions: list[int] = []
        slot_mapping: list[int] = []
        for sequence, tokens in work:
            end = sequence.length + len(tokens)
            while len(sequence.pages) * self.page_size < end:
                sequence.pages.append(self.free_pages.pop())
            for position in range(sequence.length, end):
                page, offset = divmod(position, self.page_size)
                positions.append(position)
                slot_mapping.append(sequence.pages[page] * self.page_size + offset)
            sequence.length = end
        lengths = [sequence.length for sequence, _ in decodes]
        of_all = torch.tensor(positions)
        # The places of the requests stand for their slots.
        counts = torch.tensor([len(tokens) for _, tokens in work])
        rows = Rows.of(torch.arange(len(work)).repeat_interleave(counts), of_all)
        if self.position_offset:
            rows = replace(rows, rope=of_all + self.position_offset)
        if self.adapted is not None:
            rows = replace(rows, adapted=self.adapted(rows.slots))
        inputs = ForwardBatch(
            token_ids=torch.tensor([token for _, tokens in work for token in tokens]),
            rows=rows,
            own=rows,
            slot_mapping=torch.tensor(slot_mapping),
            decodes=DecodeBatch(
                page_table([sequence.pages for sequence, _ in decodes]),
                torch.tensor(lengths, dtype=torch.int32),
                longest=max(lengths, default=0),
            ),
            chunks=PrefillBatch.of(
                page_table([sequence.pages for sequence, _ in chunks]),
                tuple(starts[len(decodes) :]),
                tuple(len(tokens) for _, tokens in chunks),
            ),
            slots=BatchSlots(
                torch.arange(len(decodes)), torch.arange(len(chunks))
            ),  # not looked at
        )
        logits = self.model.logits(self.model(inputs, self.kv, self.attention))
        return list(logits.split([len(tokens) for _, tokens in work]))

    def run(
        self, token_ids: Sequence[int], *, chunk: int = 0, prefill: int | None = None
    ) -> Tensor:
        """Logits of one sequence: its first `prefill` tokens in chunks, the others decoded."""
        sequence = PagedSequence()
        prefill = len(token_ids) if prefill is None else prefill
        chunk = chunk or max(prefill, 1)
        parts: list[Tensor] = []
        for start in range(0, prefill, chunk):
            parts += self.step(chunks=[(sequence, token_ids[start : min(start + chunk, prefill)])])
        for token in token_ids[prefill:]:
            parts += self.step(decodes=[(sequence, token)])
        return torch.cat(parts)
