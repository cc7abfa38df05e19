"""What a model sees of a step, and the face of an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a backend that plans a step must know before the first layer runs."""

    num_heads: int  # of this rank, as the next
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of queries, keys and values


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV cache of one layer. Page 0 is scratch: padded rows write there, nobody reads it."""

    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, which attend to everything before them and to themselves."""

    page_table: Tensor  # [num_rows, max_pages] int32; columns past a row's length are undefined
    lengths: Tensor  # [num_rows] int32: tokens attended to, the row's own included
    longest: int  # max(lengths) or an upper bound of it, known on the host
    lengths_host: Sequence[int] | None = None  # the same as lengths, where the host knows them

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows of whole chunks, one chunk behind the other."""

    page_table: Tensor  # [num_chunks, max_pages] int32; columns past a chunk's end are undefined
    starts: tuple[int, ...]  # position of each chunk's first token
    lengths: tuple[int, ...]  # tokens in each chunk

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of one step: those of `decodes` first, then those of `chunks`."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    kv_index: Tensor  # [num_rows] int64: page * page_size + offset, where the row's K and V go
    decodes: DecodeRows
    chunks: ChunkRows


class AttentionBackend(Protocol):
    """Causal attention over the paged cache. K and V of the rows are in the cache already.

    One backend may serve the decode rows and another the chunks. Heads are grouped: query head h
    reads KV head h // (num_heads // num_kv_heads).
    """

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        ...

    def prefill(self, q: Tensor, kv: LayerKV, rows: ChunkRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        ...


@runtime_checkable
class PlansSteps(Protocol):
    """A backend with work to do once a step, on the host, that all layers share.

    Then `decode` and `prefill` take the rows that were planned last.
    """

    def plan_decode(self, rows: DecodeRows) -> None: ...

    def plan_prefill(self, rows: ChunkRows) -> None: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """The pair of backends that a model calls."""

    prefill_backend: AttentionBackend
    decode_backend: AttentionBackend

    def begin(self, inputs: StepInputs) -> None:
        """Called once a step, before the first layer and on its stream; outside a CUDA graph."""
        if inputs.decodes.num_rows and isinstance(self.decode_backend, PlansSteps):
            self.decode_backend.plan_decode(inputs.decodes)
        if inputs.chunks.lengths and isinstance(self.prefill_backend, PlansSteps):
            self.prefill_backend.plan_prefill(inputs.chunks)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, inputs: StepInputs, scale: float
    ) -> Tensor:
        """Write k and v ([num_rows, num_kv_heads, head_dim]) into the cache, then attend.

        q: [num_rows, num_heads, head_dim]; returns the same shape.
        """
        kv.k.view(-1, *kv.k.shape[2:]).index_copy_(0, inputs.kv_index, k)
        kv.v.view(-1, *kv.v.shape[2:]).index_copy_(0, inputs.kv_index, v)
        num_decodes = inputs.decodes.num_rows
        if num_decodes == q.shape[0]:
            return self.decode_backend.decode(q, kv, inputs.decodes, scale)
        if num_decodes == 0:
            return self.prefill_backend.prefill(q, kv, inputs.chunks, scale)
        out = q.new_empty(q.shape)
        out[:num_decodes] = self.decode_backend.decode(q[:num_decodes], kv, inputs.decodes, scale)
        out[num_decodes:] = self.prefill_backend.prefill(q[num_decodes:], kv, inputs.chunks, scale)
        return out
