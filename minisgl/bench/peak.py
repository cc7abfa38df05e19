"""The peak of a device, measured on the spot: what it moves and multiplies in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from minisgl.config import ModelFacts, ResolvedConfig
from minisgl.kernels.hardware import has_fp8_products

# Large enough to make launches and caches of a GPU negligible, small enough for the memory that the
# engine leaves free.
COPIED_BYTES = 256 << 20
MATRIX_SIZE = 8192
REPETITIONS = 10  # of what is timed, in a round


@dataclass(frozen=True, slots=True)
class Peak:
    """The measured peak of one device, or of several together."""

    bytes_per_s: float  # of a copy, read and written bytes together
    operations_per_s: float  # of a GEMM; a multiply-add counts as two
    # Of a GEMM of float8 matrices; None where no product of the model's layers is one.
    fp8_operations_per_s: float | None = None

    @property
    def layer_operations_per_s(self) -> float:
        """Of the products of the model's layers; head and attention multiply in its dtype."""
        return self.fp8_operations_per_s or self.operations_per_s

    def __str__(self) -> str:
        fp8 = self.fp8_operations_per_s
        in_fp8 = "" if fp8 is None else f" ({fp8 / 1e12:,.0f} in FP8)"
        return (
            f"{self.bytes_per_s / 1e12:.2f} TB/s and {self.operations_per_s / 1e12:,.0f} TFLOP/s"
            f"{in_fp8}"
        )

    def of_devices(self, count: int) -> Peak:
        """The peak of `count` such devices together."""
        return Peak(*(value and count * value for value in astuple(self)))


def engine_peak(config: ResolvedConfig, model: ModelFacts) -> Peak | None:
    """The peak of the GPUs of a running engine; None on a CPU.

    A CPU's caches may hold what a GPU reads from memory, so a share of its limit means nothing.
    """
    if config.device == "cpu":
        return None
    device = torch.device(config.device)
    in_fp8 = model.fp8_activations and has_fp8_products(torch.cuda.get_device_capability(device))
    peak = measure_peak(device, getattr(torch, config.dtype), in_fp8=in_fp8)
    return peak.of_devices(config.num_ranks)


def measure_peak(
    device: torch.device,
    dtype: torch.dtype,
    *,
    copied_bytes: int = COPIED_BYTES,
    matrix_size: int = MATRIX_SIZE,
    in_fp8: bool = False,
) -> Peak:
    """Copy and multiply for about a second, and free the memory again.

    in_fp8: multiply float8 matrices, too.
    """
    bytes_per_s = _copied_bytes_per_s(device, copied_bytes)
    matrix = torch.randn(matrix_size, matrix_size, device=device).to(dtype)
    operations_per_s = 2 * matrix_size**3 / _seconds(lambda: matrix @ matrix, device)
    fp8_operations_per_s = measure_fp8_operations_per_s(device, matrix_size) if in_fp8 else None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Peak(bytes_per_s, operations_per_s, fp8_operations_per_s)


def _copied_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def measure_fp8_operations_per_s(device: torch.device, size: int) -> float:
    """Of the library's product of float8 matrices with a scale for each row and each column.

    The tensor cores add up by themselves, in fewer bits than float32 has, which is their fastest.
    """
    rows, columns = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    ones = torch.ones(size, 1, device=device)

    def multiply() -> Tensor:
        return torch._scaled_mm(
            rows,
            columns.t(),
            scale_a=ones,
            scale_b=ones.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return 2 * size**3 / _seconds(multiply, device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, in the fastest of three rounds."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    fastest = float("inf")
    for _ in range(3):
        work()
        finish()
        started = time.perf_counter()
        for _ in range(REPETITIONS):
            work()
        finish()
        fastest = min(fastest, (time.perf_counter() - started) / REPETITIONS)
    return fastest
