"""The energy that GPUs use, by the counter of their driver (NVML), of Volta GPUs and later.

The counter advances every tenth of a second or so, so that the figures of a run of less than a few
seconds are rough.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minisgl.config import ResolvedConfig

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver

# Returns the joules that some GPUs have used since a time of their own; None: unknown.
Counter = Callable[[], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What all GPUs of a run used together, from its first request to its last token."""

    joules: float
    mean_watts: float
    joules_per_output_token: float | None  # None where there are none


@dataclass(slots=True)
class Spent:
    """Set when the context of `metered` ends."""

    seconds: float = 0.0
    joules: float | None = None  # None: unknown

    def energy(self, num_output_tokens: int) -> Energy | None:
        """The figures of a run that generated so many tokens; None where the energy is unknown."""
        if self.joules is None:
            return None
        return Energy(
            joules=self.joules,
            mean_watts=self.joules / self.seconds,
            joules_per_output_token=self.joules / num_output_tokens if num_output_tokens else None,
        )


@contextmanager
def metered(counter: Counter) -> Iterator[Spent]:
    """Measure the time and the energy while the context is open."""
    spent = Spent()
    before, began = counter(), time.perf_counter()
    yield spent
    after, spent.seconds = counter(), time.perf_counter() - began
    if before is not None and after is not None:
        spent.joules = after - before


def engine_gpus(config: ResolvedConfig) -> list[str]:
    """The UUIDs of the GPUs of a running engine, as `energy_counter` takes them; none if some are
    on other nodes, whose counters cannot be read here."""
    if config.device == "cpu" or config.nnodes > 1:
        return []
    gpus = range(config.num_ranks)
    uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus]
    return [f"GPU-{uuid.removeprefix('GPU-')}" for uuid in uuids]  # the prefix is NVML's


def energy_counter(gpus: Sequence[str]) -> Counter:
    """The sum of the counters of the GPUs with these UUIDs.

    It is unknown for no GPU, without NVIDIA's driver, and where a GPU has no counter.
    """
    if not gpus:
        return _unknown
    try:
        return nvml_counter(ctypes.CDLL(LIBRARY), gpus)
    except (OSError, AttributeError):  # no driver, or one that is older than the counter
        return _unknown


def nvml_counter(library: ctypes.CDLL, gpus: Sequence[str]) -> Counter:
    """`energy_counter` by the functions of NVML; all of them return 0 for success."""
    if library.nvmlInit_v2() != 0:
        return _unknown
    handles = []
    for gpu in gpus:
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle)) != 0:
            return _unknown
        handles.append(handle)
    read = library.nvmlDeviceGetTotalEnergyConsumption

    def joules() -> float | None:
        total = 0
        for handle in handles:
            millijoules = ctypes.c_ulonglong()
            if read(handle, ctypes.byref(millijoules)) != 0:
                return None
            total += millijoules.value
        return total / 1e3

    return joules


def _unknown() -> None:
    return None
