"""Maps GPU memory of other processes on this host into the address space, by CUDA IPC.

Calls the CUDA driver directly, because neither mechanism of torch fits: tensors shared by its
multiprocessing are mapped on their own GPU only, and the symmetric memory of torch.distributed
counts rendezvous per process, so that a process hangs when it starts a second group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

Given = TypeVar("Given")
Found = TypeVar("Found")

_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _HANDLE_BYTES),)


# From cuda.h.
_SIGNATURES = {
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}


class PeerMemoryError(RuntimeError):
    """Memory cannot be shared between processes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An address in an allocation of a process, in a form that other processes can map."""

    handle: bytes
    offset: int


class PeerMemory:
    """The mapped memory of other processes. Threads that call it must have a CUDA context."""

    def __init__(self) -> None:
        """Load the CUDA driver. Raises PeerMemoryError if there is none."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._functions = {name: getattr(driver, name) for name in _SIGNATURES}
            self._name_of_error = driver.cuGetErrorName
        except (OSError, AttributeError) as error:
            raise PeerMemoryError(str(error)) from error
        for name, function in self._functions.items():
            function.argtypes, function.restype = _SIGNATURES[name], c_int
        self._mapped: dict[bytes, int] = {}
        self.error: PeerMemoryError | None = None  # the first error

    def addresses(
        self, own: Tensor, rank: int, num_ranks: int, group: dist.ProcessGroup | None = None
    ) -> tuple[int, ...]:
        """Map the tensor `own` of every rank; returns their addresses in this process, by rank.

        A collective of `group`, the default one if None: all its ranks must call it and keep their
        tensors alive. If a tensor cannot be mapped, its address is 0 and `error` is set: raising
        would leave other ranks waiting.
        """
        sent: list[Exported | None] = [None] * num_ranks
        dist.all_gather_object(sent, self._attempt(self.export, own), group=group)
        return tuple(
            own.data_ptr() if source == rank else self._attempt(self._map, exported) or 0
            for source, exported in enumerate(sent)
        )

    def _attempt(self, work: Callable[[Given], Found], given: Given | None) -> Found | None:
        try:
            return None if given is None else work(given)
        except PeerMemoryError as error:
            self.error = self.error or error
            return None

    def close(self) -> None:
        for base in self._mapped.values():
            self.release(base)
        self._mapped.clear()

    def export(self, tensor: Tensor) -> Exported:
        """Let other processes map the memory of a tensor, for as long as it lives. Raises
        PeerMemoryError."""
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), tensor.data_ptr())
        self._call("cuIpcGetMemHandle", byref(handle), base.value)
        return Exported(bytes(handle), tensor.data_ptr() - base.value)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address here, to be given to `release`.
        Raises PeerMemoryError, also for allocations of this process."""
        base = c_uint64()
        opened = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(base), opened, _LAZY_ENABLE_PEER_ACCESS)
        return base.value

    def release(self, base: int) -> None:
        """Undo one `open`. No copy may be under way. Raises PeerMemoryError."""
        self._call("cuIpcCloseMemHandle", base)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between addresses on any GPUs, mapped or not. Raises PeerMemoryError."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def _map(self, exported: Exported) -> int:
        # An allocation may hold several tensors, for which it is opened once.
        if exported.handle not in self._mapped:
            self._mapped[exported.handle] = self.open(exported.handle)
        return self._mapped[exported.handle] + exported.offset

    def _call(self, name: str, *arguments: object) -> None:
        if (code := self._functions[name](*arguments)) != 0:
            text = c_char_p()
            self._name_of_error(c_int(code), byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            raise PeerMemoryError(f"{name}: {reason}")
