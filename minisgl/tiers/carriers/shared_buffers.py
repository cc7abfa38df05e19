"""Buffers of a device that other processes on this host can read.

    owner     share(num_bytes) ─ handle ─▶
    reader                                map(handle) ─ copy_to(rows, offset) ─ close

On GPUs this is CUDA IPC, also between GPUs of which each process sees only its own. On a CPU it is
a file in memory, which processes of the same user open by way of /proc. What is mapped stays
readable when its owner has been killed.

Everything here raises PeerMemoryError, and `share` also OSError and torch's errors. On a GPU,
threads must have its context, as those have that have used a stream.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError

NAME_BYTES = 16
# Of this process: namespaces of several containers may all have a process of the same number.
_PROCESS = secrets.token_bytes(NAME_BYTES)

Kind = TypeVar("Kind", bound=Struct)


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A buffer of this process. Its memory is freed with the last tensor in it."""

    memory: Tensor  # [num_bytes] uint8
    handle: bytes  # by which others map it
    file: int | None = None

    def close(self) -> None:
        """End its handle: no other process can map it any more."""
        if self.file is not None:
            os.close(self.file)


# -- GPUs ------------------------------------------------------------------------------------------


class _CudaHandle(Struct, array_like=True, tag="cuda"):
    process: bytes
    pid: int
    address: int  # there
    allocation: bytes  # a handle of CUDA, which the same process cannot open
    offset: int  # in the allocation


class CudaSharing:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = PeerMemory()

    def share(self, num_bytes: int) -> SharedBuffer:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        exported = self._memory.export(memory)
        handle = _CudaHandle(
            _PROCESS, os.getpid(), memory.data_ptr(), exported.handle, exported.offset
        )
        return SharedBuffer(memory, msgspec.msgpack.encode(handle))

    def map(self, handle: bytes) -> CudaBuffer:
        found = _decode(handle, _CudaHandle)
        if (found.process, found.pid) == (_PROCESS, os.getpid()):
            return CudaBuffer(self._memory, found.address, None)
        base = self._memory.open(found.allocation)
        return CudaBuffer(self._memory, base + found.offset, base)


@dataclass(frozen=True, slots=True)
class CudaBuffer:
    """A buffer of another process, or of this one."""

    memory: PeerMemory
    address: int
    base: int | None  # of the allocation; None: it is of this process

    def copy_to(self, target: Tensor, offset: int) -> None:
        """Queue a copy of the bytes from `offset` on to `target`, contiguous uint8, on the current
        stream."""
        stream = torch.cuda.current_stream(target.device).cuda_stream
        self.memory.copy(target.data_ptr(), self.address + offset, target.nbytes, stream)

    def close(self) -> None:
        """Give it back. No copy may be under way."""
        if self.base is not None:
            self.memory.release(self.base)


# -- CPUs ------------------------------------------------------------------------------------------


class _FileHandle(Struct, array_like=True, tag="file"):
    pid: int
    file: int
    name: str  # which no other file has


class FileSharing:
    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise PeerMemoryError("this system has no files in memory")

    def share(self, num_bytes: int) -> SharedBuffer:
        name = f"minisgl-{secrets.token_hex(NAME_BYTES)}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, num_bytes)
            # A reader would be killed if it became shorter.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        except BaseException:
            os.close(file)
            raise
        handle = _FileHandle(os.getpid(), file, name)
        return SharedBuffer(memory, msgspec.msgpack.encode(handle), file)

    def map(self, handle: bytes) -> FileBuffer:
        found = _decode(handle, _FileHandle)
        path = f"/proc/{found.pid}/fd/{found.file}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{found.name}"):
                raise PeerMemoryError("its process is in another namespace")
            file = os.open(path, os.O_RDONLY)
            with os.fdopen(file, "rb"):
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise PeerMemoryError("it may become shorter")
                return FileBuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise PeerMemoryError(str(error)) from error


@dataclass(frozen=True, slots=True)
class FileBuffer:
    """The same on a CPU, where a copy is done at once."""

    memory: mmap.mmap

    def copy_to(self, target: Tensor, offset: int) -> None:
        try:
            source = np.frombuffer(self.memory, np.uint8, target.nbytes, offset)
        except ValueError as error:
            raise PeerMemoryError(str(error)) from error
        target.view(-1).numpy()[:] = source

    def close(self) -> None:
        self.memory.close()


# -- both ------------------------------------------------------------------------------------------

BufferSharing = CudaSharing | FileSharing
MappedBuffer = CudaBuffer | FileBuffer


def sharing_of(device: torch.device) -> BufferSharing:
    return CudaSharing(device) if device.type == "cuda" else FileSharing()


def _decode(handle: bytes, kind: type[Kind]) -> Kind:
    try:
        return msgspec.msgpack.decode(handle, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerMemoryError(f"it is no memory of such a device: {error}") from error
