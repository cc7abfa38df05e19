"""What the cases of bench_kernels.py share: inputs, clocks on the device, and the printed rows.

Kernels are timed by events around replays of a CUDA graph, so that the host's time is not in the
figures: the median of some replays, after a few that warm up.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from minisgl.bench.peak import Peak

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from dummy_config import MODELS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
# Of weights or caches that are used in turn: much more than L2, so that each is as cold as in a
# model.
COLD_BYTES = 512 << 20
WARM_UP = 3  # rounds
BEST = 3  # tiles that are printed
HEADER = f"{'case':56} kernel             µs  limit µs  share   TB/s TFLOP/s"

Call = Callable[[], object]
Config = Mapping[str, Any]  # of a model
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs on the device, what may be computed with them, and what that takes at least."""

    # By the name of what computes. A function makes the calls that a graph captures one behind the
    # other; the first of them runs before, to compile the kernel. It may raise: not every backend
    # takes every case.
    calls: Mapping[str, Callable[[], Sequence[Call]]]
    num_bytes: float = 0.0  # read and written at least
    operations: float = 0.0  # a multiply-add counts as two
    in_fp8: bool = False  # the operations
    repeats: int = 1  # times that a call does the work
    captured: bool = True  # False: timed without a graph
    rounds: int = 10  # whose median counts
    expected: Tensor | None = None  # what each of the calls returns, but for rounding
    num_rows: int | None = None  # of a result that count, if padding is behind them
    tolerance: float = 0.01  # of the norm of the difference, by that of what is expected
    # The tiles in use of our kernel, and its calls with others.
    tiles: Callable[[], Any] | None = None
    tiled: Callable[[Any], Sequence[Call]] | None = None

    def limit_s(self, peak: Peak | None) -> float:
        if peak is None:
            return 0.0
        rate = (self.in_fp8 and peak.fp8_operations_per_s) or peak.operations_per_s
        return max(self.num_bytes / peak.bytes_per_s, self.operations / rate)

    def is_right(self, found: object) -> bool:
        if self.expected is None:
            return True
        assert isinstance(found, Tensor)
        found, expected = (x[: self.num_rows].float() for x in (found, self.expected))
        return bool((found - expected).norm() <= self.tolerance * expected.norm())


class Case(NamedTuple):
    """One line of a table. Its inputs exist only while it is timed."""

    name: str
    make: Callable[[], Problem]


def model_cases(
    models: Iterable[str],
    kernels: Mapping[str, Callable[[Config, int], Problem]],
    usual: Sequence[int],
    rows: Sequence[int] | None,
) -> Iterator[Case]:
    """Each kernel with the sizes of each model, and as many rows as are given or `usual`."""
    for model, (name, make) in itertools.product(models, kernels.items()):
        for m in rows or usual:
            yield Case(f"{model} {name}, {m} rows", partial(make, MODELS[model], m))


