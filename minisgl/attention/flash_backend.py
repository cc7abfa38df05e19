"""Paged attention with flash-attn, of any installed generation.

Generations differ in module, argument names and page sizes: 2 (Dao, arXiv 2307.08691; the package
flash_attn) requires pages of a multiple of 256 tokens; 3 (Shah et al., arXiv 2407.08608; the module
flash_attn_interface) and 4 (flash_attn.cute) accept any size. All read page table and lengths on
the device, so no step needs a plan.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.declaration import Backend, is_installed
from minisgl.config import SOFT_CAPS, WINDOWS, AttentionSpec, BackendFacts
from minisgl.kernels.hardware import ComputeCapability

_LARGEST_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    """The module, functions and argument names of one generation."""

    number: int
    package: str
    module: str
    decode: str
    prefill: str
    page_multiple: int = 1
    page_table: str = "page_table"
    decode_lengths: str  # name of the argument for the key counts of rows
    prefill_lengths: str  # name of the argument for the key counts of chunks
    adds_up_lengths: bool = False  # prefill_lengths are cumulative
    takes_longest: bool = True  # prefill takes max_seqlen_k

    def load(self) -> FlashAttention:
        module = importlib.import_module(self.module)
        decode, prefill = getattr(module, self.decode), getattr(module, self.prefill)
        # Generation 2 also contains flash_attn.cute, with an early version of this function.
        if self.number == 4 and "max_seqlen_q" not in inspect.signature(prefill).parameters:
            raise ImportError(f"{self.module} is not that of the package {self.package}")
        return FlashAttention(self, decode, prefill)


_NEWEST_FIRST = (
    _Generation(
        number=4,
        package="flash-attn-4",
        module="flash_attn.cute",
        # Without split keys, which are not supported on Hopper.
        decode="flash_attn_varlen_func",
        prefill="flash_attn_varlen_func",
        decode_lengths="seqused_k",
        prefill_lengths="seqused_k",
    ),
    _Generation(
        number=3,
        package="flash_attn_3",
        module="flash_attn_interface",
        decode="flash_attn_with_kvcache",
        prefill="flash_attn_with_kvcache",
        decode_lengths="cache_seqlens",
        prefill_lengths="cache_seqlens",
        takes_longest=False,
    ),
    _Generation(
        number=2,
        package="flash-attn",
        module="flash_attn",
        decode="flash_attn_with_kvcache",
        prefill="flash_attn_varlen_func",
        page_multiple=256,
        page_table="block_table",
        decode_lengths="cache_seqlens",
        prefill_lengths="cu_seqlens_k",
        adds_up_lengths=True,
    ),
)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Implements AttentionBackend, in float16 and bfloat16, by an installed generation.

    Prefill needs the lengths of chunks on the host, so it cannot be captured in a graph.
    """

    generation: _Generation
    decode_function: Callable[..., Any]
    prefill_function: Callable[..., Any]

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        names = self.generation
        arguments = {names.decode_lengths: batch.lengths, names.page_table: batch.page_table}
        return _run(self.decode_function, call, call.q.unsqueeze(1), arguments).squeeze(1)

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        names, lengths = self.generation, batch.ends
        if names.adds_up_lengths:  # cumulative, as for contiguous keys
            lengths = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        arguments: dict[str, Any] = {
            "cu_seqlens_q": batch.row_starts,
            "max_seqlen_q": max(batch.lengths),
            names.prefill_lengths: lengths,
            names.page_table: batch.page_table,
        }
        if names.takes_longest:
            arguments["max_seqlen_k"] = max(map(sum, zip(batch.starts, batch.lengths, strict=True)))
        return _run(self.prefill_function, call, call.q, arguments)


def _run(
    function: Callable[..., Any], call: AttentionCall, q: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """arguments: beside those that all generations have by the same names."""
    spec = call.spec
    options: dict[str, Any] = {"softmax_scale": spec.scale, "causal": True}
    if spec.window is not None:
        options["window_size"] = (spec.window - 1, 0)
    if spec.softcap is not None:
        options["softcap"] = spec.softcap
    out = function(q, call.kv.k, call.kv.v, **arguments, **options)
    # Generation 4 returns the log-sum-exp of the softmax as well.
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def load_newest() -> FlashAttention:
    """Load the newest generation that can be imported. Raises ImportError, naming all of them."""
    failures: list[str] = []
    for generation in _NEWEST_FIRST:
        try:
            return generation.load()
        except Exception as error:  # packages built for another torch raise many types
            failures.append(f"{generation.package}: {error}")
    raise ImportError("no generation of flash-attn imports (" + "; ".join(failures) + ")")


def _why_missing(capability: ComputeCapability, layers: Set[AttentionSpec]) -> str | None:
    for head_dim in sorted({spec.head_dim for spec in layers}):
        if head_dim % 8 or head_dim > _LARGEST_HEAD_DIM:
            return f"flash-attn has no kernels for head_dim {head_dim}"
    if not any(is_installed(module) for module in ("flash_attn", "flash_attn_interface")):
        return "flash-attn is not installed"
    try:
        load_newest()
    except ImportError as error:
        return f"flash-attn does not import: {error}"
    return None


FLASH = Backend(
    # Last, since this adapter has only met stand-ins of flash-attn and has not run on a GPU.
    facts=BackendFacts(
        name="fa",
        prefill_rank=9,
        decode_rank=9,
        extras=(WINDOWS, SOFT_CAPS),
        captures_decode=True,
    ),
    make=lambda shape: load_newest(),
    why_missing=_why_missing,
    facts_with=lambda facts, _: replace(
        facts, page_multiple=load_newest().generation.page_multiple
    ),
)
