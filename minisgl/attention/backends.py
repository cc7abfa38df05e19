"""Selects attention backends, by the names that `--attn` takes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from minisgl.attention.base import Attention, AttentionBackend, AttentionShape
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import ATTENTION_BACKENDS, AttentionSpec
from minisgl.kernels.hardware import ComputeCapability

# The backends of each phase from best to worst, measured on an H200: heads of 128, with 16, 32, 40
# and 64 query heads over 8 KV heads, in pages of 1, 16 and 64 tokens.
#
# - decode, 256 rows of 800 tokens and 64 of 4,096: triton reads 3.9 to 4.1 TB/s at every ratio
#   and page size, more than any other; 1 row of 800 takes 7.4 µs. fi plans on the host, so its
#   decode cannot be captured in a CUDA graph.
# - prefill, 8 chunks of 2,048 tokens, 32 over 8 heads: fi (FlashAttention 3) 447 TFLOP/s;
#   triton 304, and 369 with pages of 64 tokens.
#
# trtllm uses the prefill of fi. fa comes after torch, since its adapter has only met stand-ins of
# flash-attn and has not run on a GPU.
BEST_FIRST = {
    "prefill": ("fi", "trtllm", "triton", "torch", "fa"),
    "decode": ("triton", "trtllm", "fi", "torch", "fa"),
}

# Features of backends beyond plain causal attention, as named by AttentionSpec.extras.
_COMPUTED_EXTRAS: dict[str, tuple[str, ...]] = {}

_OLDEST = (8, 0)
_TRTLLM_MAJORS = (9, 10, 12)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_LARGEST_FLASH_HEAD_DIM = 256


def make_attention(prefill: str, decode: str, shape: AttentionShape | None = None) -> Attention:
    """Make the pair of backends with these names; one object serves both if they are equal.

    Raises ValueError if fi or trtllm is made without `shape`. Imports the optional packages, and
    raises ImportError if one is missing.
    """
    first = _make(prefill, shape)
    return Attention(first, first if decode == prefill else _make(decode, shape))


def _make(name: str, shape: AttentionShape | None) -> AttentionBackend:
    match name:
        case "fa":
            from minisgl.attention.flash_backend import FlashAttention

            return FlashAttention()
        case "fi" | "trtllm":
            from minisgl.attention.flashinfer_backend import FlashInferAttention, TrtllmAttention

            if shape is None:
                raise ValueError(f"{name} needs the sizes of heads and pages that it plans for")
            return FlashInferAttention(shape) if name == "fi" else TrtllmAttention(shape)
        case "torch":
            return TorchAttention()
        case "triton":  # imported here, because not every platform has Triton
            from minisgl.attention.triton_backend import TritonAttention

            return TritonAttention()
        case _:
            raise ValueError(f"there is no attention backend {name}")


@dataclass(frozen=True, slots=True)
class Available:
    """The backends that can run a model on this machine."""

    prefill: tuple[str, ...]  # best first
    decode: tuple[str, ...]  # best first
    missing: dict[str, str]  # why the other backends cannot


def available_backends(
    compute_capability: ComputeCapability | None, layers: Sequence[AttentionSpec]
) -> Available:
    """The backends that can run a model here in half precision. (Only triton and torch support
    float32.)

    compute_capability: of the GPU, None without one. layers: the attention of each layer on one
    rank. Imports the packages, which takes seconds, but compiles nothing.
    """
    missing = {
        name: reason
        for name in ATTENTION_BACKENDS
        if (reason := _why_missing(name, compute_capability, set(layers))) is not None
    }
    prefill, decode = (
        tuple(name for name in BEST_FIRST[phase] if name not in missing)
        for phase in ("prefill", "decode")
    )
    return Available(prefill, decode, missing)


def flash_page_multiple() -> int:
    """The page size of fa must be a multiple of this; 1 if fa cannot be imported."""
    from minisgl.attention.flash_backend import load_kernels

    try:
        return load_kernels().page_multiple
    except ImportError:
        return 1


def _why_missing(
    name: str, compute_capability: ComputeCapability | None, layers: Set[AttentionSpec]
) -> str | None:
    """The reason why `name` cannot run, as one short sentence; None if it can."""
    if (reason := _why_not_computed(name, layers)) is not None:
        return reason
    if name == "torch":
        return None
    if compute_capability is None:
        return f"{name} needs a GPU"
    if compute_capability < _OLDEST:
        return f"{name} needs a GPU of compute capability 8.0 or newer"
    match name:
        case "triton":
            return _why_not_importable("triton", "triton")
        case "fa":
            return _why_no_flash(layers)
        case _:
            return _why_no_flashinfer(name, compute_capability, layers)


def _why_not_computed(name: str, layers: Iterable[AttentionSpec]) -> str | None:
    extras = dict.fromkeys(extra for spec in layers for extra in spec.extras())
    missing = [extra for extra in extras if extra not in _COMPUTED_EXTRAS.get(name, ())]
    return f"{name} computes no {' and no '.join(missing)}" if missing else None


def _why_no_flash(layers: Iterable[AttentionSpec]) -> str | None:
    for head_dim in sorted({spec.head_dim for spec in layers}):
        if head_dim % 8 or head_dim > _LARGEST_FLASH_HEAD_DIM:
            return f"flash-attn has no kernels for head_dim {head_dim}"
    if not any(_is_installed(module) for module in ("flash_attn", "flash_attn_interface")):
        return "flash-attn is not installed"
    from minisgl.attention.flash_backend import load_kernels

    try:
        load_kernels()
    except ImportError as error:
        return f"flash-attn does not import: {error}"
    return None


def _why_no_flashinfer(
    name: str, compute_capability: ComputeCapability, layers: Set[AttentionSpec]
) -> str | None:
    for head_dim in sorted({spec.head_dim for spec in layers}):
        if head_dim not in _FLASHINFER_HEAD_DIMS:
            return f"FlashInfer has no kernels for head_dim {head_dim}"
    if len({(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in layers}) > 1:
        return "FlashInfer plans a step once, for layers with the same heads"
    if name == "trtllm" and compute_capability[0] not in _TRTLLM_MAJORS:
        return "trtllm's kernels are for Hopper and Blackwell"
    reason = _why_not_importable("flashinfer", "flashinfer-python")
    if reason is None and not (_is_installed("flashinfer_jit_cache") or _finds_nvcc()):
        return "FlashInfer compiles its kernels with nvcc, which is not installed"
    return reason


def _why_not_importable(module: str, package: str) -> str | None:
    if not _is_installed(module):
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken optional package must not stop the engine
        return f"{package} does not import: {error}"
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _finds_nvcc() -> bool:
    """True if FlashInfer will find nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()
