"""Handles of memory that processes share; tests/gpu/ has the memory of GPUs itself."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minisgl.distributed.peer_memory import Exported, PeerMemoryError
from minisgl.tiers.carriers import shared_buffers
from minisgl.tiers.carriers.shared_buffers import CudaSharing, FileSharing, sharing_of

OFFSET, STREAM = 512, 7


class FakeDriver:
    """CUDA IPC within this process: allocations begin before the tensors in them."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def export(self, tensor: Tensor) -> Exported:
        return Exported(str(tensor.data_ptr() - OFFSET).encode(), OFFSET)

    def open(self, handle: bytes) -> int:
        self.opened.append(int(handle))
        return int(handle)

    def release(self, base: int) -> None:
        self.opened.remove(base)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        assert stream == STREAM
        ctypes.memmove(target, source, num_bytes)


@pytest.mark.parametrize("is_same", [True, False], ids=["this process", "another process"])
def test_memory_of_a_gpu_is_opened_unless_it_is_of_this_process(
    is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    driver = FakeDriver()
    monkeypatch.setattr(shared_buffers, "PeerMemory", lambda: driver)
    sharing = CudaSharing(torch.device("cpu"))
    buffer = sharing.share(100)
    buffer.memory.copy_(torch.arange(100))
    if not is_same:
        monkeypatch.setattr(shared_buffers, "_PROCESS", b"of a container with equal numbers")
    mapped = sharing.map(buffer.handle)
    assert driver.opened == ([] if is_same else [buffer.memory.data_ptr() - OFFSET])
    found = torch.zeros((2, 20), dtype=torch.uint8)
    mapped.copy_to(found, 30)
    assert torch.equal(found.flatten(), torch.arange(30, 70, dtype=torch.uint8))
    mapped.close()
    assert not driver.opened
    buffer.close()


def test_each_device_takes_handles_of_its_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffers, "PeerMemory", FakeDriver)
    file = FileSharing().share(10)
    with pytest.raises(PeerMemoryError):
        CudaSharing(torch.device("cpu")).map(file.handle)
    file.close()
    with pytest.raises(PeerMemoryError):  # its owner has closed it
        FileSharing().map(file.handle)


def test_where_there_is_no_mechanism_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(sharing_of(torch.device("cpu")), FileSharing)
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(PeerMemoryError, match="no files in memory"):
        sharing_of(torch.device("cpu"))
