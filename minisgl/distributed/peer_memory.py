"""Maps GPU memory of other processes on this host into the address space, by CUDA IPC.

Calls the CUDA driver directly, because neither mechanism of torch fits: tensors shared by its
multiprocessing are mapped on their own GPU only, and the symmetric memory of torch.distributed
counts rendezvous per process, so that a process hangs when it starts a second group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64
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
}


class PeerMemoryError(RuntimeError):
    """The driver cannot share memory."""


@dataclass(frozen=True, slots=True)
class _Address:
    """An address in an allocation of this process, in a form that other processes can map."""

    handle: bytes
    offset: int


class PeerMemory:
    """The mapped memory of other processes."""

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
        sent: list[_Address | None] = [None] * num_ranks
        dist.all_gather_object(sent, self._attempt(self._address, own), group=group)
        return tuple(
            own.data_ptr() if source == rank else self._attempt(self._map, address) or 0
            for source, address in enumerate(sent)
        )

    def _attempt(self, work: Callable[[Given], Found], given: Given | None) -> Found | None:
        try:
            return None if given is None else work(given)
        except PeerMemoryError as error:
            self.error = self.error or error
            return None

    def close(self) -> None:
        for base in self._mapped.values():
            self._call("cuIpcCloseMemHandle", base)
        self._mapped.clear()

    def _address(self, tensor: Tensor) -> _Address:
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), tensor.data_ptr())
        self._call("cuIpcGetMemHandle", byref(handle), base.value)
        return _Address(bytes(handle), tensor.data_ptr() - base.value)

    def _map(self, address: _Address) -> int:
        # An allocation may hold several tensors, but can be opened only once.
        if address.handle not in self._mapped:
            base, handle = c_uint64(), _Handle.from_buffer_copy(address.handle)
            self._call("cuIpcOpenMemHandle_v2", byref(base), handle, _LAZY_ENABLE_PEER_ACCESS)
            self._mapped[address.handle] = base.value
        return self._mapped[address.handle] + address.offset

    def _call(self, name: str, *arguments: object) -> None:
        if (code := self._functions[name](*arguments)) != 0:
            text = c_char_p()
            self._name_of_error(c_int(code), byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            raise PeerMemoryError(f"{name}: {reason}")
