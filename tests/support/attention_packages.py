"""Substitutes for FlashInfer and flash-attn, which need neither the packages nor a GPU.

They have the packages' signatures and compute attention from exactly what they are given: lists of
pages, block tables, lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minisgl.attention import flashinfer_backend

SCALE = 0.3


class Seen(NamedTuple):
    """What a query sees, in the packages' form."""

    causal: bool = True
    left: int = -1  # the number of tokens before it; all if negative
    soft_cap: float | None = None


CAUSAL = Seen()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen = CAUSAL) -> Tensor:
    """q: [n, heads, d], the last n of the len(k) positions; k, v: [m, kv heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.to(q.dtype), v.to(q.dtype)  # from FP8
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if seen.soft_cap is not None:
        scores = seen.soft_cap * torch.tanh(scores / seen.soft_cap)
    if seen.causal or seen.left >= 0:
        ones, shift = torch.ones(len(q), len(k), dtype=torch.bool), len(k) - len(q)
        hidden = ones.triu(1 + shift) if seen.causal else ~ones
        if seen.left >= 0:
            hidden = hidden | ones.tril(shift - seen.left - 1)
        scores.masked_fill_(hidden, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)


def tokens_of(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of the pages; a page outside the cache is an IndexError."""
    assert pages.dtype == torch.int32
    return cache[pages.long()].flatten(0, 1)[:length]


def check_ints(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.stride(0) == 1


class PagedWrapper:
    """The common part of the wrappers for decode and for prefill. `buffer` represents pinned
    memory: a plan is written there at once, and read when the device executes the step."""

    made: list[PagedWrapper]
    stream: list[Callable[[], None]] | None = None  # what the device has yet to do; None: nothing

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD"
        self.buffer: dict[str, Any] = {}
        self.made.append(self)

    def _plan(self, **arguments: Any) -> None:
        check_ints(*(arguments[name] for name in ("indptr", "indices", "last_page_len")))
        check_ints(arguments["qo_indptr"], arguments["seq_lens"])
        assert len(arguments["indices"]) == arguments["indptr"][-1]
        self.buffer = arguments

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, q_scale: float, out: Tensor
    ) -> Tensor:
        def kernel() -> None:
            self._attend(q, *paged_kv_cache, q_scale, out)

        if PagedWrapper.stream is None:
            kernel()
        else:
            PagedWrapper.stream.append(kernel)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        plan = self.buffer
        assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim"])
        assert k.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim"])
        assert q.dtype == plan["q_data_type"] and k.dtype == plan["kv_data_type"]
        assert len(q) == plan["qo_indptr"][-1]
        for row, last in enumerate(plan["last_page_len"].tolist()):
            first_page, end_page = plan["indptr"][row : row + 2].tolist()
            pages = plan["indices"][first_page:end_page]
            length = (end_page - first_page - 1) * plan["page_size"] + last
            assert 1 <= last <= plan["page_size"] and length == plan["seq_lens"][row]
            part = slice(*plan["qo_indptr"][row : row + 2].tolist())
            out[part] = attend(
                q[part],
                tokens_of(k, pages, length),
                tokens_of(v, pages, length),
                plan["sm_scale"] * scale,
                Seen(plan["causal"], plan["window_left"], plan["logits_soft_cap"]),
            )


class DecodeWrapper(PagedWrapper):
    made: list[PagedWrapper] = []  # noqa: RUF012

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        assert not use_cuda_graph
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        seq_lens: Tensor,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8)  # the kernels that exist
        self._plan(
            qo_indptr=torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=False,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            seq_lens=seq_lens,
        )


class PrefillWrapper(PagedWrapper):
    backend: str
    made: list[PagedWrapper] = []  # noqa: RUF012

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        self.backend = backend
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        seq_lens: Tensor,
        max_token_per_sequence: int,
    ) -> None:
        assert max_token_per_sequence == qo_indptr.diff().max()
        self._plan(
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            causal=causal,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            seq_lens=seq_lens,
        )


class LatentWrapper(PagedWrapper):
    """For decode and for prefill, over latents and what is behind them."""

    made: list[PagedWrapper] = []  # noqa: RUF012

    def __init__(
        self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False, *, backend: str = "auto"
    ) -> None:
        assert not use_cuda_graph and backend == "auto"
        super().__init__(float_workspace_buffer, "NHD")

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        last = (kv_len_arr - 1) % page_size + 1
        assert causal and not use_profiler and q_data_type == kv_data_type
        self.widths = head_dim_ckv, head_dim_kpe
        self._plan(
            qo_indptr=qo_indptr,
            indptr=kv_indptr,
            indices=kv_indices,
            last_page_len=last,
            num_qo_heads=num_heads,
            num_kv_heads=1,
            head_dim=head_dim_ckv + head_dim_kpe,
            page_size=page_size,
            causal=causal,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            window_left=-1,
            logits_soft_cap=None,
            seq_lens=kv_len_arr,
        )

    def run(  # type: ignore[override]
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, out: Tensor
    ) -> Tensor:
        assert (ckv_cache.shape[2], kpe_cache.shape[2]) == self.widths
        assert out.shape == q_nope.shape and out.dtype == q_nope.dtype
        # The kernel takes the strides of pages, tokens and heads.
        assert {each.stride(2) for each in (q_nope, q_pe, ckv_cache, kpe_cache, out)} == {1}
        keys = torch.cat((ckv_cache, kpe_cache), 2).unsqueeze(2)
        q, values = torch.cat((q_nope, q_pe), 2), ckv_cache.unsqueeze(2)
        return super().run(q, (keys, values), q_scale=1.0, out=out)


