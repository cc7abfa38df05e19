"""GEMMs of few rows by cuBLASLt, each with the algorithm that was the fastest in a trial at start.

F.linear uses the first algorithm that cuBLAS proposes. Other proposals are up to 15 % faster on an
H200 in decode, often one that does not split k (bench_kernels.py linear). So they are timed at
start, on the weights of the model, for some numbers of rows; other numbers use the choice of the
next larger one.

From about 64 rows on the device reaches its power limit within a tenth of a second. The fastest
algorithm of a short trial then loses to cuBLAS's own choice, whose larger tiles move less data: 1
to 3 % at 128 to 210 rows of Qwen3-14B, and prefill gains nothing. So these use F.linear.

The calls go to the library that torch has loaded. If it lacks a function or rejects a shape,
`Products` returns None, and the caller uses F.linear.
"""

from __future__ import annotations

import ctypes
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 << 20  # as much as torch gives cuBLAS on Hopper
# With smaller weights any algorithm is bound by its launch.
MIN_WEIGHT_BYTES = 16 << 20
ROWS = (1, 8, 16, 32, 48, 64)
MAX_ROWS = ROWS[-1]
_ALIGNMENT = 256  # of addresses, which the library assumes
_PROPOSALS = 8  # requested with a workspace, and again without
_COLD_BYTES = 128 << 20  # of other weights between two reads of one, so that L2 holds none of it
_ROUNDS = 3
_HEAD_START = 150_000  # cycles, some 80 µs: the host queues a trial's launches meanwhile
_AS_FAST = 1.01  # within what a trial tells apart, the library's order decides

