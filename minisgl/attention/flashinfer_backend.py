"""Paged attention with FlashInfer's kernels (Ye et al., arXiv 2501.01005).

FlashInfer is an optional package that compiles its kernels with nvcc at first use. It is imported
only if one of the two backends is selected.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttentionCall, AttentionShape, DecodeBatch, PrefillBatch
from minisgl.attention.declaration import Backend, is_installed, why_not_importable
from minisgl.config import (
    LATENTS,
    OTHER_VALUES,
    SOFT_CAPS,
    WINDOWS,
    AttentionSpec,
    BackendFacts,
)
from minisgl.kernels.hardware import ComputeCapability

_HEAD_DIMS = (64, 128, 256)
_LATENT_DIMS = (576, 512)  # of keys, and of their first numbers that are the values
# Of queries and their heads of the kernel for latents, where there is more than one tile of 64; and
# the work items for which a plan has room, but for those of splits. Up to so many chunks of a step
# may end with a tile that is not full.
_LATENT_TILE, _MOST_LATENT_TILES = 128, 16384 - 1024
_LATENT_CHUNKS = 4096
_TRTLLM_MAJORS = (9, 10, 12)  # of the compute capability
_BEST_PAGE_SIZE = 64  # at which the kernels of FlashInfer and TensorRT-LLM are fastest
_FP8_PREFILL_NOTE = "prefills by FlashAttention 2: 3 reads FP8 for queries in FP8 alone"

# Numbers of query heads per KV head at which decode on CUDA cores is memory-bound. With more,
# tensor cores are faster (measured on an H200 at 2 and 4, and at 5 and 8).
CUDA_CORE_GROUPS = frozenset((1, 2, 3, 4))

# One running, one queued, one spare.
STEPS_IN_FLIGHT = 3
# As FlashInfer recommends.
WORKSPACE_BYTES = 128 << 20
# Maximum number of queries per tile, and blocks per SM, of the prefill kernel for Ampere.
_QUERY_TILE = 128
_BLOCKS_PER_SM = 2


class FlashInferAttention:
    """Implements AttentionBackend and HostPlanned, in float16 and bfloat16.

    A plan is made on the host and copied asynchronously from pinned memory. The copy may wait for
    earlier steps on the stream, so each step uses wrappers of its own, which are reused after
    `steps_in_flight` steps. By then the caller must have collected the earlier step. Layers share a
    plan unless they differ in their heads, window or soft cap, or, over latents, in their scale.

    Layers over latents have a kernel of their own for either phase, which reads the latents and
    what is behind them where they are, in one cache.
    """

    def __init__(self, shape: AttentionShape, *, steps_in_flight: int = STEPS_IN_FLIGHT) -> None:
        import flashinfer

        self._shape = shape
        self._flashinfer = flashinfer
        plans = {
            layer: layer if layer.v_in_k else replace(layer, scale=1.0) for layer in shape.layers
        }
        self._decodes = _Rotation(self._make_decode_wrapper, plans, steps_in_flight)
        self._chunks = _Rotation(self._make_prefill_wrapper, plans, steps_in_flight)
        # Partial results within one kernel, so all wrappers can share it.
        self._scratch: Tensor | None = None

    def plan_decode(self, batch: DecodeBatch) -> None:
        """Plan the decode rows of a step. Without `lengths_host` the host waits for the device, to
        read them there."""
        lengths = batch.lengths_host
        if lengths is None:  # rows of the scratch slot, which have none, may be among them
            lengths = [max(1, length) for length in batch.lengths.tolist()]
        page_size = self._shape.page_size
        pages = list_pages(batch.page_table, lengths, page_size)
        for layer, wrapper in self._decodes.next(batch).items():
            if layer.v_in_k:
                self._plan_latents(wrapper, layer, pages, [1] * len(lengths))
                continue
            wrapper.plan(
                pages.indptr,
                pages.indices,
                pages.last_lengths,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                page_size,
                **self._options(layer),
                seq_lens=pages.lengths,
            )

    def plan_prefill(self, batch: PrefillBatch) -> None:
        """Queue the plan of a step's chunks."""
        page_size = self._shape.page_size
        ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
        pages = list_pages(batch.page_table, ends, page_size, batch.lengths)
        for layer, wrapper in self._chunks.next(batch).items():
            if layer.v_in_k:
                self._plan_latents(wrapper, layer, pages, batch.lengths)
                continue
            wrapper.plan(
                pages.query_indptr,
                pages.indptr,
                pages.indices,
                pages.last_lengths,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                page_size,
                causal=True,
                **self._options(layer),
                seq_lens=pages.lengths,
                max_token_per_sequence=max(batch.lengths),
            )

    def _plan_latents(
        self, wrapper: Any, layer: AttentionSpec, pages: PageLists, num_queries: Sequence[int]
    ) -> None:
        if (num_tiles := _latent_tiles(layer, num_queries)) > _MOST_LATENT_TILES:
            raise ValueError(
                f"FlashInfer plans {_MOST_LATENT_TILES:,} tiles of queries over latents at most, "
                f"and a step has {num_tiles:,}: lower --max-prefill-length, or choose --attn triton"
            )
        assert layer.value_dim is not None
        wrapper.plan(
            pages.query_indptr,
            pages.indptr,
            pages.indices,
            pages.lengths,
            layer.num_heads,
            layer.value_dim,
            layer.head_dim - layer.value_dim,
            self._shape.page_size,
            causal=True,
            sm_scale=layer.scale,
            q_data_type=self._shape.dtype,
            kv_data_type=self._shape.kv_dtype,
        )

    def _options(self, layer: AttentionSpec) -> dict[str, Any]:
        """Those that both kinds of plans have."""
        return {
            "q_data_type": self._shape.dtype,
            "kv_data_type": self._shape.kv_dtype,
            "sm_scale": 1.0,
            "window_left": _window_left(layer),
            "logits_soft_cap": layer.softcap,
        }

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        return _run(self._decodes.planned(batch, call.spec), call)

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        return _run(self._chunks.planned(batch, call.spec), call)

    def _make_decode_wrapper(self, layer: AttentionSpec, device: torch.device) -> Any:
        if layer.v_in_k:
            return self._make_latent_wrapper(device)
        group = layer.num_heads // layer.num_kv_heads
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._scratch_on(device), "NHD", use_tensor_cores=group not in CUDA_CORE_GROUPS
        )

    def _make_prefill_wrapper(self, layer: AttentionSpec, device: torch.device) -> Any:
        if layer.v_in_k:
            return self._make_latent_wrapper(device)
        # auto: fa3 on sm_90, fa2 elsewhere. fa3 reads FP8 only with queries in FP8.
        fp8 = self._shape.kv_dtype != self._shape.dtype
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._scratch_on(device), "NHD", backend="fa2" if fp8 else "auto"
        )

    def _make_latent_wrapper(self, device: torch.device) -> Any:
        return self._flashinfer.BatchMLAPagedAttentionWrapper(self._scratch_on(device))

    def _scratch_on(self, device: torch.device) -> Tensor:
        if self._scratch is None:
            num_bytes = max(_scratch_bytes(layer, device) for layer in self._shape.layers)
            self._scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch


