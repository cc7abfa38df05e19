"""Attention that ranks divide by requests, in a model of transformers: see layers/by_request.py.

The modules around attention see the rows of all ranks. A module that attends is called with those
of its rank, whose positions alone the model is told, and its outputs are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from minisgl.distributed.communicator import Communicator
from minisgl.layers.by_request import of_all, own_rows
from minisgl.models.adopted.attend import Seat
from minisgl.models.adopted.rows import computed, rows_of


class OwnRows:
    """The forward of a module that attends, for the rows of all ranks."""

    def __init__(self, forward: Callable[..., Any], seat: Seat, ranks: Communicator) -> None:
        """forward: for the rows of this rank."""
        self._forward, self._seat, self._ranks = forward, seat, ranks

    def __call__(self, *args: Any, **given: Any) -> tuple[Tensor, None]:
        """Returns the output, and no weights of attention."""
        hidden, others = (args[0], args[1:]) if args else (given.pop("hidden_states"), ())
        seat, step = self._seat, self._seat.step
        assert step is not None
        own = own_rows(computed(rows_of(hidden)), step, self._ranks)
        if len(own):
            seat.rows = step.batch.own
            output, *_ = self._forward(own.unsqueeze(0), *others, **given)
            own = computed(rows_of(output))
            seat.rows = step.batch.rows
        return of_all(own, step.batch.shares, self._ranks).unsqueeze(0), None
