"""How far minisgl is from transformers in float32, and how far it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.verify.answers import Stretch
from minisgl.verify.reference import Scores

# How much further from float32 than transformers in the same dtype minisgl may be, in a Distance:
# both round, in other places. The largest differences vary more than means do.
_FACTORS = (2.5, 2.0, 1.6)
# What is always allowed, in units of the dtype's rounding, but at least what float32 may change.
_UNITS = (8.0, 4.0, 1.0)
_LEAST = (1e-3, 5e-4, 1e-4)


class Distance(NamedTuple):
    """Absolute differences of logprobs, or the most that is allowed."""

    largest: float
    row: float  # the largest mean of a row
    mean: float

    @staticmethod
    def of(gaps: Sequence[Tensor]) -> Distance:
        """gaps: [rows, tokens] each. NaN counts as infinite."""
        known = torch.cat([*gaps]).nan_to_num(nan=torch.inf)
        return Distance(float(known.max()), float(known.mean(-1).max()), float(known.mean()))

    def is_within(self, bounds: Distance) -> bool:
        return all(one <= most for one, most in zip(self, bounds, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PathResult:
    """One path beside transformers."""

    path: str
    num_rows: int
    ours: Distance  # from float32
    theirs: Distance  # of transformers in the dtype of minisgl, from float32
    bounds: Distance  # what rounding may make of it
    num_same: int  # chosen tokens that float32 chooses, too
    num_near: int  # others, between which rounding decides
    num_other: int
    worst: str  # where the largest difference is

    @property
    def is_right(self) -> bool:
        return self.ours.is_within(self.bounds) and not self.num_other

    @property
    def fault(self) -> str:
        """What is wrong with it, where it is not right."""
        parts = [
            f"{name} {size:.2g}, at most {most:.2g}"
            for name, size, most in zip(
                ("largest", "row", "mean"), self.ours, self.bounds, strict=True
            )
            if not size <= most
        ]
        if self.num_other:
            parts.append(f"{self.num_other} tokens that float32 finds much less likely than others")
        return f"{self.path}: {'; '.join(parts)} (worst: {self.worst})"


def compare(
    stretches: Sequence[Stretch],
    exact: Sequence[Scores],
    rounded: Sequence[Scores],
    dtype: torch.dtype,
) -> list[PathResult]:
    """The results of all paths. exact, rounded: of transformers in float32, and in `dtype`."""
    gaps = [(a.logprobs - b.logprobs).abs() for a, b in zip(rounded, exact, strict=True)]
    eps = torch.finfo(dtype).eps
    least = [max(low, units * eps) for low, units in zip(_LEAST, _UNITS, strict=True)]
    whole = Distance.of(gaps)
    results = []
    for path in dict.fromkeys(stretch.path for stretch in stretches):
        places = [index for index, stretch in enumerate(stretches) if stretch.path == path]
        theirs = Distance.of([gaps[index] for index in places])
        # The largest of few rows would say little.
        scale = zip(_FACTORS, (whole.largest, whole.row, theirs.mean), least, strict=True)
        bounds = Distance(*(max(low, factor * size) for factor, size, low in scale))
        pairs = [(stretches[index], exact[index]) for index in places]
        results.append(_of_path(path, pairs, theirs, bounds))
    return results


def _of_path(
    path: str, pairs: Sequence[tuple[Stretch, Scores]], theirs: Distance, bounds: Distance
) -> PathResult:
    gaps = [(torch.tensor(ours.logprobs) - wanted.logprobs).abs() for ours, wanted in pairs]
    rows = [
        (float(gap.mean()), stretch.prompt, stretch.first + row)
        for (stretch, _), each in zip(pairs, gaps, strict=True)
        for row, gap in enumerate(each.nan_to_num(nan=torch.inf))
    ]
    _, prompt, position = max(rows)
    num_same = num_near = num_other = 0
    for stretch, wanted in pairs:
        chosen = slice(len(stretch.ids) - stretch.num_chosen, None)
        is_same = torch.tensor(stretch.ids)[chosen, 0] == wanted.best_ids[chosen]
        margins = (wanted.best - wanted.logprobs[:, 0])[chosen]
        # Both tokens may have moved, towards each other.
        is_near = ~is_same & (margins <= 2 * bounds.largest)
        num_same += int(is_same.sum())
        num_near += int(is_near.sum())
        num_other += int((~is_same & ~is_near).sum())
    return PathResult(
        path=path,
        num_rows=len(rows),
        ours=Distance.of(gaps),
        theirs=theirs,
        bounds=bounds,
        num_same=num_same,
        num_near=num_near,
        num_other=num_other,
        worst=f"prompt {prompt}, behind token {position}",
    )
