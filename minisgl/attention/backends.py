"""The attention backends by the names that `--attn` knows them by."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path

from minisgl.attention.base import Attention, AttentionBackend, AttentionShape
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import ATTENTION_BACKENDS

ComputeCapability = tuple[int, int]

# Best first. On Hopper trtllm decodes by XQA, without a plan, and prefills as fi does.
_ON_HOPPER = ("trtllm", "fi", "fa", "triton", "torch")
_ELSEWHERE = ("fi", "fa", "trtllm", "triton", "torch")

_OLDEST = (8, 0)
_TRTLLM_MAJORS = (9, 10, 12)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_LARGEST_FLASH_HEAD_DIM = 256


def make_attention(prefill: str, decode: str, shape: AttentionShape | None = None) -> Attention:
    """The pair of backends; one object where both names are the same.

    fi and trtllm need `shape`. Optional packages are imported here and nowhere before: ImportError
    where they are missing.
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
                raise ValueError(f"{name} must know the heads and pages that it plans for")
            return FlashInferAttention(shape) if name == "fi" else TrtllmAttention(shape)
        case "torch":
            return TorchAttention()
        case "triton":  # imported here: not every platform has Triton
            from minisgl.attention.triton_backend import TritonAttention

            return TritonAttention()
        case _:
            raise ValueError(f"no attention backend {name}; the config lets none through")


def available_backends(
    compute_capability: ComputeCapability | None, head_dim: int, dtype: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backends that run such a model here, best first, and why the others do not.

    compute_capability: of the GPU, None without one. Imports the packages, which takes seconds,
    but compiles nothing.
    """
    order = _ON_HOPPER if compute_capability and compute_capability[0] == 9 else _ELSEWHERE
    missing = {
        name: reason
        for name in ATTENTION_BACKENDS
        if (reason := _why_missing(name, compute_capability, head_dim, dtype)) is not None
    }
    return tuple(name for name in order if name not in missing), missing


def _why_missing(
    name: str, compute_capability: ComputeCapability | None, head_dim: int, dtype: str
) -> str | None:
    """One short sentence; None if nothing speaks against `name`."""
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
            return _why_no_flash(head_dim, dtype)
        case _:
            return _why_no_flashinfer(name, compute_capability, head_dim, dtype)


def _why_no_flash(head_dim: int, dtype: str) -> str | None:
    if dtype == "float32":
        return "flash-attn computes in bfloat16 and float16 only"
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
    name: str, compute_capability: ComputeCapability, head_dim: int, dtype: str
) -> str | None:
    if dtype == "float32":
        return f"{name} computes in bfloat16 and float16 only"
    if head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"FlashInfer has no kernels for head_dim {head_dim}"
    if name == "trtllm" and compute_capability[0] not in _TRTLLM_MAJORS:
        return "trtllm's kernels are for Hopper and Blackwell"
    reason = _why_not_importable("flashinfer", "flashinfer-python")
    if reason is None and not (_is_installed("flashinfer_jit_cache") or _finds_nvcc()):
        return "FlashInfer compiles its kernels with nvcc, which is not here"
    return reason


def _why_not_importable(module: str, package: str) -> str | None:
    if not _is_installed(module):
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # an optional package that is broken must not stop the engine
        return f"{package} does not import: {error}"
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _finds_nvcc() -> bool:
    """Looks where FlashInfer looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()
