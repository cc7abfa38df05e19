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
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from minisgl.tiers.carriers.carrier import (
    PART_BYTES,
    Carrier,
    CarrierAwayError,
    CarrierError,
    Readable,
)
from minisgl.tiers.carriers.connections import SILENCE_S

logger = logging.getLogger(__name__)

# After which a read that has not ended is given up. The peer waits for longer.
READ_S = 5.0
POLL_S = 0.0005
MAX_KNOWN = 64  # ranks of other engines
PART_PAGES = 256  # at most: describing pages to NIXL holds the interpreter's lock
NAME_BYTES = 8
BY_SOCKET = "KV pages travel by socket, NIXL cannot read them"
_HOST = "DRAM"  # NIXL's word for host memory


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


class Source(Struct, array_like=True):
    """What a rank needs to read pages of another one."""

    agent: str = ""  # its name; empty: it has none at this moment
    metadata: bytes = b""  # of the agent
    addresses: tuple[int, ...] = ()  # of the pages


class NixlPages(Carrier[memoryview]):
    """The agent of one rank. Any thread may call it."""

    name = "NIXL"

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
        self._own = Source()  # what others need to read its pages
        # The agents that it knows, by the address of their rank, in the order of their last use.
        self._known: dict[str, str] = {}
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
                self._own = Source(name, agent.get_agent_metadata())
                self._agent = agent
        except Exception as error:
            if not self._closed:
                logger.warning("NIXL cannot be used, KV pages travel by socket: %r", error)
            return
        logger.info("KV pages can be read by NIXL")

    @property
    def is_ready(self) -> bool:
        return self._agent is not None

    def part_size(self, page_bytes: int) -> int:
        return min(PART_PAGES, max(1, PART_BYTES // page_bytes))

    # -- sending -----------------------------------------------------------------------------------

    def put(self, slot: int, pages: Sequence[memoryview]) -> Readable:
        source = replace(self._own, addresses=tuple(map(_address_of, pages)))
        return Readable(msgspec.msgpack.encode(source))

    def wait(self, peer: socket.socket) -> None:
        """Let others connect and read until `peer` sends a message.

        A thread of NIXL's own would do that, and would take a whole core even while there is
        nothing to do.
        """
        deadline = time.monotonic() + SILENCE_S
        while not select.select([peer], [], [], POLL_S)[0]:
            if time.monotonic() > deadline:
                raise EOFError
            with self._lock:
                if self._agent is not None:
                    try:
                        self._agent.get_new_notifs()
                    except Exception as error:
                        logger.debug("NIXL makes no progress: %r", error)

    # -- receiving ---------------------------------------------------------------------------------

    def fetch(
        self, peer: socket.socket, address: str, description: bytes, pages: Sequence[memoryview]
    ) -> None:
        source = msgspec.msgpack.decode(description, type=Source)
        with self._lock:
            if self._agent is None or self._closed or not source.agent:
                raise CarrierAwayError(f"{BY_SOCKET}: there is no agent")
            if len(source.addresses) != len(pages):
                raise CarrierError(f"{BY_SOCKET}: the other engine offers other pages")
            if reason := self._read(address, source, pages):
                raise CarrierError(f"{BY_SOCKET}: {reason}")

    def _read(self, address: str, source: Source, pages: Sequence[memoryview]) -> str:
        """Read pages; returns why that has failed. Nothing writes to them any more in any case."""
        assert self._agent is not None
        deadline = time.monotonic() + READ_S
        handle: Any = None
        try:
            self._meet(address, source)
            sizes = [len(page) for page in pages]
            own = self._pages([_address_of(page) for page in pages], sizes)
            other = self._pages(source.addresses, sizes)
            handle = self._agent.initialize_xfer("READ", own, other, source.agent)
            state = self._agent.transfer(handle)
            while state == "PROC" and not self._closed and time.monotonic() < deadline:
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
                return ""
            late = f"it took longer than {READ_S:g} s"
            reason = late if state == "PROC" else f"its state is {state}"
        except Exception as error:
            reason = repr(error)
        if handle is None:
            self._forget(address)
            return reason
        # Part of the read may still be in progress. Only destroying the agent is sure to stop it.
        handle = None
        self._end_agent()
        if not self._closed:
            self._begin()
        return reason

    def _meet(self, address: str, source: Source) -> None:
        """Let the agent know that of the rank at `address`, which has another one when it is
        started again."""
        assert self._agent is not None
        if self._known.get(address) != source.agent:
            self._forget(address)
            self._agent.add_remote_agent(source.metadata)
        self._known.pop(address, None)
        self._known[address] = source.agent
        if len(self._known) > MAX_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, address: str) -> None:
        agent = self._known.pop(address, None)
        if agent is not None and self._agent is not None:
            try:
                self._agent.remove_remote_agent(agent)
            except Exception as error:
                logger.debug("NIXL does not forget an agent: %r", error)

    def _pages(self, addresses: Sequence[int], sizes: Sequence[int]) -> Any:
        """NIXL's description of pages of this host or another."""
        assert self._agent is not None
        table = np.zeros((len(addresses), 3), dtype=np.uint64)  # the last column is the device
        table[:, 0], table[:, 1] = addresses, sizes
        return self._agent.get_xfer_descs(table, _HOST)

    # -- the end -----------------------------------------------------------------------------------

    def _end_agent(self) -> None:
        self._known.clear()
        self._own = Source()
        self._agent = None  # the last reference: this destroys the agent

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
