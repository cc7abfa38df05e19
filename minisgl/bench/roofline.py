"""The least time that the hardware allows a run, from the bytes it moves and its arithmetic.

The roofline (Williams et al., "Roofline: An Insightful Visual Performance Model", 2009) of serving:
each step reads every weight once, each decoded token reads the keys and values of everything before
it, and prefill multiplies.

Only experts that some row of a step has chosen count: if each row chooses k of E at random, their
expected number is E · (1 - (1 - k/E) ** rows).

For a whole run (`Work`), memory traffic and arithmetic are added up, although they could overlap:
the limit is that of engines like this one, which run their kernels one after the other. Within one
decode step (`DecodeStep`) the same kernels move and compute, and the longer of the two counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

import torch

from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.config import ModelFacts, ResolvedConfig

# Large enough to make launches and caches of a GPU negligible, small enough for the memory that the
# engine leaves free.
COPIED_BYTES = 256 << 20
MATRIX_SIZE = 8192
MATRIX_SIZE_ON_CPU = 1024


@dataclass(frozen=True, slots=True)
class Peak:
    """The measured peak of one device, or of several together."""

    bytes_per_s: float  # of a copy, read and written bytes together
    operations_per_s: float  # of a GEMM; a multiply-add counts as two


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum of memory traffic and arithmetic of a run."""

    weight_bytes: int
    kv_bytes: int
    prefill_operations: int

    @classmethod
    def of(cls, run: RunRecord, model: ModelFacts, dtype: str, *, max_running: int) -> Work:
        """The work of the requests and steps of `run` for `model` in `dtype`, if at most
        `max_running` requests run at a time."""
        # Tokens whose keys and values are read or written.
        num_moved = sum(
            _num_decode_reads(request)
            + request.num_prompt_tokens
            - request.num_cached_tokens
            + request.num_output_tokens
            - 1
            for request in run.requests
        )
        return cls(
            weight_bytes=run.num_steps * model.weight_bytes(dtype)
            + _expert_bytes_read(run, model, dtype, max_running),
            kv_bytes=num_moved * model.kv_bytes_per_token(dtype),
            prefill_operations=prefill_operations(run.requests, model),
        )

    def seconds(self, peak: Peak) -> float:
        moved = self.weight_bytes + self.kv_bytes
        return moved / peak.bytes_per_s + self.prefill_operations / peak.operations_per_s


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The minimum of work of a decode step, averaged over the decode steps of a run."""

    weight_bytes: float
    kv_bytes: float
    operations: float

    @classmethod
    def of(cls, run: RunRecord, model: ModelFacts, dtype: str) -> DecodeStep:
        """The step of requests that decode together, all with outputs of one length >= 2."""
        [num_output_tokens] = {request.num_output_tokens for request in run.requests}
        num_steps, batch_size = num_output_tokens - 1, len(run.requests)
        num_read = sum(map(_num_decode_reads, run.requests)) / num_steps
        used = model.num_layer_weights + model.num_head_weights + _expert_weights_of_row(model)
        return cls(
            weight_bytes=model.weight_bytes(dtype) + _expert_bytes(model, dtype, batch_size),
            kv_bytes=(num_read + batch_size) * model.kv_bytes_per_token(dtype),
            operations=2 * used * batch_size + num_read * _operations_per_pair(model),
        )

    def seconds(self, peak: Peak) -> float:
        moving = (self.weight_bytes + self.kv_bytes) / peak.bytes_per_s
        return max(moving, self.operations / peak.operations_per_s)


def prefill_operations(requests: Iterable[RequestRecord], model: ModelFacts) -> int:
    """Operations of GEMMs and causal attention: no padding, no masked scores, one row of logits."""
    operations = 0
    weights_of_token = model.num_layer_weights + _expert_weights_of_row(model)
    for request in requests:
        prompt, cached = request.num_prompt_tokens, request.num_cached_tokens
        operations += 2 * weights_of_token * (prompt - cached)
        operations += 2 * model.num_head_weights
        # The triangle of the new tokens, and all that is cached.
        pairs = (prompt - cached) * (prompt + cached + 1) // 2
        operations += pairs * _operations_per_pair(model)
    return operations


def _expert_weights_of_row(model: ModelFacts) -> int:
    """Number of weights of the experts that one row chooses."""
    experts = model.experts
    return 0 if experts is None else experts.num_layers * experts.num_chosen * experts.num_weights


def _expert_bytes(model: ModelFacts, dtype: str, num_rows: int) -> int:
    """Expected number of bytes of the experts that the rows of a step choose together."""
    experts = model.experts
    if experts is None:
        return 0
    missed = (1 - experts.num_chosen / experts.num_experts) ** num_rows
    num_read = experts.num_layers * experts.num_experts * (1 - missed)
    return round(num_read * experts.weight_bytes(dtype))


def _expert_bytes_read(run: RunRecord, model: ModelFacts, dtype: str, max_running: int) -> int:
    """Number of expert bytes that the steps of a run read, if its requests decode as early as
    possible. The other steps prefill many rows and read all experts."""
    experts = model.experts
    if experts is None:
        return 0
    batches = _decode_batches(run.requests, max_running)[: run.num_steps]
    prefills = run.num_steps - len(batches)
    everything = experts.num_layers * experts.num_experts * experts.weight_bytes(dtype)
    return prefills * everything + sum(_expert_bytes(model, dtype, batch) for batch in batches)


def _decode_batches(requests: Iterable[RequestRecord], max_running: int) -> list[int]:
    """Rows of each decode step, if a request starts as soon as another one ends."""
    free = [0] * max_running  # a heap: the step from which on each place is
    changes: Counter[int] = Counter()
    for request in requests:
        first, end = free[0], free[0] + request.num_output_tokens - 1
        heapreplace(free, end)
        changes[first] += 1
        changes[end] -= 1
    return list(accumulate(changes[step] for step in range(max(free))))


def _num_decode_reads(request: RequestRecord) -> int:
    """Number of tokens whose keys and values decoding reads, including each token's own."""
    decoded = request.num_output_tokens - 1
    return decoded * request.num_prompt_tokens + decoded * (decoded + 1) // 2


