"""Pages that go straight from one device to another on the same host, without host memory.

    sender    pages ─[gather]─▶ slot of its window
    receiver                        └───[DMA]───▶ arriving ─[scatter]─▶ pages

The window is memory that other processes can map (shared_buffers.py). A receiver copies a part at a
time, as page_parts.py says; its GPU only scatters, the rest is work for a copy engine. The buffers
are allocated when an engine begins to share pages, and none of them is a page of the KV cache: so
no other process ever reads or writes those.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from msgspec import Struct
from torch import Tensor

from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.errors import without_words
from minisgl.kernels.cache_pages.dispatch import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.runner.copy_lanes import CopyLane, copy_lane, upload_pages
from minisgl.runner.lanes import Lanes
from minisgl.runner.page_wire import SILENCE_S
from minisgl.runner.shared_buffers import MappedBuffer, SharedBuffer, Sharing, sharing_of

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
NUM_SLOTS = 2  # each is one transfer's for as long as it sends
MAX_MAPPED = 64  # windows of other ranks


class Window(Struct, array_like=True):
    """Where a rank puts the pages that another one takes: a slot."""

    handle: bytes  # of the buffer
    offset: int  # of the slot in it, in bytes
    num_pages: int  # for which there is room
    page_bytes: int  # of a packed page


@dataclass(slots=True)
class _Memory:
    """What copies use. It is given back as a whole."""

    planes: Planes
    window: SharedBuffer
    arriving: Tensor  # [num_pages, page_bytes] uint8: a part that comes
    mapped: dict[str, tuple[bytes, MappedBuffer]] = field(default_factory=dict)  # see _mapped


class DevicePages:
    """The part of one rank. Any thread may call it that has entered the lanes."""

    def __init__(
        self, planes: Planes, lanes: Lanes, make_lane: Callable[[Lanes], CopyLane] = copy_lane
    ) -> None:
        """Allocate the buffers. Raises PeerMemoryError, OSError, or torch's errors if there is no
        memory."""
        self._device = lanes.device
        self._page_bytes = planes.page_bytes
        self._num_pages = max(1, min(PIECE_BYTES // self._page_bytes, len(planes.words[0])))
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

    def _allocate(self, planes: Planes, sharing: Sharing) -> None:
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

    # -- sending -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lend(self) -> Iterator[int]:
        """A slot. Blocks until there is one; raises PeerMemoryError."""
        try:
            slot = self._free.get(timeout=SILENCE_S)
        except queue.Empty:
            raise PeerMemoryError("other transfers use all of its memory") from None
        try:
            yield slot
        finally:
            self._free.put(slot)

    def window(self, slot: int) -> Window:
        """What another rank needs to read a slot."""
        offset = slot * self._num_pages * self._page_bytes
        return Window(self._handle, offset, self._num_pages, self._page_bytes)

    def put(self, slot: int, pages: Sequence[int]) -> None:
        """Copy pages, which may be none, into a slot of the caller's. Blocks.

        What was in the slot before has been there until now. Raises PeerMemoryError.
        """
        if len(pages) > self._num_pages:
            raise PeerMemoryError("the other engine wants more than there is room for")
        self._run(lambda memory: self._gather(memory, slot, pages))

    def _gather(self, memory: _Memory, slot: int, pages: Sequence[int]) -> None:
        if not pages:
            return
        slots = memory.window.memory.view(NUM_SLOTS, self._num_pages, self._page_bytes)
        gather_pages(memory.planes, upload_pages(pages, self._device), slots[slot])

    # -- receiving ---------------------------------------------------------------------------------

    def part_size(self, window: Window) -> int:
        """Number of pages that travel at once. Raises PeerMemoryError."""
        if window.page_bytes != self._page_bytes or window.num_pages < 1:
            raise PeerMemoryError("the other engine has other pages")
        return min(window.num_pages, self._num_pages)

    def take(self, address: str, window: Window, pages: Sequence[int]) -> None:
        """Copy what is in a slot of the rank at `address` to `pages`, no more than `part_size`.

        Blocks. Raises PeerMemoryError; nothing writes to the pages any more then, either.
        """

        def work(memory: _Memory) -> None:
            arriving = memory.arriving[: len(pages)]
            self._mapped(memory, address, window.handle).copy_to(arriving, window.offset)
            scatter_pages(memory.planes, upload_pages(pages, self._device), arriving)

        self._run(work)

    def _mapped(self, memory: _Memory, address: str, handle: bytes) -> MappedBuffer:
        """The buffer of the rank at `address`, which has another one when it is started again.

        The least recently used are the first in the table.
        """
        known, mapped = memory.mapped.pop(address, (b"", None))
        if mapped is not None and known != handle:
            mapped.close()
            mapped = None
        if mapped is None:
            if len(memory.mapped) >= MAX_MAPPED:
                _, oldest = memory.mapped.pop(next(iter(memory.mapped)))
                oldest.close()
            mapped = self._map(handle)
        memory.mapped[address] = handle, mapped
        return mapped

    # -- both --------------------------------------------------------------------------------------

    def _run(self, work: Callable[[_Memory], None]) -> None:
        """Do `work` on the lane, and wait for its end."""
        with self._lock:
            memory = self._memory
            if memory is None:
                raise PeerMemoryError("the engine is being closed")
            self._lane.queue(lambda: work(memory), []).wait()

    def close(self) -> None:
        """Free the buffers, after the copy under way."""
        with self._lock:
            if self._memory is None:
                return
            memory, self._memory = self._memory, None

            def give_back() -> None:
                memory.window.close()
                for _, mapped in memory.mapped.values():
                    mapped.close()

            try:
                self._lane.queue(give_back, []).wait()
            except RuntimeError as error:
                logger.debug("Memory of other engines stays mapped: %s", without_words(error))
