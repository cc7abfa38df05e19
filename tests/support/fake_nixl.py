"""Agents with the calls of NIXL's that minisgl uses, within one process.

They copy memory as NIXL would, and refuse what it would refuse: memory that is not registered,
agents that are unknown or gone, and calls of two threads at once.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(eq=False)
class Reading:
    """The handle of a transfer."""

    copies: list[tuple[int, int, int]]  # from, to, bytes
    polls_left: int


class FakeAgents:
    """All agents that reach each other."""

    def __init__(self) -> None:
        self.alive: weakref.WeakValueDictionary[str, FakeAgent] = weakref.WeakValueDictionary()
        self.made: list[tuple[str, bool]] = []
        self.num_polls = 0  # after which a transfer ends
        self.num_reads = 0
        self.num_progressed = 0
        # Called with the name of each call before it is carried out; may raise.
        self.before: Callable[[str], None] = lambda call: None
        self.state = ""  # of all transfers, instead of their own

    def make(self, name: str, is_private: bool) -> FakeAgent:
        self.made.append((name, is_private))
        return FakeAgent(self, name)


class FakeAgent:
    def __init__(self, agents: FakeAgents, name: str) -> None:
        self.name = name
        self._agents = agents
        self._regions: list[tuple[int, int]] = []
        self._known: set[str] = set()
        self._busy = threading.Lock()
        with self._call("make"):
            agents.alive[name] = self

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        assert self._busy.acquire(blocking=False), "agents are not thread-safe"
        try:
            self._agents.before(name)
            yield
        finally:
            self._busy.release()

    def register_memory(self, regions: Sequence[tuple[int, int, int, str]], kind: str) -> None:
        assert kind == "DRAM"
        with self._call("register"):
            self._regions += [(address, size) for address, size, _, _ in regions]

    def get_agent_metadata(self) -> bytes:
        with self._call("metadata"):
            return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        with self._call("add"):
            self._known.add(metadata.decode())
            return metadata.decode()

    def remove_remote_agent(self, agent: str) -> None:
        with self._call("remove"):
            self._known.remove(agent)

    def get_xfer_descs(self, pages: np.ndarray[Any, Any], kind: str) -> list[tuple[int, int]]:
        assert kind == "DRAM" and pages.dtype == np.uint64 and not pages[:, 2].any()
        return [(int(address), int(size)) for address, size, _ in pages]

    def initialize_xfer(
        self, way: str, own: list[tuple[int, int]], other: list[tuple[int, int]], agent: str
    ) -> Reading:
        assert way == "READ"
        with self._call("initialize"):
            remote = self._agents.alive.get(agent)
            if remote is None or agent not in self._known:
                raise RuntimeError("REMOTE_DISCONNECT")
            copies = []
            for (target, size), (source, count) in zip(own, other, strict=True):
                assert size == count and self._has(target, size)
                if not remote._has(source, size):
                    raise RuntimeError("NOT_FOUND")
                copies.append((source, target, size))
            return Reading(copies, self._agents.num_polls)

    def _has(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length for start, length in self._regions
        )

    def transfer(self, handle: Reading) -> str:
        with self._call("transfer"):
            return self._state(handle)

    def check_xfer_state(self, handle: Reading) -> str:
        with self._call("check"):
            handle.polls_left -= 1
            return self._state(handle)

    def _state(self, handle: Reading) -> str:
        if self._agents.state:
            return self._agents.state
        if handle.polls_left > 0:
            return "PROC"
        for source, target, size in handle.copies:
            ctypes.memmove(target, source, size)
        self._agents.num_reads += 1
        return "DONE"

    def release_xfer_handle(self, handle: Reading) -> None:
        with self._call("release"):
            handle.copies.clear()

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self._call("progress"):
            self._agents.num_progressed += 1
            return {}

    @property
    def known(self) -> set[str]:
        return self._known
