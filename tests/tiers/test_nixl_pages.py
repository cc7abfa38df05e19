"""Pages that are read by NIXL, and what happens where it fails.

Each test has agents of tests/support/fake_nixl.py; those with the mark `nixl` have NIXL's own.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.fake_nixl import FakeAgents
from support.host_copy_cases import cache_of, holds, numbering_of, write
from support.waiting import wait_until

from minisgl.device.lanes import Lanes
from minisgl.distributed.addresses import Address
from minisgl.kvcache.copies import Copies, Load
from minisgl.kvcache.moves import Move, Place
from minisgl.tiers import tiers
from minisgl.tiers.carriers import nixl_pages, socket_pages
from minisgl.tiers.carriers.nixl_pages import Agent, NixlPages, Source, is_installed
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.host import slabs
from minisgl.tiers.peers import choice
from minisgl.tiers.peers.choice import MAX_FAILURES, Choice
from minisgl.tiers.peers.page_exchange import PageExchange
from minisgl.tiers.tiers import Tiers

PAGE_BYTES, NUM_PAGES, PART_PAGES = 10_000, 12, 2
NAME = b"name of the transfer"

Make = Callable[[str, bool], Agent]


class Rank:
    """Host pages of one rank, and its ends of transfers."""

    def __init__(self, address: str, make: Make | None, fill: int = 0) -> None:
        self.memory = np.full((NUM_PAGES, PAGE_BYTES), fill, np.uint8)
        self.memory[:, 0] += np.arange(NUM_PAGES, dtype=np.uint8)
        self.ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        regions = [(self.memory.ctypes.data, self.memory.nbytes)]
        self.nixl = NixlPages(lambda: regions, True, enter, make) if make else None
        views = [page.data for page in self.memory]
        self.exchange = PageExchange(
            Address.parse(address),
            b"",
            0,
            PAGE_BYTES,
            lambda pages: [views[page] for page in pages],
            enter,
            [self.nixl, SocketPages()] if self.nixl else [SocketPages()],
        )

    @property
    def address(self) -> str:
        return str(self.exchange.address)

    def move(self, source: Place, target: Place, pages: range, peer: str = "") -> None:
        move = Move(1, source, target, tuple(pages), name=NAME, peers=(peer,))
        self.exchange.start(move, [], lambda *end: self.ends.put(end))

    def wait_for_agent(self) -> None:
        assert self.nixl is not None
        wait_until(lambda: self.nixl is not None and self.nixl.is_ready)

    def choice(self, sender: Rank) -> Choice:
        """What it knows of the carriers of pages from another rank."""
        return self.exchange._choice_of(sender.exchange._engine)


def enter() -> None:
    pass


def exchange(sender: Rank, receiver: Rank, pages: range = range(6)) -> None:
    """Move pages, which come whole whatever carries them."""
    receiver.memory[:] = 0
    sender.move(Place.HOST, Place.ENGINE, pages)
    receiver.move(Place.ENGINE, Place.HOST, pages, sender.address)
    assert sender.ends.get() == receiver.ends.get() == (1, len(pages))
    assert np.array_equal(receiver.memory[pages], sender.memory[pages])
    assert not receiver.memory[pages.stop :].any()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nixl_pages, socket_pages):
        monkeypatch.setattr(module, "PART_BYTES", PART_PAGES * PAGE_BYTES)


@pytest.fixture
def agents() -> FakeAgents:
    return FakeAgents()


@pytest.fixture
def ranks(tmp_path: Path, agents: FakeAgents) -> Iterator[tuple[Rank, Rank]]:
    """Of an engine that sends and one that receives."""
    both = [Rank(f"{tmp_path}/{name}", agents.make, fill) for name, fill in (("a", 100), ("b", 0))]
    for rank in both:
        rank.wait_for_agent()
    yield both[0], both[1]
    for rank in both:
        rank.exchange.close()
        assert rank.ends.empty(), "a transfer ended twice"
    assert not agents.alive


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.nixl)])
def make(request: pytest.FixtureRequest, agents: FakeAgents) -> Make | None:
    """None: NIXL's own agents."""
    if request.param == "fake":
        return agents.make
    pytest.importorskip("nixl", reason="NIXL is not installed: scripts/tools/try_nixl.sh")
    return nixl_pages._make_agent


@pytest.mark.parametrize("address", ["unix", "127.0.0.1:0"])
def test_pages_are_read_into_their_places(make: Make, address: str, tmp_path: Path) -> None:
    sender = Rank(f"{tmp_path}/a" if address == "unix" else address, make, 100)
    receiver = Rank(f"{tmp_path}/b" if address == "unix" else address, make)
    for rank in (sender, receiver):
        rank.wait_for_agent()
    for _ in range(2):
        exchange(sender, receiver)
    known = receiver.choice(sender)
    assert not known._failures and known._tries["NIXL"] >= 2
    for rank in (sender, receiver):
        rank.exchange.close()


