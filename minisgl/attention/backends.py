"""Selects attention backends, by the names that `--attn` takes.

The file of each backend declares what it can do, and its ranks: the order in which `auto` prefers
backends, measured on an H200 with heads of 128, with 16, 32, 40 and 64 query heads over 8 KV heads,
in pages of 1, 16 and 64 tokens. Decode: 256 rows of 800 tokens and 64 of 4,096. Prefill: 8 chunks
of 2,048 tokens, 32 over 8 heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from minisgl.attention.base import Attention, AttentionShape
from minisgl.attention.declaration import Backend
from minisgl.attention.flash_backend import FLASH
from minisgl.attention.flashinfer_backend import FLASHINFER, TRTLLM
from minisgl.attention.torch_backend import TORCH
from minisgl.attention.triton_backend import TRITON
from minisgl.config import AttentionSpec, BackendFacts, best_first
from minisgl.kernels.hardware import ComputeCapability

# In the order of ATTENTION_BACKENDS, the names that the option takes.
BACKENDS = {backend.facts.name: backend for backend in (FLASH, FLASHINFER, TRTLLM, TRITON, TORCH)}

_OLDEST = (8, 0)


def make_attention(prefill: str, decode: str, shape: AttentionShape | None = None) -> Attention:
    """Make the pair of backends with these names; one object serves both if they are equal.

    Raises ValueError if fi or trtllm is made without `shape`. Imports the optional packages, and
    raises ImportError if one is missing.
    """
    first = _named(prefill).make(shape)
    return Attention(first, first if decode == prefill else _named(decode).make(shape))


def make_captured_attention(
    attention: Attention, prefill: str, shape: AttentionShape | None
) -> Attention:
    """`attention`, whose backend of prefill is named, for steps in which only the device knows the
    chunks."""
    if _named(prefill).facts.captures_chunks:
        return attention
    capturing = next(each for each in BACKENDS.values() if each.facts.captures_chunks)
    return Attention(capturing.make(shape), attention.decode_backend)


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name}")
    return BACKENDS[name]


@dataclass(frozen=True, slots=True)
class Available:
    """What can run a model on this machine."""

    backends: tuple[BackendFacts, ...]  # all that are declared
    missing: dict[str, str]  # by name, why some of them cannot

    def best_first(self, phase: str) -> tuple[str, ...]:
        """The names of those that can, for prefill or decode."""
        names = (backend.name for backend in best_first(self.backends, phase))
        return tuple(name for name in names if name not in self.missing)


def available_backends(
    compute_capability: ComputeCapability | None, layers: Sequence[AttentionSpec]
) -> Available:
    """The backends that can run a model here in half precision.

    compute_capability: of the GPU, None without one. layers: the attention of each layer on one
    rank. Imports the packages, which takes seconds, but compiles nothing.
    """
    missing = {
        name: reason
        for name, backend in BACKENDS.items()
        if (reason := _why_missing(backend, compute_capability, set(layers))) is not None
    }
    facts = (
        backend.facts if name in missing else backend.facts_with(backend.facts, set(layers))
        for name, backend in BACKENDS.items()
    )
    return Available(tuple(facts), missing)


def _extras(layers: Iterable[AttentionSpec]) -> tuple[str, ...]:
    """The features that some of the layers have."""
    return tuple(dict.fromkeys(extra for spec in layers for extra in spec.extras()))


def _why_missing(
    backend: Backend, compute_capability: ComputeCapability | None, layers: Set[AttentionSpec]
) -> str | None:
    """The reason why `backend` cannot run, as one short sentence; None if it can."""
    name, facts = backend.facts.name, backend.facts
    if not_computed := [extra for extra in _extras(layers) if extra not in facts.extras]:
        return f"{name} computes no {' and no '.join(not_computed)}"
    if facts.runs_on_cpu:
        return None
    if compute_capability is None:
        return f"{name} needs a GPU"
    if compute_capability < _OLDEST:
        return f"{name} needs a GPU of compute capability 8.0 or newer"
    return backend.why_missing(compute_capability, layers)
