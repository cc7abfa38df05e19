"""The view that rank 0, or the process of another node, has of ranks in other processes: one thread
starts, watches and ends them."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace

from minisgl.distributed.addresses import Listening
from minisgl.errors import EngineStoppedError, MinisglError
from minisgl.ranks.processes.channel import (
    HEARTBEAT_S,
    Answered,
    Channel,
    Encoded,
    Landed,
    RankMoved,
    Waitable,
)
from minisgl.ranks.processes.launcher import Launcher
from minisgl.ranks.processes.mask_ring import StepMasks
from minisgl.ranks.processes.plan_codec import CALL, packed
from minisgl.ranks.processes.rank_watch import RankWatch, error_of
from minisgl.ranks.processes.worker import RankSpec

# After noticing a failure a thread waits this long until its cause is found.
VERDICT_S = 1.0
# Ranks that have not ended this long after the close message are killed.
CLOSE_LIMIT_S = 10.0
# After a failure on a GPU this process exits, with this delay so that errors can be reported.
EXIT_AFTER_S = 5.0
TOLD_TO_END = "The ranks have been told to end."


class RemoteRanks:
    """Combines a Launcher, a Channel and a RankWatch. Thread-safe.

    The ranks are killed when the watching thread ends, at the latest with this process.
    """

    def __init__(
        self,
        own: RankSpec,
        launcher: Launcher,
        channel: Channel,
        ranks: Iterable[int],
        elsewhere: Iterable[int] = (),
        *,
        may_hang: bool,
    ) -> None:
        """Return at once. own: the spec of one of the ranks; they differ only in their number.
        ranks: those to start. elsewhere: those that other nodes start, which are only watched.
        may_hang: steps of this process may never end without the ranks; it then has to exit."""
        self.lost: Future[None] = Future()  # fails with the reason once the ranks cannot go on
        # Called when a rank has ended a move, with its id and the number of pages.
        self.moved: Callable[[int, int], None] = lambda move, num_pages: None
        self.answered: Callable[[Answered], None] = lambda answer: None  # called likewise
        # Called when a load has landed on a rank that has requests of its own, with its id.
        self.landed: Callable[[int], None] = lambda load: None
        # Called when a rank has ended the encoding of an image: its number, and why it failed.
        self.encoded: Callable[[int, str], None] = lambda number, why: None
        self.may_hang = may_hang
        self._specs = [replace(own, rank=rank) for rank in ranks]
        self._launcher = launcher
        self.channel = channel
        others = [*(spec.rank for spec in self._specs), *elsewhere]
        self._watch = RankWatch(others, own.setup.config.step_timeout)
        self._answers: dict[int, Answered] = {}
        self._changed = threading.Condition()  # for _watch.ready, _answers, _ending and lost
        self._calling = threading.Lock()
        self._ending = False
        self._killing: threading.Timer | None = None
        self._gone = threading.Event()
        self._sending = threading.Lock()
        # multiprocessing's exit handler would send SIGTERM, which ranks ignore, and wait for them.
        atexit.register(self.kill)
        threading.Thread(target=self._run, name="minisgl-ranks", daemon=True).start()

    @property
    def silence(self) -> Mapping[int, float]:
        """Seconds since the last heartbeat of each rank; one per second is expected."""
        return self._watch.silence

    def wait_ready(self, report: Callable[[float], None]) -> None:
        """Block until all ranks have loaded; raises the reason if one cannot. report: called with
        the fraction of ranks that have loaded, 0 to 1."""
        self._wait_for_all(self._watch.ready, report)

    def send(self, plan: bytes, masks: StepMasks | None = None) -> None:
        """Send an encoded plan to every rank, and its masks. Raises EngineStoppedError."""
        self._watch.num_launched += 1
        self.pass_on(plan, masks)

    def listen(self, address: str, token: bytes) -> Listening:
        """Let every rank take part in moves between engines; see Tiers. Blocks. Raises OSError, or
        the reason why the ranks are lost."""
        found = self.call("listen", address, token)
        return Listening.of([each.value(Listening, OSError) for each in found])

    def call(self, name: str, *arguments: object) -> list[Answered]:
        """Call one of CALLS on every rank, beside the plans; returns the answers, in the order of
        the ranks. Blocks while another call does. Raises the reason why the ranks are lost."""
        with self._calling:
            self._answers.clear()
            self.pass_on(packed(CALL, (name, arguments)))
            self._wait_for_all(self._answers, lambda fraction: None)
            return [self._answers[rank] for rank in sorted(self._answers)]

    def _wait_for_all(self, heard: Sized, report: Callable[[float], None]) -> None:
        """Block until as many as all ranks are in `heard`. Raises why that cannot be."""
        num_ranks = len(self._watch.silence)
        with self._changed:
            while len(heard) < num_ranks and not self._ending:
                report(len(heard) / num_ranks)
                self._changed.wait()
        if self.lost.done():
            self.lost.result()
        if len(heard) < num_ranks:
            raise EngineStoppedError(TOLD_TO_END)

    def pass_on(self, data: bytes, masks: StepMasks | None = None) -> None:
        """Send every rank a message that is no plan, as `send` does."""
        with self._sending:
            if self._ending and not self.lost.done():
                raise EngineStoppedError(TOLD_TO_END)
            try:
                self.channel.send(data, masks)
            except OSError as error:
                raise self.lose(EngineStoppedError("A rank cannot be reached.")) from error

    def collected(self) -> None:
        """Count a step that rank 0 has finished."""
        self._watch.num_collected += 1

    def lose(self, error: Exception) -> Exception:
        """Give up because of an error of rank 0. Returns the cause: the error itself, or the death
        of another rank that led to it."""
        wait_for_futures((self.lost,), VERDICT_S)
        self.fail(error_of(type(error).__name__)(f"Rank 0 failed: {error}"))
        reason = self.lost.exception()
        assert isinstance(reason, Exception)
        return reason

    def begin_to_end(self) -> None:
        """Announce the end to the ranks; `send` fails from now on.

        Unless `end` is called within CLOSE_LIMIT_S, the ranks are killed: on a GPU, leaving the
        group blocks rank 0 until they take part.
        """
        late = EngineStoppedError(f"The ranks have not ended within {CLOSE_LIMIT_S:g} s.")
        self._killing = threading.Timer(CLOSE_LIMIT_S, self.fail, (late,))
        self._killing.daemon = True
        self._killing.start()
        with self._sending:
            self._end_soon()
            self.channel.send_close()

    def end(self) -> None:
        """Wait until all ranks have exited, and kill those still running after CLOSE_LIMIT_S."""
        if self._killing is not None:
            self._killing.cancel()
        self._launcher.join(CLOSE_LIMIT_S)
        self.kill()
        atexit.unregister(self.kill)

    def kill(self, reason: BaseException | None = None) -> None:
        """Kill the ranks and wait for their end. reason: why, for other nodes."""
        self._end_soon()
        if isinstance(reason, MinisglError):
            self.channel.send_failure(reason)
        self._launcher.kill(CLOSE_LIMIT_S)
        self._gone.set()

    def _end_soon(self) -> None:
        """Hear the ranks no longer."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def give_up(self, reason: MinisglError) -> None:
        """Do as `fail` does, and return at once. Any thread may call it."""
        threading.Thread(target=self.fail, args=(reason,), name="minisgl-kill", daemon=True).start()

    def fail(self, reason: Exception) -> None:
        """Kill the ranks and fail `lost` with `reason`. Blocks until they are dead."""
        with self._changed:
            if self.lost.done():
                return
            self.lost.set_exception(reason)
            self._changed.notify_all()
        self.kill(reason)
        if self.may_hang:
            # A step of this process may wait for a dead rank for ever, and an orderly exit would
            # wait for the step. So exit, after callers have had time to report the error.
            leaving = threading.Timer(EXIT_AFTER_S, _exit)
            leaving.daemon = True
            leaving.start()
            atexit.register(_exit)

    def _run(self) -> None:
        try:
            ends = [self.channel.end_of(spec.rank) for spec in self._specs]
            self._launcher.start(self._specs, ends)
            self.channel.launched()
            self._watch.begin(time.monotonic())
            wakers = self._launcher.wakers()
            while not self._ending:
                self._receive(HEARTBEAT_S, wakers)
                if self._verdict() is not None and not self._ending:
                    self._await_cause()
                    self.fail(self._verdict() or EngineStoppedError("A rank has failed."))
            self._gone.wait()  # ending this thread would kill ranks that are about to exit
        except Exception as error:
            self.fail(EngineStoppedError(f"The ranks cannot be started or watched: {error}"))

    def _receive(self, timeout_s: float, wakers: Sequence[Waitable] = ()) -> None:
        """Take what the ranks send, for which it waits up to `timeout_s`."""
        for rank, message in self.channel.receive(timeout_s, wakers):
            if isinstance(message, RankMoved):
                self.moved(message.move, message.num_pages)
                continue
            if isinstance(message, Landed):
                self.landed(message.load)
                continue
            if isinstance(message, Encoded):
                self.encoded(message.number, message.why)
                continue
            with self._changed:
                if isinstance(message, Answered):
                    self._answers[rank] = message
                    self.answered(message)
                else:
                    self._watch.heard(rank, message)
                self._changed.notify_all()
        self._watch.look(time.monotonic(), self.channel.heartbeats())

    def _await_cause(self) -> None:
        """Listen for a moment: ranks may report a lost connection before the end of the one that
        led to it is seen, here or, which takes longer, by another node."""
        began = time.monotonic()
        while True:
            knows = self._watch.knows_cause(self._launcher.states(), self.channel.broken())
            if time.monotonic() - began > VERDICT_S / (4 if knows else 2):
                return
            self._receive(VERDICT_S / 20)

    def _verdict(self) -> Exception | None:
        return self._watch.verdict(self._launcher.states(), self.channel.broken())


def _exit() -> None:
    os._exit(1)