def test_each_way_is_tried_and_then_the_faster_one_is_used(
    ranks: tuple[Rank, Rank], agents: FakeAgents
) -> None:
    known, names = Choice(), ("NIXL", "socket")
    for carrier, seconds in (("NIXL", 9.0), ("NIXL", 1.0), ("socket", 3.0), ("socket", 2.0)):
        assert known.among(names) == carrier
        known.carried(carrier, 1, seconds)
    assert known.among(names) == "NIXL"  # whose first time was for the connection
    known.carried("socket", 10, 5.0)
    assert known.among(names) == "socket" and known.among(["NIXL"]) == "NIXL"

    sender, receiver = ranks
    agents.num_polls = 100
    exchange(sender, receiver, range(12))
    assert agents.num_reads >= 2 and agents.num_progressed > 0
    agents.num_polls = 0
    for carrier, num_reads in (("NIXL", 3), ("socket", 0)):
        before = agents.num_reads
        receiver.choice(sender)._seconds = {each: float(each != carrier) for each in names}
        exchange(sender, receiver)
        assert agents.num_reads - before == num_reads


@pytest.mark.parametrize("who", ["sender", "receiver", "nobody"])
def test_who_lacks_nixl_uses_the_socket(who: str, tmp_path: Path, agents: FakeAgents) -> None:
    sender = Rank(f"{tmp_path}/a", agents.make if who == "receiver" else None, 100)
    receiver = Rank(f"{tmp_path}/b", agents.make if who == "sender" else None)
    for rank in (sender, receiver):
        if rank.nixl is not None:
            rank.wait_for_agent()
    exchange(sender, receiver)
    assert agents.num_reads == 0
    for rank in (sender, receiver):
        rank.exchange.close()


