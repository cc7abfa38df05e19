"""Times work on a GPU by events, and kernels by replays of a CUDA graph, so that the host's time is
not in the figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

WARM_UP = 3


def graph_s(
    calls: Sequence[Callable[[], object]],
    *,
    rounds: int = 10,
    replays: int = 1,
    before: Callable[[], object] | None = None,
) -> float:
    """Seconds of a call, in replays of a graph of them all.

    The calls are of one kind: the first one runs before, to compile it, and to allocate what
    outlives the graph. `replays`: of the graph, one after the other in each round. The other
    arguments are those of `median_s`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A thread of a communicator may call CUDA during the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()

        def replay() -> None:
            for _ in range(replays):
                graph.replay()

        return median_s(replay, rounds=rounds, before=before) / (replays * len(calls))


def median_s(
    work: Callable[[], object], *, rounds: int, before: Callable[[], object] | None = None
) -> float:
    """Seconds on the device that `work` takes, whose host time stays in front of it: the median of
    so many rounds, after some that warm up. `before`: runs before each round, untimed."""
    times: list[float] = []
    for _ in range(WARM_UP + rounds):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[WARM_UP:])
