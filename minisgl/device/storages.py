"""Memory of tensors that is given back while they stay, and taken again, elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# A copy on the host is made of pieces: pinned memory comes in powers of two.
PIECE_BYTES = 1 << 26
Storage: TypeAlias = torch.UntypedStorage


@dataclass(frozen=True, slots=True)
class _Released:
    storage: Storage
    num_bytes: int
    copy: list[Tensor] | None  # on the host; None: it is zeros when it returns


class Storages:
    """The storages of tensors. While they are released, no tensor may be read or written."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Those on other devices are left out, and memory that is not torch's own."""
        found = (each.untyped_storage() for each in tensors if each.device.type == device.type)
        own = {each.data_ptr(): each for each in found if each.nbytes() and each.resizable()}
        self._storages = [*own.values()]
        self._released: list[_Released] = []

    def release(self, dropped: Collection[int], *, keeps_others: bool) -> None:
        """Give all memory back. dropped: addresses of storages whose numbers are not kept on the
        host. keeps_others: whether those of the others are. Raises RuntimeError if the host has no
        room; `restore` undoes what was done."""
        for storage in self._storages:
            if num_bytes := storage.nbytes():
                is_kept = keeps_others and storage.data_ptr() not in dropped
                copy = _copied(storage) if is_kept else None
                self._released.append(_Released(storage, num_bytes, copy))
                storage.resize_(0)

    def restore(self) -> None:
        """Take memory again, with the numbers that were kept, and zeros. Raises OutOfMemoryError;
        then it may be asked for again."""
        while self._released:
            released = self._released[-1]
            released.storage.resize_(released.num_bytes)
            pieces = _bytes_of(released.storage).split(PIECE_BYTES)
            for number, piece in enumerate(pieces):
                if released.copy is None:
                    piece.zero_()
                else:
                    piece.copy_(released.copy[number], non_blocking=True)
            self._released.pop()


def _bytes_of(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(storage: Storage) -> list[Tensor]:
    is_pinned = storage.device.type == "cuda"
    pieces = _bytes_of(storage).split(PIECE_BYTES)
    return [
        torch.empty(len(piece), dtype=torch.uint8, pin_memory=is_pinned).copy_(piece)
        for piece in pieces
    ]