def attend_by_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    seen: Seen = CAUSAL,
) -> Tensor:
    """Row i of `table` and `lengths` serves the queries from starts[i] to starts[i + 1]."""
    check_ints(lengths, starts)
    assert table.dtype == torch.int32 and len(table) == len(lengths) == len(starts) - 1
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        pages = table[row, : -(-length // k.shape[1])]
        part = slice(*starts[row : row + 2].tolist())
        keys, values = tokens_of(k, pages, length), tokens_of(v, pages, length)
        out[part] = attend(q[part], keys, values, scale, seen)
    return out


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    *,
    kv_layout: str = "HND",
) -> Tensor:
    assert kv_layout == "NHD" and kv_cache[0].shape[1] in (16, 32, 64)
    assert not workspace_buffer.any() and workspace_buffer.dtype == torch.uint8
    # The kernel goes by pointers alone.
    assert query.is_contiguous() and block_tables.is_contiguous()
    assert max_seq_len == block_tables.shape[1] * kv_cache[0].shape[1] >= seq_lens.max()
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    seen = Seen(left=window_left)
    out = attend_by_table(query, *kv_cache, block_tables, seq_lens, starts, bmm1_scale, seen)
    return out * bmm2_scale


def decode_by_table(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float, seen: Seen
) -> Tensor:
    """q: [num_rows, 1, num_heads, head_dim]."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    return attend_by_table(q.squeeze(1), k, v, table, lengths, starts, scale, seen).unsqueeze(1)


def seen_by(window_size: tuple[int, int], softcap: float) -> Seen:
    """As the generations of flash-attn take it: (-1, -1) and 0.0 if there are none."""
    left, right = window_size
    assert right == (0 if left >= 0 else -1)
    return Seen(left=left, soft_cap=softcap or None)


def flash_2() -> ModuleType:
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        assert k_cache.shape[1] % 256 == 0 and causal
        seen = seen_by(window_size, softcap)
        return decode_by_table(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, seen)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        block_table: Tensor,
    ) -> Tensor:
        assert k.shape[1] % 256 == 0 and causal
        seen = seen_by(window_size, softcap)
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_k == lengths.max() and max_seqlen_q == cu_seqlens_q.diff().max()
        return attend_by_table(q, k, v, block_table, lengths, cu_seqlens_q, softmax_scale, seen)

    return module(
        "flash_attn",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )


def flash_3() -> ModuleType:
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        assert causal
        seen = seen_by(window_size, softcap)
        if cu_seqlens_q is None:
            return decode_by_table(
                q, k_cache, v_cache, page_table, cache_seqlens, softmax_scale, seen
            )
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        return attend_by_table(
            q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, seen
        )

    return module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def flash_4() -> ModuleType:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:
        assert causal
        seen = seen_by(window_size, softcap)
        if cu_seqlens_q is None:
            return decode_by_table(q, k, v, page_table, seqused_k, softmax_scale, seen), None
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == seqused_k.max()
        starts = cu_seqlens_q
        return attend_by_table(q, k, v, page_table, seqused_k, starts, softmax_scale, seen), None

    return module("flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func)


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


FLASH = {
    "fa2": ("flash_attn", flash_2),
    "fa3": ("flash_attn_interface", flash_3),
    "fa4": ("flash_attn.cute", flash_4),
}

# -- what is under test --------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs substitutes: flashinfer always, and the named generations of flash-attn."""
    absent = ("flash_attn", "flash_attn_interface", "flash_attn.cute")
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    wrappers = {
        "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
        "BatchMLAPagedAttentionWrapper": LatentWrapper,
    }
    decode = module(
        "flashinfer.decode", trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module("flashinfer", decode=decode, **wrappers))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(DecodeWrapper, "made", [])
    monkeypatch.setattr(PrefillWrapper, "made", [])
    monkeypatch.setattr(LatentWrapper, "made", [])

    def install(*generations: str) -> None:
        for name in absent:
            sys.modules[name] = None  # type: ignore[assignment]
        for generation in generations:
            name, make = FLASH[generation]
            if name == "flash_attn.cute" and "fa2" not in generations:
                sys.modules["flash_attn"] = module("flash_attn", __path__=[])
            sys.modules[name] = make()

    return install