# From cublasLt.h and library_types.h, which are the same for CUDA 12 and 13.
_COMPUTE_32F, _R_32F = 68, 0
_DTYPES = {torch.float16: 2, torch.bfloat16: 14}
_DESC_TRANSA, _TRANSPOSED = 3, 1
_PREFERENCE_WORKSPACE = 1


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_NEW = POINTER(c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "Create": (_NEW,),
    "MatmulDescCreate": (_NEW, c_int, c_int),
    "MatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatrixLayoutCreate": (_NEW, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutDestroy": (c_void_p,),
    "MatmulPreferenceCreate": (_NEW,),
    "MatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, POINTER(_Proposal), POINTER(c_int)),
    "MatmulAlgoCheck": (*[c_void_p] * 6, POINTER(_Algorithm), POINTER(_Proposal)),
    "Matmul": (*[c_void_p] * 12, POINTER(_Algorithm), c_void_p, c_size_t, c_void_p),
}


class CublasLtError(RuntimeError):
    """The library is missing, or a call failed."""


class CublasLt:
    """The library, for y = x Wᵀ of one dtype on the current device, with sums in float32.

    It is column-major: to it W [n, k] is a [k, n] to be transposed, x a [k, m] and y an [n, m].
    """

    def __init__(self, dtype: torch.dtype) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            library = ctypes.CDLL(f"libcublasLt.so.{major}")
            self._functions = {name: getattr(library, f"cublasLt{name}") for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise CublasLtError(str(error)) from error
        for name, function in self._functions.items():
            function.argtypes, function.restype = _SIGNATURES[name], c_int
        self._matmul = self._functions["Matmul"]
        self._dtype = _DTYPES[dtype]
        self._handle = self._new("Create")
        self._product = self._new("MatmulDescCreate", _COMPUTE_32F, _R_32F)
        self._set("MatmulDescSetAttribute", self._product, _DESC_TRANSA, c_int32(_TRANSPOSED))
        self._preferences = []
        for num_bytes in (WORKSPACE_BYTES, 0):
            preference = self._new("MatmulPreferenceCreate")
            self._set(
                "MatmulPreferenceSetAttribute",
                preference,
                _PREFERENCE_WORKSPACE,
                c_uint64(num_bytes),
            )
            self._preferences.append(preference)
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def layouts(self, m: int, n: int, k: int) -> Layouts:
        weight, x, y = (
            self._new("MatrixLayoutCreate", self._dtype, rows, columns, rows)
            for rows, columns in ((k, n), (k, m), (n, m))
        )
        return Layouts(self, weight, x, y)

    def free(self, layout: int) -> None:
        self._call("MatrixLayoutDestroy", layout)

    def proposals(self, of: Layouts) -> list[_Algorithm]:
        """The algorithms that the library proposes, best first, without duplicates."""
        found: dict[bytes, _Algorithm] = {}
        for preference in self._preferences:
            results, count = (_Proposal * _PROPOSALS)(), c_int(0)
            try:
                self._call(
                    "MatmulAlgoGetHeuristic",
                    *self._operands(of),
                    preference,
                    _PROPOSALS,
                    results,
                    byref(count),
                )
            except CublasLtError:  # no algorithm runs with this workspace
                continue
            for result in results[: count.value]:
                if result.status == 0:
                    algorithm = _Algorithm.from_buffer_copy(result.algorithm)
                    found.setdefault(bytes(algorithm), algorithm)
        return list(found.values())

    def accepts(self, of: Layouts, algorithm: _Algorithm) -> bool:
        result = _Proposal()
        try:
            self._call("MatmulAlgoCheck", *self._operands(of), byref(algorithm), byref(result))
        except CublasLtError:
            return False
        return bool(result.status == 0 and result.workspace_bytes <= WORKSPACE_BYTES)

    def multiply(
        self,
        of: Layouts,
        algorithm: _Algorithm,
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        workspace: Tensor,
    ) -> None:
        """Queues y = x Wᵀ on the current stream. Raises CublasLtError."""
        status = self._matmul(
            self._handle,
            self._product,
            byref(self._one),
            weight.data_ptr(),
            of.weight,
            x.data_ptr(),
            of.x,
            byref(self._zero),
            y.data_ptr(),
            of.y,
            y.data_ptr(),
            of.y,
            algorithm,
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream().cuda_stream,
        )
        if status:
            raise CublasLtError(f"cublasLtMatmul returned {status}.")

    def time_ms(self, work: Callable[[], None]) -> float:
        """The device time of what `work` queues on the current stream. Blocks."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)  # else the host's launches are what is timed
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _operands(self, of: Layouts) -> tuple[int, ...]:
        return self._handle, self._product, of.weight, of.x, of.y, of.y

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise CublasLtError(f"cublasLt{name} returned {status}.")

    def _new(self, name: str, *arguments: Any) -> int:
        made = c_void_p()
        self._call(name, byref(made), *arguments)
        if made.value is None:
            raise CublasLtError(f"cublasLt{name} made nothing.")
        return made.value

    def _set(self, name: str, what: int, attribute: int, value: Any) -> None:
        self._call(name, what, attribute, byref(value), ctypes.sizeof(value))


@dataclass(frozen=True, slots=True)
class Layouts:
    """The library's descriptions of the three matrices of a GEMM."""

    library: CublasLt
    weight: int
    x: int
    y: int

    def __del__(self) -> None:
        for layout in (self.weight, self.x, self.y):
            self.library.free(layout)


class Products:
    """y = x Wᵀ without bias, for the shapes of weights that `tune` has seen.

    One at a time may run, since all share a workspace.
    """

    def __init__(self, library: CublasLt, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # By (n, k), in the order of ROWS; None where the library proposes nothing.
        self._chosen: dict[tuple[int, int], list[_Algorithm | None]] = {}
        self._plans: dict[tuple[int, int, int], tuple[Layouts, _Algorithm] | None] = {}

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x: [m, k]; weight: [n, k]. Returns a new [m, n], or None if the caller must use
        F.linear."""
        (m, k), n = x.shape, weight.shape[0]
        if m > MAX_ROWS:
            return None
        key = (m, n, k)
        if key not in self._plans:
            self._plans[key] = self._plan(m, n, k)
        plan = self._plans[key]
        if plan is None or not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
            return None
        y = x.new_empty((m, n))
        self._library.multiply(*plan, x, weight, y, self._workspace)
        return y

    def tune(self, weights: Sequence[Tensor]) -> None:
        """Chooses algorithms for weights of one shape, [n, k] contiguous. Takes about 0.1 s.

        Several weights are read in turn, as a model reads those of its layers.
        """
        n, k = weights[0].shape
        if n % 8 == k % 8 == 0 and weights[0].nbytes >= MIN_WEIGHT_BYTES:
            self._chosen[n, k] = [self._fastest(weights, m) for m in ROWS]
            self._plans.clear()

    def _plan(self, m: int, n: int, k: int) -> tuple[Layouts, _Algorithm] | None:
        chosen = self._chosen.get((n, k))
        if not chosen or m == 0:
            return None
        algorithm = chosen[bisect_left(ROWS, m)]
        layouts = self._library.layouts(m, n, k)
        if algorithm is None or not self._library.accepts(layouts, algorithm):
            return None
        return layouts, algorithm

    def _fastest(self, weights: Sequence[Tensor], m: int) -> _Algorithm | None:
        n, k = weights[0].shape
        x = torch.randn(m, k, dtype=weights[0].dtype, device=weights[0].device)
        y = x.new_empty((m, n))
        layouts = self._library.layouts(m, n, k)
        count = math.ceil(_COLD_BYTES / weights[0].nbytes)
        in_turn = [weights[i % len(weights)] for i in range(max(count, 2))]

        def time_ms(algorithm: _Algorithm) -> float:
            def work() -> None:
                for weight in in_turn:
                    self._library.multiply(layouts, algorithm, x, weight, y, self._workspace)

            return self._library.time_ms(work)

        candidates = []
        for algorithm in self._library.proposals(layouts):
            try:
                time_ms(algorithm)  # loads the kernel, too
                candidates.append(algorithm)
            except CublasLtError as error:
                logger.debug("An algorithm for %s does not run: %s", (m, n, k), error)
        times = [math.inf] * len(candidates)
        for _ in range(_ROUNDS):
            for index, algorithm in enumerate(candidates):
                times[index] = min(times[index], time_ms(algorithm))
        most = _AS_FAST * min(times, default=0.0)
        as_fast = (i for i, milliseconds in enumerate(times) if milliseconds <= most)
        return next((candidates[i] for i in as_fast), None)


def load_products(dtype: torch.dtype, device: torch.device) -> Products | None:
    """The GEMMs of `dtype` on `device`; None if the library cannot be used."""
    if dtype not in _DTYPES:
        return None
    try:
        with torch.cuda.device(device):
            return Products(CublasLt(dtype), device)
    except CublasLtError as error:
        logger.info("cuBLASLt is unavailable; torch does all GEMMs: %s", error)
        return None