def _operations_per_pair(model: ModelFacts) -> int:
    """Operations of a query with one key and value, in all heads and layers."""
    return sum(4 * spec.num_heads * spec.head_dim for spec in model.attention)


def engine_peak(config: ResolvedConfig) -> Peak | None:
    """The peak of the GPUs of a running engine; None on a CPU.

    A CPU's caches may hold what a GPU reads from memory, so a share of its limit means nothing.
    """
    if config.device == "cpu":
        return None
    peak = measure_peak(torch.device(config.device), getattr(torch, config.dtype))
    return Peak(config.tp * peak.bytes_per_s, config.tp * peak.operations_per_s)


def engine_operations_per_s(config: ResolvedConfig) -> float:
    """Operations per second of a GEMM on the devices of a running engine, also on CPUs."""
    size = MATRIX_SIZE_ON_CPU if config.device == "cpu" else MATRIX_SIZE
    device = torch.device(config.device)
    reached = config.tp * measure_operations_per_s(device, getattr(torch, config.dtype), size)
    _free(device)
    return reached


def measure_peak(
    device: torch.device,
    dtype: torch.dtype,
    *,
    copied_bytes: int = COPIED_BYTES,
    matrix_size: int = MATRIX_SIZE,
) -> Peak:
    """Copy and multiply for about a second, and free the memory again."""
    bytes_per_s = _copied_bytes_per_s(device, copied_bytes)
    operations_per_s = measure_operations_per_s(device, dtype, matrix_size)
    _free(device)
    return Peak(bytes_per_s, operations_per_s)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _copied_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def measure_operations_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    matrix = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _seconds(lambda: matrix @ matrix, device)


def _seconds(work: Callable[[], object], device: torch.device, repetitions: int = 10) -> float:
    """Seconds of one call, in the fastest of three rounds."""

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
