"""A remote Launcher and Channel: two machines of two ranks each, in threads connected by queues."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.processes import pids_of
from support.waiting import wait_until

from minisgl.distributed.addresses import Listening
from minisgl.errors import CheckpointError, EngineStoppedError, MinisglError
from minisgl.ranks.processes.channel import (
    HEARTBEAT_S,
    Answered,
    Failed,
    Message,
    RankEnd,
    Ready,
    Waitable,
)
from minisgl.ranks.processes.launcher import ProcessState
from minisgl.ranks.processes.mask_ring import StepMasks
from minisgl.ranks.processes.plan_codec import CALL, unpacked
from minisgl.ranks.processes.remote_ranks import RemoteRanks
from minisgl.ranks.processes.rendezvous import FileRendezvous
from minisgl.ranks.processes.worker import RankSpec
from minisgl.runner.setup import Setup

NUM_RANKS = 4


class QueueEnd:
    def __init__(self, rank: int, to_rank_0: queue.Queue[Any]) -> None:
        self.rank = rank
        self.plans: queue.Queue[bytes | None] = queue.Queue()
        self.to_rank_0 = to_rank_0
        self.num_beats = 0

    def receive(self) -> bytes | None:
        return self.plans.get()

    def report(self, message: Message) -> None:
        self.to_rank_0.put((self.rank, message))

    def beat(self) -> None:
        self.num_beats += 1


class QueueChannel:
    def __init__(self) -> None:
        self.received: queue.Queue[tuple[int, Message | None] | MinisglError] = queue.Queue()
        self.ends = {rank: QueueEnd(rank, self.received) for rank in range(1, NUM_RANKS)}
        # Called once when ranks have failed and the cause is looked for.
        self.meanwhile: Callable[[], object] = lambda: None
        self.unreachable = False
        self.failure: MinisglError | None = None
        self.told: list[MinisglError] = []

    def end_of(self, rank: int) -> QueueEnd:
        return self.ends[rank]

    def launched(self) -> None:
        pass

    def send(self, data: bytes, masks: StepMasks | None = None) -> None:
        if self.unreachable:
            raise OSError
        for end in self.ends.values():
            end.plans.put(data)

    def send_close(self) -> None:
        for end in self.ends.values():
            end.plans.put(None)

    def receive(
        self, timeout_s: float, wakers: Sequence[Waitable] = ()
    ) -> list[tuple[int, Message | None]]:
        if timeout_s < HEARTBEAT_S:
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
        try:
            received = self.received.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            return []
        if isinstance(received, MinisglError):  # of another machine
            self.failure = received
            return []
        return [received]

    def heartbeats(self) -> Mapping[int, float]:
        return {rank: end.num_beats for rank, end in self.ends.items()}

    def broken(self) -> MinisglError | None:
        return self.failure

    def send_failure(self, reason: MinisglError) -> None:
        self.told.append(reason)


class TwoMachines:
    def __init__(self, says_ready: bool) -> None:
        self.says_ready = says_ready
        self.started: dict[int, RankSpec] = {}
        self.exit_codes: dict[int, int | None] = {}

    def start(self, specs: Sequence[RankSpec], ends: Sequence[RankEnd]) -> None:
        for spec, end in zip(specs, ends, strict=True):
            self.started[spec.rank] = spec
            self.exit_codes[spec.rank] = None
            end.beat()
            if self.says_ready:
                end.report(Ready())

    def states(self) -> Mapping[int, ProcessState]:
        return {rank: ProcessState(100 + rank, code) for rank, code in self.exit_codes.items()}

    def wakers(self) -> Sequence[Waitable]:
        return []

    def join(self, timeout_s: float) -> None:
        self.exit_codes = dict.fromkeys(self.exit_codes, 0)

    def kill(self, timeout_s: float) -> None:
        self.exit_codes = {
            rank: -9 if code is None else code for rank, code in self.exit_codes.items()
        }


@contextmanager
def remote_ranks(
    says_ready: bool = True,
) -> Iterator[tuple[RemoteRanks, TwoMachines, QueueChannel]]:
    config: Any = SimpleNamespace(num_ranks=NUM_RANKS, device="cpu", step_timeout=100.0)
    model: Any = None
    launcher, channel = TwoMachines(says_ready), QueueChannel()
    folder = Path("nowhere")
    own = RankSpec(0, Setup(config, model, folder), FileRendezvous(0))
    others = range(1, NUM_RANKS)
    ranks = RemoteRanks(own, launcher, channel, others, may_hang=False)
    try:
        if says_ready:
            ranks.wait_ready(lambda fraction: None)
        yield ranks, launcher, channel
    finally:
        ranks.end()


def reason_of(ranks: RemoteRanks) -> BaseException | None:
    return ranks.lost.exception()


def test_each_rank_has_its_number_and_receives_every_plan() -> None:
    with remote_ranks() as (ranks, launcher, channel):
        assert [*launcher.started] == [1, 2, 3]
        assert pids_of(ranks) == {1: 101, 2: 102, 3: 103}
        ranks.send(b"first")
        ranks.send(b"second")
        ranks.begin_to_end()
        for end in channel.ends.values():
            assert [end.receive() for _ in range(3)] == [b"first", b"second", None]
        with pytest.raises(EngineStoppedError, match="told to end"):
            ranks.send(b"third")
    assert set(launcher.exit_codes.values()) == {0}
    assert not ranks.lost.done()


def test_a_rank_that_fails_exits_or_disconnects_stops_all_ranks() -> None:
    with remote_ranks() as (ranks, launcher, channel):
        channel.ends[2].report(Failed("CheckpointError", "no weights"))
        reason = reason_of(ranks)
        assert isinstance(reason, CheckpointError) and str(reason) == "Rank 2 failed: no weights"
        wait_until(lambda: channel.told == [reason])  # the other machines hear of it
        assert set(launcher.exit_codes.values()) == {-9}
    with remote_ranks() as (ranks, launcher, channel):
        launcher.exit_codes[3] = -15
        assert str(reason_of(ranks)) == "Rank 3 (process 103) was killed by SIGTERM."
    with remote_ranks() as (ranks, _, channel):
        channel.received.put((1, None))
        assert str(reason_of(ranks)) == "Rank 1 (process 101) is ending."
    with remote_ranks() as (ranks, _, channel):
        channel.failure = EngineStoppedError("Node 1 has closed the connection.")
        channel.ends[3].report(Failed("RuntimeError", "no answer"))  # which follows from it
        assert reason_of(ranks) is channel.failure
    with remote_ranks() as (ranks, launcher, channel):
        launcher.exit_codes[3] = -9
        channel.failure = EngineStoppedError("Node 1: Rank 4 failed.")  # which follows from that
        assert str(reason_of(ranks)) == "Rank 3 (process 103) was killed by SIGKILL."
    with remote_ranks() as (ranks, _, channel):
        channel.unreachable = True
        with pytest.raises(EngineStoppedError, match=r"Rank 0 failed: A rank cannot be reached\."):
            ranks.send(b"plan")


def test_ranks_that_are_told_to_end_while_they_load_are_awaited_no_longer() -> None:
    with remote_ranks(says_ready=False) as (ranks, *_), ThreadPoolExecutor(1) as thread:
        began = threading.Event()
        waiting = thread.submit(ranks.wait_ready, lambda fraction: began.set())
        assert began.wait(10)
        ranks.begin_to_end()
        with pytest.raises(EngineStoppedError, match="told to end"):
            waiting.result(60)


def test_ranks_say_where_they_listen_or_why_they_cannot() -> None:
    with remote_ranks() as (ranks, _, channel), ThreadPoolExecutor(1) as thread:
        for lacks in (2, None):  # what others could map
            listening = thread.submit(ranks.listen, "host:0", b"secret")
            for rank in (3, 1, 2):  # in any order
                data = channel.ends[rank].receive()
                assert data is not None and data.startswith(CALL)
                called = unpacked(data, tuple[str, tuple[str, bytes]])
                assert called == ("listen", ("host:0", b"secret"))
                told = msgspec.msgpack.encode(Listening((f"host:{rank}",), rank != lacks))
                channel.ends[rank].report(Answered(rank, told))
            found = Listening(("host:1", "host:2", "host:3"), is_direct=lacks is None)
            assert listening.result() == found
        listening = thread.submit(ranks.listen, "host:0", b"")
        for rank, end in channel.ends.items():
            assert end.receive()
            told = msgspec.msgpack.encode(Listening(()))
            end.report(Answered(rank, told, "Address already in use" if rank == 2 else ""))
        with pytest.raises(OSError, match="Address already in use"):
            listening.result()
    with remote_ranks() as (ranks, launcher, _), ThreadPoolExecutor(1) as thread:
        listening = thread.submit(ranks.listen, "host:0", b"")
        launcher.exit_codes[3] = -9
        with pytest.raises(EngineStoppedError, match=r"Rank 3 .* was killed by SIGKILL"):
            listening.result()
    with remote_ranks() as (ranks, _, channel), ThreadPoolExecutor(1) as thread:
        listening = thread.submit(ranks.listen, "host:0", b"")
        assert all(end.receive() for end in channel.ends.values())
        ranks.begin_to_end()
        with pytest.raises(EngineStoppedError, match="told to end"):
            listening.result()


@pytest.mark.parametrize("end_of_neighbour", [1, -signal.SIGABRT, None])
def test_of_ranks_that_end_together_the_killed_one_is_named(end_of_neighbour: int | None) -> None:
    with remote_ranks() as (ranks, launcher, channel):
        channel.meanwhile = lambda: launcher.exit_codes.update({3: -signal.SIGKILL})
        launcher.exit_codes[1] = end_of_neighbour
        channel.received.put((1, None))
        assert str(reason_of(ranks)) == "Rank 3 (process 103) was killed by SIGKILL."


def test_a_rank_that_loses_its_neighbour_is_not_named_before_the_neighbour() -> None:
    with remote_ranks() as (ranks, _, channel):
        killed = EngineStoppedError("Node 1: Rank 2 (process 7) was killed by SIGKILL.")
        channel.meanwhile = lambda: channel.received.put(killed)
        channel.ends[1].report(Failed("RuntimeError", "Connection closed by peer"))
        assert reason_of(ranks) is killed
    with remote_ranks() as (ranks, _, channel):
        channel.meanwhile = lambda: channel.received.put((2, None))
        channel.ends[1].report(Failed("RuntimeError", "Connection closed by peer"))
        assert str(reason_of(ranks)) == "Rank 2 (process 102) is ending."
