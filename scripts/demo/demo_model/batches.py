"""Packs conversations into batches of a fixed number of tokens, one conversation per row.

Runs in the worker processes of the training script, so it imports nothing heavier than numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from demo_model.data import make_shard

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BATCH_UNIT = 6144  # least common multiple of the row lengths; divides the size of a batch
NOT_LEARNED = -100  # ignore_index of torch's cross entropy


@dataclass(frozen=True)
class Rows:
    """The sequences of one batch, and the length to which they are padded."""

    length: int
    members: Sequence[int]


@dataclass(frozen=True)
class DataShard:
    """The batches of a data shard in training order. Row i of the arrays is one flattened batch."""

    # [num_batches, batch_tokens] int16
    ids: npt.NDArray[np.int16]
    # [num_batches, batch_tokens] int16: the id that follows, or NOT_LEARNED
    targets: npt.NDArray[np.int16]
    # [num_batches]: length of the sequences in each batch
    lengths: list[int]
    # [num_batches]: number of targets in each batch
    num_learned: list[int]
    # excluding padding
    num_tokens: int


def plan_rows(lengths: Sequence[int], batch_tokens: int) -> list[Rows]:
    """Plan batches, longest first, so that the sequences of a batch have similar lengths."""
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
) -> DataShard:
    """Make shard number `index`, deterministically."""
    conversations = make_shard(folder, seed, index, shard_tokens)
    plan = plan_rows([len(ids) for ids, _ in conversations], batch_tokens)
    np.random.default_rng((seed, index)).shuffle(plan)  # otherwise the longest come first

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
    return DataShard(
        ids=all_ids,
        targets=all_targets,
        lengths=[rows.length for rows in plan],
        num_learned=(all_targets != NOT_LEARNED).sum(axis=1).tolist(),
        num_tokens=sum(len(ids) for ids, _ in conversations),
    )
