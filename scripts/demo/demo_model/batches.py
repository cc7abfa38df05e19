"""Cuts conversations into batches of one fixed number of tokens, one conversation a row.

The training script's worker processes run this; it needs numpy and nothing heavier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from demo_model.data import make_shard

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BATCH_UNIT = 6144  # the least number that all of them divide; a batch is a multiple of it
NOT_LEARNED = -100  # what torch's cross entropy ignores


@dataclass(frozen=True)
class Rows:
    """The sequences that go into one batch, and the length that all are padded to."""

    length: int
    members: Sequence[int]


@dataclass(frozen=True)
class Shard:
    """A shard's batches in the order of training. Row i is one batch, laid out flat."""

    # [num_batches, batch_tokens] int16
    ids: npt.NDArray[np.int16]
    # [num_batches, batch_tokens] int16: the id that follows, or NOT_LEARNED
    targets: npt.NDArray[np.int16]
    # [num_batches]: how long each row inside the batch is
    lengths: list[int]
    # [num_batches]: how many targets the batch has
    num_learned: list[int]
    # without the padding
    num_tokens: int


def plan_rows(lengths: Sequence[int], batch_tokens: int) -> list[Rows]:
    """Longest first, so that rows in a batch are about as long as each other."""
    order = sorted(range(len(lengths)), key=lambda member: -lengths[member])
    plan: list[Rows] = []
    start = 0
    while start < len(order):
        length = next(length for length in LENGTHS if length >= lengths[order[start]])
        end = start + batch_tokens // length
        plan.append(Rows(length, order[start:end]))
        start = end
    return plan


def make_batches(
    folder: Path, seed: int, index: int, shard_tokens: int, batch_tokens: int
) -> Shard:
    """Shard number `index`, always the same for the same arguments."""
    conversations = make_shard(folder, seed, index, shard_tokens)
    plan = plan_rows([len(ids) for ids, _ in conversations], batch_tokens)
    np.random.default_rng((seed, index)).shuffle(plan)  # or each shard would start with the longest

    all_ids = np.zeros((len(plan), batch_tokens), np.int16)
    all_targets = np.full((len(plan), batch_tokens), NOT_LEARNED, np.int16)
    for batch, rows in enumerate(plan):
        for row, member in enumerate(rows.members):
            ids, learned = conversations[member]
            start = row * rows.length
            end = start + len(ids)
            all_ids[batch, start:end] = ids
            all_targets[batch, start : end - 1] = np.where(
                learned[1:], ids[1:].astype(np.int16), NOT_LEARNED
            )
    return Shard(
        ids=all_ids,
        targets=all_targets,
        lengths=[rows.length for rows in plan],
        num_learned=(all_targets != NOT_LEARNED).sum(axis=1).tolist(),
        num_tokens=sum(len(ids) for ids, _ in conversations),
    )