# -- inputs ----------------------------------------------------------------------------------------


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def copies(make: Callable[[], Item], num_bytes: float) -> list[Item]:
    """As many as take COLD_BYTES together, with `num_bytes` in each."""
    return [make() for _ in range(-int(-COLD_BYTES // num_bytes))]


def in_turn(call: Callable[[Item], object], items: Sequence[Item], least: int) -> list[Call]:
    """`least` calls or more, each with the next of the items."""
    count = max(len(items), least)
    return [partial(call, items[i % len(items)]) for i in range(count)]


# -- clocks ----------------------------------------------------------------------------------------


def graph_s(
    calls: Sequence[Call], *, rounds: int, replays: int = 1, before: Call | None = None
) -> float:
    """Seconds of a call, in replays of a graph of them all.

    `replays`: of the graph, one behind the other in each round. The other arguments are those of
    `median_s`. The first call has run before.
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


def median_s(work: Call, *, rounds: int, before: Call | None = None) -> float:
    """Seconds on the device that `work` takes, whose host time stays in front of it: the median of
    `rounds`, after some that warm up. `before`: runs before each round, untimed."""
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


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Times cases, and prints a row for each kernel of one."""

    peak: Peak | None  # None: there is no limit
    kernels: Sequence[str] | None = None  # only these
    tiles: Mapping[str, Sequence[int]] | None = None  # to try, by the name of a field
    clock: Callable[..., float] = graph_s
    write: Callable[[str], object] = print
    passed_over: tuple[type[Exception], ...] = (Exception,)  # in whose place the reason is printed

    def run(self, cases: Iterable[Case]) -> bool:
        """Whether all results were right. What fails has its reason in the place of its time."""
        self.write(HEADER)
        rights = [self._try_case(case) for case in cases]
        return all(rights)

    def _try_case(self, case: Case) -> bool:
        right = True
        try:
            problem = case.make()
        except self.passed_over as error:
            self._fail(case.name, "", error)
            return right
        for kernel, make_calls in problem.calls.items():
            if self.kernels is None or kernel in self.kernels:
                right &= self._try_kernel(case.name, kernel, problem, make_calls)
        if self.tiles is not None and problem.tiled is not None:
            self._try_tiles(problem, self.tiles)
        del problem
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        return right

    def _try_kernel(
        self, name: str, kernel: str, problem: Problem, make_calls: Callable[[], Sequence[Call]]
    ) -> bool:
        try:
            took_s, right = self._seconds(problem, make_calls())
        except self.passed_over as error:  # what a library or the compiler says of this case
            self._fail(name, kernel, error)
            return True
        self.write(self._row(name, kernel, problem, took_s) + ("" if right else "  WRONG"))
        return right

    def _fail(self, name: str, kernel: str, error: Exception) -> None:
        reason, *_ = str(error).splitlines() or [repr(error)]
        self.write(f"{name:56} {kernel:11} {reason[:200]}")

    def _seconds(self, problem: Problem, calls: Sequence[Call]) -> tuple[float, bool]:
        right = problem.is_right(calls[0]())
        if problem.captured:
            took_s = self.clock(calls, rounds=problem.rounds)
        else:
            took_s = median_s(calls[0], rounds=problem.rounds)
        return took_s / problem.repeats, right

    def _row(self, name: str, kernel: str, problem: Problem, took_s: float) -> str:
        limit_s = problem.limit_s(self.peak)
        share = f"{limit_s / took_s:6.0%}" if limit_s else f"{'-':>6}"
        rates = (problem.num_bytes / took_s / 1e12, problem.operations / took_s / 1e12)
        row = f"{name:56} {kernel:11} {took_s * 1e6:9.2f} {limit_s * 1e6:9.2f} {share}"
        return row + f" {rates[0]:6.2f} {rates[1]:7.0f}"

    def _try_tiles(self, problem: Problem, choice: Mapping[str, Sequence[int]]) -> None:
        """Print the best of all combinations, whose results must be that of the tiles in use."""
        assert problem.tiles is not None and problem.tiled is not None
        now, tiled = problem.tiles(), problem.tiled
        if problem.expected is None:
            expected = tiled(now)[0]()
            assert isinstance(expected, Tensor)
            problem = replace(problem, expected=expected)
        found: list[tuple[float, str]] = []
        for values in itertools.product(*choice.values()):
            tiles, chosen = now, dict(zip(choice, values, strict=True))
            for field, value in chosen.items():
                tiles = changed(tiles, field, value)
            spelled = " ".join(f"{field}={value}" for field, value in chosen.items())
            try:
                took_s, right = self._seconds(problem, tiled(tiles))
            except Exception as error:  # most likely for too much shared memory
                self._fail(f"  not {spelled}", "", error)
                continue
            found += [(took_s, spelled)] if right else []
            if not right:
                self.write(f"  wrong: {spelled}")
        self.write(f"  in use: {now}")
        for took_s, spelled in sorted(found)[:BEST]:
            self.write(f"  {took_s * 1e6:9.2f} µs  {spelled}")


def changed(tiles: Any, field: str, value: int) -> Any:
    """The tiles with another value of a field, such as block_n or inner.block_n."""
    first, _, rest = field.partition(".")
    names = [each.name for each in fields(tiles)]
    inner = getattr(tiles, first, None)
    if first not in names or is_dataclass(inner) != bool(rest):
        raise SystemExit(f"--tiles {field}: allowed of {type(tiles).__name__}: {', '.join(names)}")
    return replace(tiles, **{first: changed(inner, rest, value) if rest else value})
