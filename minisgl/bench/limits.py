"""The least time that the hardware allows a run, from the bytes it moves and what it computes.

The roofline (Williams et al., "Roofline: An Insightful Visual Performance Model", 2009) of serving:
each step reads every weight once, each decoded token reads the keys and values of everything before
it, and prefill multiplies. What can be overlapped is added up all the same, so that the limit is of
engines like this one, which do one thing after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl.bench.driver import RunRecord
from minisgl.config import DTYPE_BYTES, ModelFacts

# Large enough that launches and caches do not count on a GPU, and small enough for the memory that
# the engine leaves free.
COPIED_BYTES = 256 << 20
MATRIX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Peak:
    """What a device reached a moment ago."""

    bytes_per_s: float  # of a copy, read and written bytes together
    operations_per_s: float  # of a matrix product; a multiplication and an addition are two


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has to do at least."""

    weight_bytes: int
    kv_bytes: int
    prefill_operations: int

    @classmethod
    def of(cls, run: RunRecord, model: ModelFacts, dtype: str) -> Work:
        """What the requests of `run` and the number of its steps ask of `model` in `dtype`."""
        weights = model.num_layer_weights + model.num_head_weights
        num_read = 0  # tokens whose keys and values decoding reads, and those that are written
        operations = 0
        for request in run.requests:
            prompt, cached = request.num_prompt_tokens, request.num_cached_tokens
            decoded = request.num_output_tokens - 1
            num_read += decoded * prompt + decoded * (decoded + 1) // 2
            num_read += prompt - cached + decoded
            operations += 2 * model.num_layer_weights * (prompt - cached)
            # Scores and weighted sum, over the triangle of the new tokens and all that is cached.
            pairs = (prompt - cached) * (prompt + cached + 1) // 2
            operations += 4 * pairs * model.num_layers * model.num_heads * model.head_dim
        return cls(
            weight_bytes=run.num_steps * weights * DTYPE_BYTES[dtype],
            kv_bytes=num_read * model.kv_bytes_per_token(dtype),
            prefill_operations=operations,
        )

    def seconds(self, peak: Peak) -> float:
        moved = self.weight_bytes + self.kv_bytes
        return moved / peak.bytes_per_s + self.prefill_operations / peak.operations_per_s


def measure_peak(
    device: torch.device,
    dtype: torch.dtype,
    *,
    copied_bytes: int = COPIED_BYTES,
    matrix_size: int = MATRIX_SIZE,
) -> Peak:
    """Copy and multiply for about a second, and free the memory again."""
    bytes_per_s = _copied_bytes_per_s(device, copied_bytes)
    operations_per_s = _operations_per_s(device, dtype, matrix_size)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Peak(bytes_per_s, operations_per_s)


def _copied_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _operations_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    matrix = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _seconds(lambda: matrix @ matrix, device)


def _seconds(work: Callable[[], object], device: torch.device, repetitions: int = 10) -> float:
    """The fastest of three rounds, for one call."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    fastest = float("inf")
    for _ in range(3):
        work()
        finish()
        started = time.perf_counter()
        for _ in range(repetitions):
            work()
        finish()
        fastest = min(fastest, (time.perf_counter() - started) / repetitions)
    return fastest