class TrtllmAttention:
    """Decode with TensorRT-LLM's kernels (XQA on Hopper), without a plan; can be captured.

    Page table and lengths are read on the device. The grid depends only on the number of rows and
    the width of the page table, so a captured step serves every length that its table can hold.
    Pages must have 16, 32 or 64 tokens. TensorRT-LLM's paged prefill requires Blackwell;
    FlashInferAttention does the prefill instead.

    XQA triggers the launch of the next kernel (PDL) before XQA itself has waited for the previous
    one. So a kernel launched right after decode must not read the output of the kernel before
    decode until it has executed its own wait.
    """

    def __init__(self, shape: AttentionShape, *, steps_in_flight: int = STEPS_IN_FLIGHT) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        self._decode = trtllm_batch_decode_with_kv_cache
        self._prefill = FlashInferAttention(shape, steps_in_flight=steps_in_flight)
        # The first 8 MiB are counters that every kernel expects to be zero and resets, so the
        # workspace must not be shared with other uses.
        self._workspace: Tensor | None = None

    def plan_decode(self, batch: DecodeBatch) -> None:
        """Allocate the workspace, which must exist before a capture."""
        if self._workspace is None:
            device = batch.page_table.device
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan_prefill(self, batch: PrefillBatch) -> None:
        self._prefill.plan_prefill(batch)

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        kv, spec = call.kv, call.spec
        out: Tensor = self._decode(
            call.q.contiguous(),  # the kernel takes no strides of these three
            (kv.k, kv.v),
            self._workspace,
            batch.page_table.contiguous(),
            batch.lengths.contiguous(),
            max_seq_len=batch.page_table.shape[1] * kv.page_size,
            bmm1_scale=spec.scale * kv.scales.k,
            bmm2_scale=kv.scales.v,
            window_left=_window_left(spec),
            kv_layout="NHD",
        )
        return out

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        return self._prefill.prefill(call, batch)


