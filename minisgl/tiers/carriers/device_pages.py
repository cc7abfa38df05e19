"""Pages that go straight from one device to another on the same host, without host memory.

    sender    pages ─[gather]─▶ slot of its window
    receiver                        └───[DMA]───▶ arriving ─[scatter]─▶ pages

The window is memory that other processes can map (shared_buffers.py). The receiver's GPU only
scatters, the rest is work for a copy engine. The buffers are allocated when an engine begins to
share pages, and none of them is a page of the KV cache: so no other process ever reads or writes
those.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from minisgl.device.copy_lanes import CopyLane, copy_lane, upload_pages
from minisgl.device.lanes import Lanes
from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.errors import without_words
from minisgl.kernels.cache_pages.page_copies import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.tiers.carriers.carrier import PART_BYTES, Carrier, CarrierError, Readable
from minisgl.tiers.carriers.connections import SILENCE_S
from minisgl.tiers.carriers.shared_buffers import (
    BufferSharing,
    MappedBuffer,
    SharedBuffer,
    sharing_of,
)

logger = logging.getLogger(__name__)

NUM_SLOTS = 2  # each is one transfer's for as long as it sends
MAX_MAPPED = 64  # windows of other ranks
INDIRECT = "KV pages cannot go straight from device to device"


class Window(Struct, array_like=True):
    """Where a rank has put the pages that another one takes: a slot."""

    handle: bytes  # of the buffer
    offset: int  # of the slot in it, in bytes


@dataclass(slots=True)
class _Memory:
    """What copies use. It is given back as a whole."""

    planes: Planes
    window: SharedBuffer
    arriving: Tensor  # [num_pages, page_bytes] uint8: a part that comes
    mapped: dict[str, tuple[bytes, MappedBuffer]] = field(default_factory=dict)  # see _mapped


class DevicePages(Carrier[int]):
    """The part of one rank. Any thread may call it that has entered the lanes."""

    name = "device"

    def __init__(
        self, planes: Planes, lanes: Lanes, make_lane: Callable[[Lanes], CopyLane] = copy_lane
    ) -> None:
        """Allocate the buffers. Raises PeerMemoryError, OSError, or torch's errors if there is no
        memory."""
        self._device = lanes.device
        self._page_bytes = planes.page_bytes
        self._num_pages = max(1, min(PART_BYTES // self._page_bytes, len(planes.words[0])))
        self._lane = make_lane(lanes)
        self._lock = threading.Lock()  # of the lane, and of what is behind it
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # slots
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        sharing = sharing_of(self._device)
        self._map = sharing.map
        self._handle = b""  # of the window
        self._memory: _Memory | None = None  # None: closed
        self._lane.queue(lambda: self._allocate(planes, sharing), []).wait()

    def _allocate(self, planes: Planes, sharing: BufferSharing) -> None:
        window = sharing.share(NUM_SLOTS * self._num_pages * self._page_bytes)
        try:
            shape = (self._num_pages, self._page_bytes)
            arriving = torch.empty(shape, dtype=torch.uint8, device=self._device)
            self._handle = window.handle
            self._memory = _Memory(planes, window, arriving)
            self._gather(self._memory, 0, [0])  # compiles the kernel
        except BaseException:
            window.close()
            raise

    def part_size(self, page_bytes: int) -> int:
        return self._num_pages

    # -- sending -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lend(self) -> Iterator[int]:
        try:
            slot = self._free.get(timeout=SILENCE_S)
        except queue.Empty:
            raise CarrierError(f"{INDIRECT}: other transfers use all of its memory") from None
        try:
            yield slot
        finally:
            self._free.put(slot)

    def put(self, slot: int, pages: Sequence[int]) -> Readable:
        self._run(lambda memory: self._gather(memory, slot, pages))
        window = Window(self._handle, slot * self._num_pages * self._page_bytes)
        return Readable(msgspec.msgpack.encode(window))

    def _gather(self, memory: _Memory, slot: int, pages: Sequence[int]) -> None:
        if not pages:
            return
        slots = memory.window.memory.view(NUM_SLOTS, self._num_pages, self._page_bytes)
        gather_pages(memory.planes, upload_pages(pages, self._device), slots[slot])

    # -- receiving ---------------------------------------------------------------------------------

    def fetch(
        self, peer: socket.socket, address: str, description: bytes, pages: Sequence[int]
    ) -> None:
        window = msgspec.msgpack.decode(description, type=Window)

        def work(memory: _Memory) -> None:
            arriving = memory.arriving[: len(pages)]
            self._mapped(memory, address, window.handle).copy_to(arriving, window.offset)
            scatter_pages(memory.planes, upload_pages(pages, self._device), arriving)

        self._run(work)

    def _mapped(self, memory: _Memory, address: str, handle: bytes) -> MappedBuffer:
        """The buffer of the rank at `address`, which has another one when it is started again.

        The least recently used are the first in the table.
        """
        found = memory.mapped.pop(address, None)
        if found is not None and found[0] != handle:
            found[1].close()
            found = None
        if found is None:
            if len(memory.mapped) >= MAX_MAPPED:
                _, oldest = memory.mapped.pop(next(iter(memory.mapped)))
                oldest.close()
            found = handle, self._map(handle)
        memory.mapped[address] = found
        return found[1]

    # -- both --------------------------------------------------------------------------------------

    def _run(self, work: Callable[[_Memory], None]) -> None:
        """Do `work` on the lane, and wait for its end. Raises CarrierError."""
        with self._lock:
            memory = self._memory
            if memory is None:
                raise CarrierError(f"{INDIRECT}: the engine is being closed")
            try:
                self._lane.queue(lambda: work(memory), []).wait()
            except PeerMemoryError as error:
                raise CarrierError(f"{INDIRECT}: {error}") from error

    def close(self) -> None:
        """Free the buffers, after the copy under way."""

        def give_back(memory: _Memory) -> None:
            self._memory = None
            memory.window.close()
            for _, mapped in memory.mapped.values():
                mapped.close()

        try:
            self._run(give_back)
        except (CarrierError, RuntimeError) as error:
            logger.debug("Memory of other engines stays mapped: %s", without_words(error))
