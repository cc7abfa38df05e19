"""Paged attention with flash-attn, in whichever generation is installed.

They differ in names and in what they take: generation 2 (Dao, arXiv 2307.08691; the package
flash_attn) pages of a multiple of 256 tokens, 3 (Shah et al., arXiv 2407.08608; the module
flash_attn_interface) and 4 (flash_attn.cute) pages of any size. All read page table and lengths
on the device, so that decode needs no plan.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from minisgl.attention.base import ChunkRows, DecodeRows, LayerKV


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """The chunks of a step as flash-attn takes them: int32 all, on the device."""

    page_table: Tensor  # [num_chunks, max_pages]
    query_starts: Tensor  # [num_chunks + 1]: where each chunk's queries begin
    key_starts: Tensor  # [num_chunks + 1]: as if the keys lay one behind the other
    key_lengths: Tensor  # [num_chunks]
    most_queries: int  # of a chunk
    most_keys: int

    @staticmethod
    def of(rows: ChunkRows) -> ChunkInputs:
        """Copies to the device, and does not wait for it."""
        ends = [start + length for start, length in zip(rows.starts, rows.lengths, strict=True)]
        parts = (
            list(itertools.accumulate(rows.lengths, initial=0)),
            list(itertools.accumulate(ends, initial=0)),
            ends,
        )
        packed = torch.tensor(
            [value for part in parts for value in part],
            dtype=torch.int32,
            pin_memory=rows.page_table.is_cuda,
        )
        on_device = packed.to(rows.page_table.device, non_blocking=True)
        query_starts, key_starts, key_lengths = on_device.split([len(part) for part in parts])
        return ChunkInputs(
            page_table=rows.page_table,
            query_starts=query_starts,
            key_starts=key_starts,
            key_lengths=key_lengths,
            most_queries=max(rows.lengths),
            most_keys=max(ends),
        )


class _Kernels(Protocol):
    """One generation's way to be called. Both methods take q as [num_rows, num_heads, head_dim]
    and return that shape."""

    @property
    def page_multiple(self) -> int:
        """Pages must have a multiple of so many tokens."""
        ...

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor: ...

    def prefill(self, q: Tensor, kv: LayerKV, chunks: ChunkInputs, scale: float) -> Tensor: ...


class FlashAttention:
    """Implements AttentionBackend and PlansSteps, in float16 and bfloat16."""

    def __init__(self) -> None:
        self._kernels = load_kernels()
        self._planned: ChunkRows | None = None
        self._chunks: ChunkInputs | None = None

    @property
    def page_multiple(self) -> int:
        """Pages must have a multiple of so many tokens."""
        return self._kernels.page_multiple

    def plan_decode(self, rows: DecodeRows) -> None:
        """Nothing to plan."""

    def plan_prefill(self, rows: ChunkRows) -> None:
        """Send what the layers share."""
        self._planned, self._chunks = rows, ChunkInputs.of(rows)

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        return self._kernels.decode(q, kv, rows, scale)

    def prefill(self, q: Tensor, kv: LayerKV, rows: ChunkRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        if self._chunks is None or rows is not self._planned:
            raise RuntimeError("Attention.begin must plan a step's chunks before its first layer")
        return self._kernels.prefill(q, kv, self._chunks, scale)


@dataclass(frozen=True, slots=True)
class _Generation2:
    page_multiple = 256
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]

    @staticmethod
    def load() -> _Kernels:
        package = importlib.import_module("flash_attn")
        return _Generation2(package.flash_attn_with_kvcache, package.flash_attn_varlen_func)

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        out: Tensor = self.with_kvcache(
            q.unsqueeze(1),
            kv.k,
            kv.v,
            cache_seqlens=rows.lengths,
            block_table=rows.page_table,
            softmax_scale=scale,
            causal=True,
        )
        return out.squeeze(1)

    def prefill(self, q: Tensor, kv: LayerKV, chunks: ChunkInputs, scale: float) -> Tensor:
        out: Tensor = self.varlen(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=chunks.query_starts,
            cu_seqlens_k=chunks.key_starts,
            max_seqlen_q=chunks.most_queries,
            max_seqlen_k=chunks.most_keys,
            softmax_scale=scale,
            causal=True,
            block_table=chunks.page_table,
        )
        return out


@dataclass(frozen=True, slots=True)
class _Generation3:
    page_multiple = 1
    with_kvcache: Callable[..., Any]

    @staticmethod
    def load() -> _Kernels:
        module = importlib.import_module("flash_attn_interface")
        return _Generation3(module.flash_attn_with_kvcache)

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        out: Tensor = self.with_kvcache(
            q.unsqueeze(1),
            kv.k,
            kv.v,
            cache_seqlens=rows.lengths,
            page_table=rows.page_table,
            softmax_scale=scale,
            causal=True,
        )
        return out.squeeze(1)

    def prefill(self, q: Tensor, kv: LayerKV, chunks: ChunkInputs, scale: float) -> Tensor:
        out: Tensor = self.with_kvcache(
            q,
            kv.k,
            kv.v,
            cache_seqlens=chunks.key_lengths,
            page_table=chunks.page_table,
            cu_seqlens_q=chunks.query_starts,
            max_seqlen_q=chunks.most_queries,
            softmax_scale=scale,
            causal=True,
        )
        return out


@dataclass(frozen=True, slots=True)
class _Generation4:
    page_multiple = 1
    varlen: Callable[..., Any]

    @staticmethod
    def load() -> _Kernels:
        module: ModuleType = importlib.import_module("flash_attn.cute")
        # Generation 2 brings a folder of that name too, with a forerunner of this function.
        if "max_seqlen_q" not in inspect.signature(module.flash_attn_varlen_func).parameters:
            raise ImportError("flash_attn.cute is not that of the package flash-attn-4")
        return _Generation4(module.flash_attn_varlen_func)

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        # Splitting the keys is left off: on Hopper it is refused.
        out, _ = self.varlen(
            q.unsqueeze(1),
            kv.k,
            kv.v,
            seqused_k=rows.lengths,
            page_table=rows.page_table,
            softmax_scale=scale,
            causal=True,
        )
        attended: Tensor = out
        return attended.squeeze(1)

    def prefill(self, q: Tensor, kv: LayerKV, chunks: ChunkInputs, scale: float) -> Tensor:
        out, _ = self.varlen(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=chunks.query_starts,
            max_seqlen_q=chunks.most_queries,
            max_seqlen_k=chunks.most_keys,
            seqused_k=chunks.key_lengths,
            page_table=chunks.page_table,
            softmax_scale=scale,
            causal=True,
        )
        attended: Tensor = out
        return attended


def load_kernels() -> _Kernels:
    """The newest generation that imports. Raises ImportError, which names them all."""
    failures: list[str] = []
    for name, load in (
        ("flash-attn-4", _Generation4.load),
        ("flash_attn_3", _Generation3.load),
        ("flash-attn", _Generation2.load),
    ):
        try:
            return load()
        except Exception as error:  # a package built for another torch fails in many ways
            failures.append(f"{name}: {error}")
    raise ImportError("no generation of flash-attn imports (" + "; ".join(failures) + ")")
