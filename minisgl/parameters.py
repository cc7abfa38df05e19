"""Declares the numbers among the sampling parameters, each as one field of a dataclass.

`SamplingParams` (request.py) declares them. From a declaration follow the check of the value, the
field of HTTP requests (server/requests/request_types.py), the default that a checkpoint may set
(models/generation.py), the column of the slot tables (kernels/sampling/tables.py) and what the
sampler computes for a batch (runner/sampling_features.py).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from reprlib import repr as short_repr
from typing import Any, TypeVar

from minisgl.errors import InvalidRequestError, did_you_mean

T = TypeVar("T")


class Role(enum.Enum):
    """What a parameter does that has another value than its default."""

    FILTER = "filter"  # keeps the first tokens of a row's order, unless the row is greedy
    RARE_FILTER = "rare filter"  # a filter that among captured steps only full ones compute
    PENALTY = "penalty"  # changes logits; among captured steps only full ones compute it


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number among the sampling parameters."""

    name: str
    kind: type[int] | type[float]  # a float may be an integer, too
    default: float | None
    low: float
    high: float
    column: int | None  # among the slot table's columns of this kind, which kernels read by number
    role: Role | None

    @property
    def is_filter(self) -> bool:
        return self.role in (Role.FILTER, Role.RARE_FILTER)

    def check(self, value: object) -> None:
        """Raise InvalidRequestError if `value` is neither in range nor a default of None."""
        if value is not None or self.default is not None:
            check_number(self.name, value, self.kind, self.low, self.high)

    def stored(self, value: float) -> float:
        """The value in the slot table: a negative one turns a filter off, as 0 does."""
        return max(value, 0) if self.is_filter else value


def number(
    default: float | None,
    low: float,
    high: float,
    *,
    kind: type[int] | type[float] = float,
    column: int | None = None,
    role: Role | None = None,
) -> Any:
    """Declare a field with a number from `low` to `high`; the others as in Parameter."""
    facts = {"default": default, "kind": kind, "low": low, "high": high}
    return field(default=default, metadata={**facts, "column": column, "role": role})


def parameters_of(declaring: Any) -> Mapping[str, Parameter]:
    """The parameters that a dataclass declares, by name and in its order."""
    declared = (spec for spec in fields(declaring) if spec.metadata)
    return {spec.name: Parameter(name=spec.name, **spec.metadata) for spec in declared}


def check_names(
    named: Mapping[str, Any], names: Collection[str], reason: str, others: Collection[str] = ()
) -> None:
    """Raise InvalidRequestError for the first key that is none of `names`; others: to suggest."""
    for name in named:
        if name not in names:
            raise InvalidRequestError(name, reason + did_you_mean(name, {*names, *others}))


def checks_names(
    reason: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """Let a dataclass raise InvalidRequestError for keywords that are none of its fields, and for
    values without a keyword.

    elsewhere: what else to say of keywords that belong to another place.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = [spec.name for spec in fields(cls)]  # type: ignore[arg-type]
        init = cls.__init__

        @functools.wraps(init)
        def checked(self: T, *args: Any, **named: Any) -> None:
            if args:
                example = f"{names[0]}={args[0]!r}"
                raise InvalidRequestError(cls.__name__, f"takes its fields by name: {example}.")
            for name, place in (elsewhere or {}).items():
                if name in named:
                    raise InvalidRequestError(name, f"{reason}; {place}.")
            check_names(named, names, reason)
            init(self, **named)

        cls.__init__ = checked  # type: ignore[assignment, method-assign]
        return cls

    return decorate


def check_number(
    name: str,
    value: object,
    kind: type[int] | type[float],
    low: float,
    high: float,
    what: str = "",
) -> None:
    """Raise InvalidRequestError if `value` is out of range. what: the part of the field `name` that
    has the value."""
    said, form = ("an integer", "") if kind is int else ("a number", "g")
    if isinstance(value, bool) or not isinstance(value, int | kind):
        reason = f"must be {said}"
    elif not low <= value <= high:  # NaN fails too
        reason = f"must be from {low:{form}} to {high:{form}}"
    else:
        return
    raise InvalidRequestError(name, f"{what}{reason}, not {short_repr(value)}.", logged=reason)
