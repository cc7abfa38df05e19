"""The memories behind the device of one rank: host memory, the disk, other engines.

Host memory takes part in steps (host/host_copies.py): plans carry its copies. Moves belong to no
plan. The disk and the other engines are tiers that carry them out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from minisgl.attention.state import LayerState
from minisgl.device.copy_lanes import CopyLane, copy_lane
from minisgl.device.lanes import Lanes
from minisgl.distributed.addresses import Address, Listening
from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.errors import without_words
from minisgl.kvcache.copies import HostTraffic, LoadRule
from minisgl.kvcache.moves import Done, Move
from minisgl.tiers.carriers.carrier import Carrier
from minisgl.tiers.carriers.device_pages import DevicePages
from minisgl.tiers.carriers.nixl_pages import NixlPages, is_installed
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.disk.disk_moves import DiskMoves
from minisgl.tiers.disk.page_files import PageFiles
from minisgl.tiers.host.host_copies import HostCopies
from minisgl.tiers.host.numbering import Numbering
from minisgl.tiers.peers.page_exchange import PageExchange

logger = logging.getLogger(__name__)


class Tiers:
    """One thread calls `move` and what `copies` says; any thread may call the rest."""

    def __init__(
        self,
        states: Sequence[LayerState],
        num_host_pages: int,
        numbering: Numbering,
        lanes: Lanes,
        make_lane: Callable[[Lanes], CopyLane] = copy_lane,
        store: PageFiles | None = None,
        report: Callable[[float], None] = lambda fraction: None,
        rank: int = 0,
    ) -> None:
        """store: the disk. report: gets the fraction of host memory that is pinned.
        rank: this one, of those that divide the requests."""
        self.copies = HostCopies(states, num_host_pages, numbering, lanes, make_lane, report)
        self._rank = rank
        self._lanes = lanes
        self._make_lane = make_lane
        self._disk: DiskMoves | None = None
        if store is not None:
            self._disk = DiskMoves(store, self.copies.slabs.views, lanes.enter_thread)
        self._exchange: PageExchange | None = None

    def move(self, moves: Sequence[Move], done: Done) -> None:
        """Begin moves, after all copies that were queued before.

        `done` is called for each on any thread, whatever goes wrong, but not after `close`.
        """
        for move in moves:
            if move.rank != self._rank:
                done(move.id, len(move.pages))
                continue
            tier = self._disk if move.uses_disk else self._exchange
            assert tier is not None, "the tier of a move is there"
            tier.start(move, self.copies.before(move), done)

    def listen(self, address: str, token: bytes, rank: int) -> Listening:
        """Take part in moves between engines. It comes before any of them; the last call counts.

        address: of the engine; at a Unix socket pages of the device can be moved, too, if nothing
        is beside them; buffers are allocated for that. token: of the cluster. Raises OSError.
        """
        if self._exchange is not None:
            self._exchange.close()
        where = Address.parse(address).of_rank(rank)
        slabs, enter_thread = self.copies.slabs, self._lanes.enter_thread
        device = self._device_pages() if where.path and not self.copies.has_parts else []
        host: list[Carrier[memoryview]] = [SocketPages()]
        if is_installed():
            host = [NixlPages(slabs.regions, where.is_private(), enter_thread), *host]
        page_bytes = self.copies.page_bytes
        try:
            self._exchange = PageExchange(
                where, token, rank, page_bytes, slabs.views, enter_thread, host, device
            )
        except OSError:
            for carrier in device:
                carrier.close()
            raise
        return Listening((str(self._exchange.address),), is_direct=bool(device))

    def _device_pages(self) -> list[DevicePages]:
        """The straight way between devices, where there is one."""
        self._lanes.enter_thread()
        reason: object
        try:
            assert self.copies.planes is not None, "there is one stage"
            return [DevicePages(self.copies.planes, self._lanes, self._make_lane)]
        except (PeerMemoryError, OSError) as error:
            reason = error
        except RuntimeError as error:  # there is no memory for it
            reason = without_words(error)
        logger.warning("KV pages of other engines come through host memory: %s", reason)
        return []

    def traffic(self) -> HostTraffic:
        copied = self.copies.traffic()
        if self._disk is None:
            return copied
        return replace(copied, writes=self._disk.writes.total(), reads=self._disk.reads.total())

    def measure_disk(self, host: LoadRule) -> LoadRule:
        """The rule by which reads from the disk pay, which are followed by loads under `host`.

        Overwrites host pages, and blocks meanwhile; nothing may run.
        """
        assert self._disk is not None
        read_s, alone_s = self._disk.measure(self.copies.slabs.num_pages)
        delay_s = host.delay_s + max(0.0, alone_s - read_s)
        return LoadRule(host.load_s + read_s, host.compute_s, delay_s)

    def close(self) -> None:
        """End the moves, and free the host memory. No copy may be under way."""
        for tier in (self._exchange, self._disk):
            if tier is not None:
                tier.close()
        self.copies.close()
