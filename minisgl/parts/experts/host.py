"""The scheduler's half: which rows of steps are tokens of requests that ask for their experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minisgl.errors import InvalidRequestError
from minisgl.request import Extra, Request, SamplingParams
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(slots=True, eq=False)
class RoutedExperts(Extra):
    """The experts of each token that is computed: the whole prompt, since the cache has none, and
    each token of the output that another one follows."""

    shape: tuple[int, int]  # of a token: layers, and experts in each
    num_prompt_tokens: int
    found: bytearray = field(default_factory=bytearray)  # int16, token by token

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return 2 * self.shape[0] * self.shape[1]

    @property
    def computes_all_tokens(self) -> bool:
        return len(self.found) < self.num_prompt_tokens * self.width


def experts_of(request: Request) -> NDArray[np.int16] | None:
    """Of a request that has ended: [tokens but the last, layers, experts]; None where it did not
    ask."""
    asked = request.extra(RoutedExperts)
    if asked is None:
        return None
    found = bytes(asked.found[: (len(request.token_ids) - 1) * asked.width])
    return np.frombuffer(found, dtype=np.int16).reshape(-1, *asked.shape)


@dataclass(frozen=True, slots=True)
class ExpertPlan(PartPlan):
    rows: tuple[int, ...] = ()  # of the step, whose experts are wanted
    is_eager: bool = False  # some are of chunks, which stand elsewhere in captured steps


class Experts(Part):
    """Without drafts and stages, a step has one row for each slot that decodes, then chunks."""

    kind = RoutedExperts

    def __init__(self, shape: tuple[int, int] | None) -> None:
        """shape: of RoutedExperts; None where the layers do not note experts."""
        self._shape = shape

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> RoutedExperts | None:
        if not params.return_routed_experts:
            return None
        if self._shape is None:
            reason = "needs an engine that was started with --return-routed-experts."
            raise InvalidRequestError("return_routed_experts", reason)
        return RoutedExperts(self._shape, len(prompt))

    def plan(self, work: StepWork) -> ExpertPlan | None:
        asked = [*_asked_rows(work)]
        rows = tuple(row for _, _, rows in asked for row in rows)
        is_eager = any(start is not None for _, start, _ in asked)
        return ExpertPlan(rows, is_eager) if rows else None

    def settle(self, work: StepWork, outcome: object) -> None:
        assert isinstance(outcome, bytes)
        taken = 0
        for request, start, rows in _asked_rows(work):
            asked = request.extra(RoutedExperts)
            assert asked is not None
            data = outcome[taken : taken + len(rows) * asked.width]
            taken += len(data)
            # What a retracted request had in flight counts: it may end with that.
            first = len(asked.found) if start is None else start * asked.width
            if not request.finished:
                asked.found[first : first + len(data)] = data


def _asked_rows(work: StepWork) -> Iterator[tuple[Request, int | None, range]]:
    """Each request that asks, with the rows of its tokens. Before these: the position of the first
    token of a chunk; None of a decode row, whose token follows those that are known."""
    for row, running in enumerate(work.decoding):
        if running.request.params.return_routed_experts:
            yield running.request, None, range(row, row + 1)
    end = len(work.decoding)
    for chunk, running in work.owned_chunks:
        first, end = end, end + len(chunk.token_ids)
        if running.request.params.return_routed_experts:
            yield running.request, chunk.start, range(first, end)
