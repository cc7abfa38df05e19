"""Paged attention with flash-attn, in whichever generation is installed.

They differ in names and in what they take: generation 2 (Dao, arXiv 2307.08691; the package
flash_attn) pages of a multiple of 256 tokens, 3 (Shah et al., arXiv 2407.08608; the module
flash_attn_interface) and 4 (flash_attn.cute) pages of any size. All read page table and lengths
on the device, so that there is nothing to plan.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import DecodeBatch, LayerKV, PrefillBatch
from minisgl.config import AttentionSpec


class _Kernels(Protocol):
    """One generation's way to be called. Both methods take q as [num_rows, num_heads, head_dim]
    and return that shape."""

    @property
    def page_multiple(self) -> int:
        """Pages must have a multiple of so many tokens."""
        ...

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor: ...

    def prefill(
        self, q: Tensor, kv: LayerKV, rows: PrefillBatch, spec: AttentionSpec
    ) -> Tensor: ...


class FlashAttention:
    """Implements AttentionBackend, in float16 and bfloat16.

    Prefill must know on the host how long chunks are, hence no graph of it can be captured.
    """

    def __init__(self) -> None:
        self._kernels = load_kernels()

    @property
    def page_multiple(self) -> int:
        """Pages must have a multiple of so many tokens."""
        return self._kernels.page_multiple

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        return self._kernels.decode(q, kv, rows, spec)

    def prefill(self, q: Tensor, kv: LayerKV, rows: PrefillBatch, spec: AttentionSpec) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        return self._kernels.prefill(q, kv, rows, spec)


@dataclass(frozen=True, slots=True)
class _Generation2:
    page_multiple = 256
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]

    @staticmethod
    def load() -> _Kernels:
        package = importlib.import_module("flash_attn")
        return _Generation2(package.flash_attn_with_kvcache, package.flash_attn_varlen_func)

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor:
        out: Tensor = self.with_kvcache(
            q.unsqueeze(1),
            kv.k,
            kv.v,
            cache_seqlens=rows.lengths,
            block_table=rows.page_table,
            softmax_scale=spec.scale,
            causal=True,
        )
        return out.squeeze(1)

    def prefill(self, q: Tensor, kv: LayerKV, rows: PrefillBatch, spec: AttentionSpec) -> Tensor:
        out: Tensor = self.varlen(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=rows.row_starts,
            # As if the keys lay one behind the other.
            cu_seqlens_k=F.pad(rows.ends.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=max(rows.lengths),
            max_seqlen_k=_most_keys(rows),
            softmax_scale=spec.scale,
            causal=True,
            block_table=rows.page_table,
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

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor:
        out: Tensor = self.with_kvcache(
            q.unsqueeze(1),
            kv.k,
            kv.v,
            cache_seqlens=rows.lengths,
            page_table=rows.page_table,
            softmax_scale=spec.scale,
            causal=True,
        )
        return out.squeeze(1)

    def prefill(self, q: Tensor, kv: LayerKV, rows: PrefillBatch, spec: AttentionSpec) -> Tensor:
        out: Tensor = self.with_kvcache(
            q,
            kv.k,
            kv.v,
            cache_seqlens=rows.ends,
            page_table=rows.page_table,
            cu_seqlens_q=rows.row_starts,
            max_seqlen_q=max(rows.lengths),
            softmax_scale=spec.scale,
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

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor:
        # Splitting the keys is left off: on Hopper it is refused.
        out, _ = self.varlen(
            q.unsqueeze(1),
            kv.k,
            kv.v,
            seqused_k=rows.lengths,
            page_table=rows.page_table,
            softmax_scale=spec.scale,
            causal=True,
        )
        attended: Tensor = out
        return attended.squeeze(1)

    def prefill(self, q: Tensor, kv: LayerKV, rows: PrefillBatch, spec: AttentionSpec) -> Tensor:
        out, _ = self.varlen(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=rows.row_starts,
            max_seqlen_q=max(rows.lengths),
            max_seqlen_k=_most_keys(rows),
            seqused_k=rows.ends,
            page_table=rows.page_table,
            softmax_scale=spec.scale,
            causal=True,
        )
        attended: Tensor = out
        return attended


def _most_keys(rows: PrefillBatch) -> int:
    return max(start + length for start, length in zip(rows.starts, rows.lengths, strict=True))


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