@pytest.mark.parametrize("call", ["make", "register", "metadata"])
def test_an_agent_that_cannot_be_had_is_said_once(
    call: str, tmp_path: Path, agents: FakeAgents, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        if name == call:
            raise RuntimeError("no transport")

    agents.before = refuse
    ranks = [Rank(f"{tmp_path}/{name}", agents.make) for name in "ab"]
    wait_until(lambda: len(caplog.records) == 2)
    exchange(*ranks)
    assert (
        caplog.messages
        == ["NIXL cannot be used, KV pages travel by socket: RuntimeError('no transport')"] * 2
    )
    for rank in ranks:
        rank.exchange.close()


@pytest.mark.parametrize("call", ["add", "initialize", "transfer", "check"])
def test_what_nixl_cannot_read_comes_by_socket(
    call: str, ranks: tuple[Rank, Rank], agents: FakeAgents, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = ranks
    agents.num_polls = 1

    def refuse(name: str) -> None:
        if name == call:
            raise RuntimeError("another version")

    agents.before = refuse
    # Each failure is said; after a few, this rank is asked by socket alone.
    for _ in range(2 * MAX_FAILURES):
        receiver.wait_for_agent()
        exchange(sender, receiver)
    assert (
        caplog.messages
        == ["KV pages travel by socket, NIXL cannot read them: RuntimeError('another version')"]
        * MAX_FAILURES
    )
    assert agents.num_reads == 0


@pytest.mark.parametrize("state", ["PROC", "ERR"])
def test_a_read_that_does_not_end_well_ends_its_agent_which_another_follows(
    state: str, ranks: tuple[Rank, Rank], agents: FakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_pages, "READ_S", 0.02)
    sender, receiver = ranks
    assert receiver.nixl is not None
    before = receiver.nixl._own.agent
    assert before in agents.alive
    agents.state = state
    ended: list[bool] = []

    def look(call: str) -> None:
        if call == "make":
            ended.append(before not in agents.alive)

    agents.before = look
    exchange(sender, receiver)  # the rest of it, or all, by socket
    agents.state = ""
    receiver.wait_for_agent()
    assert ended[0] and before not in agents.alive, "somebody may still write to the pages"
    assert receiver.nixl._own.agent != before
    exchange(sender, receiver)
    assert agents.num_reads > 0


def test_the_agent_of_an_engine_that_was_started_again_replaces_the_one_before(
    ranks: tuple[Rank, Rank], tmp_path: Path, agents: FakeAgents
) -> None:
    sender, receiver = ranks
    exchange(sender, receiver)
    assert sender.nixl is not None and receiver.nixl is not None
    before = sender.nixl._own.agent
    sender.exchange.close()
    again = Rank(f"{tmp_path}/a", agents.make, 50)
    again.wait_for_agent()
    exchange(again, receiver)
    assert again.nixl is not None
    assert agents.alive[receiver.nixl._own.agent].known == {again.nixl._own.agent} != {before}
    again.exchange.close()


def test_remote_agents_are_kept_up_to_a_number(
    ranks: tuple[Rank, Rank],
    tmp_path: Path,
    agents: FakeAgents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_pages, "MAX_KNOWN", 2)
    monkeypatch.setattr(choice, "NUM_TRIES", 1 << 60)  # it never comes to the socket
    _, receiver = ranks
    senders = [Rank(f"{tmp_path}/{name}", agents.make) for name in "cde"]
    for sender in senders:
        sender.wait_for_agent()
    assert receiver.nixl is not None
    known = agents.alive[receiver.nixl._own.agent].known
    for order, expected in ((senders[:2], "cd"), (senders[:1], "cd"), (senders[2:], "ce")):
        for sender in order:
            exchange(sender, receiver)
        names = {sender.nixl._own.agent: name for sender, name in zip(senders, "cde", strict=True)}
        assert sorted(names[agent] for agent in known) == list(expected)
    for sender in senders:
        sender.exchange.close()


def test_memory_is_registered_when_all_of_it_is_allocated_and_not_after_the_end(
    agents: FakeAgents,
) -> None:
    allocated: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def regions() -> Iterator[tuple[int, int]]:
        for _ in range(2):
            yield allocated.get()

    memory = np.zeros(100, np.uint8)
    nixl = NixlPages(regions, False, enter, agents.make)
    allocated.put((memory.ctypes.data, 50))
    assert not nixl.is_ready and not described(nixl, memory).agent and not agents.made
    allocated.put((memory.ctypes.data + 50, 50))
    wait_until(lambda: nixl.is_ready)
    source = described(nixl, memory)
    assert source.addresses == (memory.ctypes.data,)
    assert agents.made == [(source.agent, False)]
    nixl.close()
    assert not nixl.is_ready and not agents.alive

    ended = NixlPages(regions, False, enter, agents.make)
    ended.close()
    for _ in range(2):
        allocated.put((memory.ctypes.data, 50))
    wait_until(lambda: not any(t.name == "minisgl-nixl" for t in nixl_pages.threading.enumerate()))
    assert len(agents.made) == 1


def described(nixl: NixlPages, page: np.ndarray[Any, Any]) -> Source:
    return msgspec.msgpack.decode(nixl.put(0, [page.data]).description, type=Source)


def test_a_host_cache_lets_nixl_read_its_slabs(
    tmp_path: Path, agents: FakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 3 * 4096)  # several slabs
    monkeypatch.setattr(tiers, "is_installed", lambda: True)
    monkeypatch.setattr(nixl_pages, "_make_agent", agents.make)
    cpu = torch.device("cpu")
    memory = [cache_of(cpu), cache_of(cpu)]
    caches = [Tiers(kv, 12, numbering_of(kv), Lanes(cpu)) for kv in memory]
    peers, _ = [
        cache.listen(f"{tmp_path}/{name}", b"").ranks
        for cache, name in zip(caches, "ab", strict=True)
    ]
    exchanges = [cache._exchange for cache in caches]
    assert all(each and each._host_carriers[0].name == "NIXL" for each in exchanges)
    wait_until(lambda: all(each and each._host_carriers[0].is_ready for each in exchanges))
    assert [private for _, private in agents.made] == [True, True]
    for page in range(1, 9):
        write(memory[0], page, float(page))
    caches[0].copies.queue(Copies(offloads=tuple((page, page + 2) for page in range(1, 9))))
    ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    host_pages = tuple(range(3, 11))
    send = Move(1, Place.HOST, Place.ENGINE, host_pages, name=NAME)
    take = Move(2, Place.ENGINE, Place.HOST, host_pages[::-1], name=NAME, peers=peers)
    caches[0].move([send], lambda *end: ends.put(end))
    caches[1].move([take], lambda *end: ends.put(end))
    assert {ends.get(), ends.get()} == {(1, 8), (2, 8)}
    assert agents.num_reads >= 1
    load = Load(1, host_pages[::-1], tuple(range(1, 9)))
    caches[1].copies.queue(Copies(loads=(load,)))()[1].wait()
    assert all(holds(memory[1], page, float(page)) for page in range(1, 9))
    for cache in caches:
        cache.close()
    assert not agents.alive


@pytest.mark.nixl
def test_an_agent_of_nixl_listens_on_loopback_alone_and_costs_nothing_while_idle() -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed: scripts/tools/try_nixl.sh")
    assert is_installed()
    before = listening()
    agent = nixl_pages._make_agent("agent", True)
    opened = listening() - before
    assert opened and all(address.startswith("0100007F:") for address in opened)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.25
    del agent  # which ends what it does, without the garbage collector
    wait_until(lambda: listening() == before)


def listening() -> set[str]:
    """The addresses of IPv4 at which this process listens, as /proc has them."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}
