"""Host pages of other engines, read by NIXL where it is installed.

NIXL (https://github.com/ai-dynamo/nixl) reads the memory of another process by the best way that
UCX finds: RDMA between hosts, the system's copies between processes of one host, or TCP. Each rank
has an agent, whose memory is registered once all of it is allocated; until then, and wherever
anything goes wrong, pages travel by socket.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from minisgl.errors import MinisglError

logger = logging.getLogger(__name__)

# After which a read that has not ended is given up. The peer waits for longer.
READ_S = 5.0
POLL_S = 0.0005
MAX_REMOTES = 64
MAX_FAILURES = 3  # of reads from a remote rank, after which it is asked by socket
NUM_TRIES = 2  # of each way, before the faster one is known; the first connects
NAME_BYTES = 8
_HOST = "DRAM"  # NIXL's word for host memory


class NixlError(MinisglError):
    """Pages could not be read by NIXL; a socket may bring them."""


class Agent(Protocol):
    """What is used of nixl.nixl_agent. Any call may raise any error."""

    def register_memory(self, regions: Sequence[tuple[int, int, int, str]], kind: str) -> Any: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, pages: np.ndarray[Any, Any], kind: str) -> Any: ...
    def initialize_xfer(self, way: str, own: Any, other: Any, agent: str) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...
    def get_new_notifs(self) -> object: ...


class Readable(Struct, array_like=True):
    """What a rank needs to read pages of another one."""

    agent: str = ""  # its name; empty: they cannot be read
    metadata: bytes = b""  # of the agent
    addresses: tuple[int, ...] = ()  # of the pages


class Carrier(StrEnum):
    NIXL = "NIXL"
    SOCKET = "socket"


@dataclass(slots=True, eq=False)
class Remote:
    """A rank of another engine, from which pages are read. Threads may share it: of what two note
    at once, one may be lost."""

    agent: str
    is_known: bool = False  # to the agent here
    num_failures: int = 0
    _tries: Counter[Carrier] = field(default_factory=Counter)
    _seconds: dict[Carrier, float] = field(default_factory=dict)  # a byte takes, at best

    def choose(self) -> Carrier:
        """What carries the next pages: the faster one, once both are measured."""
        if self.num_failures >= MAX_FAILURES:
            return Carrier.SOCKET
        for carrier in Carrier:
            if self._tries[carrier] < NUM_TRIES:
                return carrier
        return min(self._seconds, key=self._seconds.__getitem__)

    def carried(self, carrier: Carrier, num_bytes: int, seconds: float) -> None:
        """Note how long something took."""
        self._tries[carrier] += 1
        before = self._seconds.get(carrier, float("inf"))
        self._seconds[carrier] = min(before, seconds / num_bytes)
        if self._tries[carrier] == NUM_TRIES <= min(self._tries[each] for each in Carrier):
            speeds = [f"{name}: {1e-9 / self._seconds[name]:.1f} GB/s" for name in Carrier]
            chosen = self.choose()
            logger.info("KV pages of another engine come by %s (%s)", chosen, ", ".join(speeds))


class NixlPages:
    """The agent of one rank. Any thread may call it."""

    def __init__(
        self,
        regions: Callable[[], Iterable[tuple[int, int]]],
        is_private: bool,
        enter_thread: Callable[[], None],
        make_agent: Callable[[str, bool], Agent] | None = None,
    ) -> None:
        """regions: addresses and bytes of all host memory; it may block until it is allocated.

        is_private: all engines are on this machine. make_agent: with a name, and `is_private`.
        """
        self._regions = regions
        self._is_private = is_private
        self._enter_thread = enter_thread
        self._make_agent = make_agent or _make_agent
        self._lock = threading.Lock()  # of all below: agents are not thread-safe
        self._agent: Agent | None = None
        self._name, self._metadata = "", b""
        self._remotes: dict[str, Remote] = {}  # by address, in the order of their last use
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        threading.Thread(target=self._register, name="minisgl-nixl", daemon=True).start()

    def _register(self) -> None:
        try:
            self._enter_thread()
            regions = [(address, size, 0, "") for address, size in self._regions()]
            name = f"minisgl-{secrets.token_hex(NAME_BYTES)}"
            with self._lock:
                if self._closed:
                    return
                agent = self._make_agent(name, self._is_private)
                agent.register_memory(regions, _HOST)
                self._name, self._metadata = name, agent.get_agent_metadata()
                self._agent = agent
        except Exception as error:
            if not self._closed:
                logger.warning("NIXL cannot be used, KV pages travel by socket: %r", error)
            return
        logger.info("KV pages can be read by NIXL")

    @property
    def is_ready(self) -> bool:
        return self._agent is not None

    def readable(self, views: Iterable[memoryview]) -> Readable:
        """What other ranks need to read pages of this one."""
        with self._lock:
            if self._agent is None:
                return Readable()
            return Readable(self._name, self._metadata, tuple(map(_address_of, views)))

    def progress(self) -> None:
        """Let others connect and read; for as long as they do, it is called again and again.

        A thread of NIXL's own would do that, and would take a whole core even while there is
        nothing to do.
        """
        with self._lock:
            if self._agent is not None:
                try:
                    self._agent.get_new_notifs()
                except Exception as error:
                    logger.debug("NIXL makes no progress: %r", error)

    def remote(self, address: str, agent: str) -> Remote:
        """The rank that listens at `address`, and has the agent of that name."""
        with self._lock:
            remote = self._remotes.pop(address, None)
            if remote is None or remote.agent != agent:
                if remote is not None:
                    self._forget(remote)  # its engine has been started again
                remote = Remote(agent)
            self._remotes[address] = remote
            if len(self._remotes) > MAX_REMOTES:
                self._forget(self._remotes.pop(next(iter(self._remotes))))
            return remote

    def _forget(self, remote: Remote) -> None:
        if remote.is_known and self._agent is not None:
            remote.is_known = False
            try:
                self._agent.remove_remote_agent(remote.agent)
            except Exception as error:
                logger.debug("NIXL does not forget an agent: %r", error)

    def read(
        self,
        remote: Remote,
        metadata: bytes,
        addresses: Sequence[int],
        views: Sequence[memoryview],
    ) -> None:
        """Read pages at `addresses` of a remote rank into `views`. Blocks.

        Raises NixlError; nothing writes to the views any more then, either.
        """
        if len(addresses) != len(views):
            raise NixlError("the other engine offers other pages than were asked for")
        with self._lock:
            if self._agent is None or self._closed:
                raise NixlError("there is no agent")
            began = time.perf_counter()
            has_begun = False
            reason = f"it took longer than {READ_S:g} s"
            try:
                if not remote.is_known:
                    self._agent.add_remote_agent(metadata)
                    remote.is_known = True
                sizes = [len(view) for view in views]
                own = self._pages([_address_of(view) for view in views], sizes)
                other = self._pages(addresses, sizes)
                handle = self._agent.initialize_xfer("READ", own, other, remote.agent)
                has_begun = True
                state = self._agent.transfer(handle)
                while state == "PROC" and not self._closed:
                    if time.perf_counter() - began > READ_S:
                        break
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    self._agent.release_xfer_handle(handle)
                    remote.carried(Carrier.NIXL, sum(sizes), time.perf_counter() - began)
                    return
                if state != "PROC":
                    reason = f"its state is {state}"
            except Exception as error:
                reason = repr(error)
            remote.num_failures += 1
            if has_begun:
                # Some of it may be under way, and only the end of the agent surely ends that.
                handle = None
                self._end_agent()
                if not self._closed:
                    self._begin()
            else:
                self._forget(remote)
        raise NixlError(reason)

    def _pages(self, addresses: Sequence[int], sizes: Sequence[int]) -> Any:
        """NIXL's description of pages of this host or another."""
        assert self._agent is not None
        table = np.zeros((len(addresses), 3), dtype=np.uint64)  # the last column is the device
        table[:, 0], table[:, 1] = addresses, sizes
        return self._agent.get_xfer_descs(table, _HOST)

    def _end_agent(self) -> None:
        for remote in self._remotes.values():
            remote.is_known = False
        self._agent = None  # whose last reference it is

    def close(self) -> None:
        """End the agent, before the memory is freed. Waits for the call of NIXL under way."""
        self._closed = True
        with self._lock:
            self._end_agent()


def is_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


def _make_agent(name: str, is_private: bool) -> Agent:
    """An agent of NIXL; raises whatever the package may raise."""
    import nixl

    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    agent: Agent = nixl.nixl_agent(
        name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    )
    # Otherwise UCX listens on every interface of the machine.
    agent.create_backend(  # type: ignore[attr-defined]
        "UCX", {"engine_config": "NET_DEVICES=lo"} if is_private else {}
    )
    return agent


def _address_of(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