@dataclass(frozen=True, slots=True)
class PageLists:
    """The concatenated pages of a step's rows. All int32 and on the host, except `indices`; in
    pinned memory if the device is a GPU."""

    indptr: Tensor  # [num_rows + 1]: start of each row's pages
    indices: Tensor  # [indptr[-1]], on the device
    last_lengths: Tensor  # [num_rows]: tokens in a row's last page
    lengths: Tensor  # [num_rows]: tokens attended to
    query_indptr: Tensor  # [num_rows + 1]: start of each row's queries


def list_pages(
    page_table: Tensor,
    lengths: Sequence[int],
    page_size: int,
    num_queries: Sequence[int] | None = None,
) -> PageLists:
    """Concatenate the defined columns of `page_table` [n, max_pages], asynchronously.

    lengths: tokens of each row; num_queries: queries of each row, one by default.
    """
    counts = [-(-length // page_size) for length in lengths]
    begins = list(itertools.accumulate(counts, initial=0))
    width = page_table.shape[1]
    # Offsets from the index of a page in the lists to its index in the flattened table.
    shifts = [row * width - begin for row, begin in enumerate(begins[:-1])]
    parts = (
        begins,
        [(length - 1) % page_size + 1 for length in lengths],
        lengths,
        list(itertools.accumulate(num_queries or [1] * len(lengths), initial=0)),
        counts,
        shifts,
    )
    packed = torch.tensor(
        [value for part in parts for value in part],
        dtype=torch.int32,
        pin_memory=page_table.is_cuda,
    )
    sizes = [len(part) for part in parts]
    indptr, last_lengths, host_lengths, query_indptr, _, _ = packed.split(sizes)
    on_device = packed.to(page_table.device, non_blocking=True).split(sizes)
    places = torch.arange(begins[-1], dtype=torch.int32, device=page_table.device)
    places += torch.repeat_interleave(on_device[5], on_device[4], output_size=begins[-1])
    return PageLists(
        indptr=indptr,
        indices=page_table.flatten().index_select(0, places),
        last_lengths=last_lengths,
        lengths=host_lengths,
        query_indptr=query_indptr,
    )


class _Rotation:
    """FlashInfer wrappers used in rotation, each with its own pinned and device buffers: for each
    step one of each plan."""

    def __init__(
        self,
        make: Callable[[AttentionSpec, torch.device], Any],
        plans: Mapping[AttentionSpec, AttentionSpec],
        size: int,
    ) -> None:
        """plans: of each layer, the one that all of its plan share."""
        self._make = make
        self._plans = plans
        self._size = size
        self._steps: deque[dict[AttentionSpec, Any]] = deque()
        self._batch: DecodeBatch | PrefillBatch | None = None

    def next(self, batch: DecodeBatch | PrefillBatch) -> dict[AttentionSpec, Any]:
        """Assign the least recently used wrappers to `batch`, for its plans."""
        self._batch = batch
        if len(self._steps) < self._size:
            device = batch.page_table.device
            self._steps.append(
                {plan: self._make(plan, device) for plan in set(self._plans.values())}
            )
        else:
            self._steps.rotate(-1)
        return self._steps[-1]

    def planned(self, batch: DecodeBatch | PrefillBatch, layer: AttentionSpec) -> Any:
        """The wrapper of a layer that `batch` was planned with. Raises RuntimeError if another
        batch was planned since."""
        if batch is not self._batch:
            raise RuntimeError("Attention.prepare must plan a step's rows before its first layer")
        return self._steps[-1][self._plans[layer]]


def _run(wrapper: Any, call: AttentionCall) -> Tensor:
    """Run a plan. Plans are made with a scale of one, which `q_scale` multiplies, but those over
    latents."""
    q, kv = call.q, call.kv
    if call.spec.v_in_k:
        rank = kv.v.shape[3]
        latents, tails = kv.k.squeeze(2).tensor_split((rank,), dim=2)
        of_latents, of_tails = q.tensor_split((rank,), dim=2)
        result: Tensor = wrapper.run(
            of_latents, of_tails, latents, tails, out=q.new_empty(of_latents.shape)
        )
        return result
    scale = call.spec.scale * kv.scales.k
    out: Tensor = wrapper.run(q, (kv.k, kv.v), q_scale=scale, out=q.new_empty(q.shape))
    return out if kv.scales.v == 1 else out.mul_(kv.scales.v)


def _window_left(layer: AttentionSpec) -> int:
    """The number of tokens before a query that it sees, in FlashInfer's form."""
    return -1 if layer.window is None else layer.window - 1


def _scratch_bytes(layer: AttentionSpec, device: torch.device) -> int:
    """Bytes of the largest partial results, those of fa2 prefill with split keys."""
    if device.type != "cuda" or layer.v_in_k:
        return WORKSPACE_BYTES
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    group = layer.num_heads // layer.num_kv_heads
    num_queries = group * _BLOCKS_PER_SM * num_sms * _QUERY_TILE
    return max(WORKSPACE_BYTES, num_queries * (layer.head_dim + 1) * 4 + 256)


def _latent_tiles(layer: AttentionSpec, num_queries: Sequence[int]) -> int:
    """The number of tiles of queries that a plan has, without those of splits."""
    num_pairs = [number * layer.num_heads for number in num_queries]
    tile = (
        _LATENT_TILE if sum(num_pairs) > len(num_pairs) * _LATENT_TILE // 2 else _LATENT_TILE // 2
    )
    return sum(-(-number // tile) for number in num_pairs)


def _facts_with(facts: BackendFacts, layers: Set[AttentionSpec]) -> BackendFacts:
    """Over latents no cache in FP8 is read, and a plan has room for so many queries."""
    most_heads = max((layer.num_heads for layer in layers if layer.v_in_k), default=0)
    if not most_heads:
        return facts
    most = (_MOST_LATENT_TILES - _LATENT_CHUNKS) * _LATENT_TILE // most_heads
    return replace(facts, fp8_rank=None, most_prompt_tokens=most)


def _why_missing(capability: ComputeCapability, layers: Set[AttentionSpec]) -> str | None:
    return _why_no_kernels(layers) or _why_not_installed()


def _why_trtllm_missing(capability: ComputeCapability, layers: Set[AttentionSpec]) -> str | None:
    if capability[0] in _TRTLLM_MAJORS:
        return _why_missing(capability, layers)
    return _why_no_kernels(layers) or "trtllm's kernels are for Hopper and Blackwell"


def _why_no_kernels(layers: Set[AttentionSpec]) -> str | None:
    for spec in sorted(layers, key=lambda layer: layer.head_dim):
        if spec.v_in_k:
            if (spec.head_dim, spec.value_dim) != _LATENT_DIMS:
                width, rest = _LATENT_DIMS[1], _LATENT_DIMS[0] - _LATENT_DIMS[1]
                return f"FlashInfer reads latents of {width} numbers with {rest} behind them only"
            if spec.window is not None or spec.softcap is not None:
                return f"FlashInfer computes no {WINDOWS} and no {SOFT_CAPS} over latents"
        elif OTHER_VALUES in spec.extras():
            return f"FlashInfer computes no {OTHER_VALUES}"
        elif spec.head_dim not in _HEAD_DIMS:
            return f"FlashInfer has no kernels for head_dim {spec.head_dim}"
    return None


def _why_not_installed() -> str | None:
    reason = why_not_importable("flashinfer", "flashinfer-python")
    if reason is None and not (is_installed("flashinfer_jit_cache") or _finds_nvcc()):
        return "FlashInfer compiles its kernels with nvcc, which is not installed"
    return reason


def _finds_nvcc() -> bool:
    """True if FlashInfer will find nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()


def _given(shape: AttentionShape | None, name: str) -> AttentionShape:
    if shape is None:
        raise ValueError(f"{name} needs the sizes of heads and pages that it plans for")
    return shape


FLASHINFER = Backend(
    facts=BackendFacts(
        name="fi",
        # On an H200, see backends.py: prefill 447 TFLOP/s (FlashAttention 3). Decode is planned on
        # the host, so it cannot be captured in a CUDA graph.
        prefill_rank=1,
        decode_rank=3,
        fp8_rank=2,
        fp8_prefill_note=_FP8_PREFILL_NOTE,
        extras=(WINDOWS, SOFT_CAPS, OTHER_VALUES, LATENTS),
        best_page_size=_BEST_PAGE_SIZE,
        pages_are_powers_of_two=True,
    ),
    make=lambda shape: FlashInferAttention(_given(shape, "fi")),
    why_missing=_why_missing,
    facts_with=_facts_with,
)
TRTLLM = Backend(
    facts=BackendFacts(
        name="trtllm",
        prefill_rank=2,  # that of fi
        decode_rank=2,
        fp8_rank=2,
        fp8_prefill_note=_FP8_PREFILL_NOTE,
        fp8_decode_note="decodes with queries and probabilities in FP8 on Hopper",
        extras=(WINDOWS,),
        captures_decode=True,
        best_page_size=_BEST_PAGE_SIZE,
        page_sizes=(16, 32, 64),
    ),
    make=lambda shape: TrtllmAttention(_given(shape, "trtllm")),
    why_missing=_why_trtllm_missing,
)
