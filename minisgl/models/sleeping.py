"""Gives the memory of a rank's weights and KV cache back while the engine sleeps.

When it wakes, they are at other addresses, so its steps are captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, nn

from minisgl.attention.state import LayerState, distinct
from minisgl.device.lanes import Lanes
from minisgl.errors import DeviceMemoryError, in_one_line

# Where the classes are whose objects have weights, or what kernels have made of them.
_OWNERS = (
    "minisgl.drafting.",
    "minisgl.kernels.linear.",
    "minisgl.kernels.moe.",
    "minisgl.layers.",
    "minisgl.models.",
)


# A copy on the host is made of pieces: pinned memory comes in powers of two.
PIECE_BYTES = 1 << 26
Storage: TypeAlias = torch.UntypedStorage


@dataclass(frozen=True, slots=True)
class _Released:
    """A storage whose tensors stay, and may not be read or written."""

    storage: Storage
    num_bytes: int
    copy: list[Tensor] | None  # on the host; None: it is zeros when it returns

    @staticmethod
    def of(storage: Storage, is_kept: bool) -> _Released:
        return _Released(storage, storage.nbytes(), _copied(storage) if is_kept else None)

    def fill(self) -> None:
        """Bring the numbers back, once it has its memory again."""
        for number, piece in enumerate(_pieces_of(self.storage)):
            if self.copy is None:
                piece.zero_()
            else:
                piece.copy_(self.copy[number], non_blocking=True)


class Sleep:
    """What a rank gives back: weights, by the tag "weights", and caches, by "kv_cache"."""

    def __init__(
        self,
        models: Sequence[object],
        states: Sequence[LayerState],
        lanes: Lanes,
        capture: Callable[[bool], None],
    ) -> None:
        """models: with the weights. states: what layers keep between steps. capture: has steps and
        copies use the memory that is there if it is given True, else forgets the captured steps."""
        self._models, self._lanes, self._capture = models, lanes, capture
        self._states = states  # the runner's list, which it clears when it is closed
        self._asleep: dict[str, list[_Released]] = {}
        self._is_captured = True

    def release(self, dropped: Collection[int]) -> None:
        """Give back all memory that is there. dropped: addresses of storages of weights whose
        numbers are not kept on the host. Raises DeviceMemoryError if that has no room, and has
        released nothing."""
        self._lanes.synchronize()
        self._capture(False)
        self._is_captured = False
        tensors = {
            "weights": tensors_in(self._models),
            "kv_cache": (each for state in distinct(self._states) for each in state.tensors),
        }
        try:
            awake = {
                tag: [
                    _Released.of(each, tag == "weights" and each.data_ptr() not in dropped)
                    for each in _storages_of(found, self._lanes.device)
                ]
                for tag, found in tensors.items()
                if tag not in self._asleep
            }
        except RuntimeError as error:
            reason = f"The host has no room for the weights: {in_one_line(error)}"
            raise DeviceMemoryError(reason) from error
        for each in chain.from_iterable(awake.values()):
            each.storage.resize_(0)
        self._asleep |= awake
        self._free()

    def restore(self, tags: Collection[str]) -> None:
        """Take the memory of these again. Raises DeviceMemoryError if there is too little, and has
        taken none."""
        asleep = [each for tag in tags for each in self._asleep.get(tag, ())]
        try:
            for each in asleep:
                each.storage.resize_(each.num_bytes)
        except torch.OutOfMemoryError as error:
            for each in asleep:
                each.storage.resize_(0)
            self._free()
            reason = "Too little memory of the device is free to wake up; end what else uses it."
            raise DeviceMemoryError(reason) from error
        for each in asleep:
            each.fill()
        for tag in tags:
            self._asleep.pop(tag, None)
        self._lanes.synchronize()

    def capture(self) -> None:
        """Capture steps again if all memory is there. All ranks call this together."""
        if not (self._asleep or self._is_captured):
            self._capture(True)
            self._is_captured = True

    def _free(self) -> None:
        """Hand memory that torch holds unused to the device."""
        self._lanes.synchronize()
        gc.collect()
        if self._lanes.device.type == "cuda":
            torch.cuda.empty_cache()


def _storages_of(tensors: Iterable[Tensor], device: torch.device) -> list[Storage]:
    """Those on other devices are left out, and memory that is not torch's own."""
    found = (each.untyped_storage() for each in tensors if each.device.type == device.type)
    own = {each.data_ptr(): each for each in found if each.nbytes() and each.resizable()}
    return [*own.values()]


def _pieces_of(storage: Storage) -> tuple[Tensor, ...]:
    data: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.split(data, PIECE_BYTES)


def _copied(storage: Storage) -> list[Tensor]:
    is_pinned = storage.device.type == "cuda"
    return [
        torch.empty(len(piece), dtype=torch.uint8, pin_memory=is_pinned).copy_(piece)
        for piece in _pieces_of(storage)
    ]


def tensors_in(roots: Sequence[object]) -> Iterator[Tensor]:
    """All tensors of models, also those that their kernels keep beside the parameters."""
    seen, left = set[int](), [*roots]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
        elif isinstance(value, nn.Module) or type(value).__module__.startswith(_OWNERS):
            left += _attributes(value)


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name)
    product = getattr(value, "product", None)
    if (plain := getattr(product, "plain", None)) is not None:  # behind adapters, which stay
        yield plain
