"""Whether an engine keeps quantised weights a second time, dense."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch
from support.resolving import GPU, MODEL, resolved

from minisgl.distributed.communicator import SingleRank
from minisgl.distributed.pipeline import OneStage
from minisgl.errors import DeviceMemoryError
from minisgl.models.decoder import Decoder
from minisgl.runner.dense_copies import prepare_model
from minisgl.runner.memory import GIB

LAYERS = MODEL.kv_specs("bfloat16")


class Model:
    """Of which only the copies are seen."""

    def __init__(self, dense_copy_bytes: int = 24 * GIB, fits: bool = True) -> None:
        self.dense_copy_bytes = dense_copy_bytes
        self.fits = fits
        self.kept: bool | None = None

    def prepare(self, *, dense_copies: bool) -> None:
        if dense_copies and not self.fits:
            raise torch.OutOfMemoryError
        self.kept = dense_copies


class BesideAnother(SingleRank):
    """The other rank has less memory."""

    def host_min(self, number: int) -> int:
        return min(number, 0)


def prepare(
    model: Model, room: int | None = None, *, ranks: SingleRank | None = None, **options: Any
) -> int:
    """room: what 10 GiB of weights leave on a GPU of 140, if not given."""
    config = resolved(machine=GPU, **options)
    if room is None:
        room = int(140 * GIB * config.memory_ratio) - 10 * GIB
    return prepare_model(
        config, cast(Decoder, model), LAYERS, OneStage(ranks or SingleRank()), room
    )


# Gigabytes of copies, of the weights as they are stored, and of memory.
@pytest.mark.parametrize(
    ("copies", "weights", "memory", "kept"),
    [
        (26.4, 10.0, 140, True),  # Qwen3-14B on an H200
        (26.4, 10.0, 80, False),
        (62.4, 20.0, 140, False),  # Qwen3-32B
        (31.2, 10.0, 140, True),  # the same on one of two ranks
        (13.9, 6.0, 24, False),  # Qwen3-8B
        (13.0, 118.0, 140, False),  # attention beside many experts
        (0.0, 26.4, 140, True),  # no veto by a rank without such weights
    ],
)
def test_copies_are_kept_where_they_take_a_third_of_what_is_left_at_most(
    copies: float, weights: float, memory: float, kept: bool
) -> None:
    room = int((0.9 * memory - weights) * 1e9)
    model = Model(int(copies * 1e9))
    prepare(model, room)
    assert model.kept is kept


@pytest.mark.parametrize("room", [-GIB, 0, 100 * GIB])
def test_always_and_never_hold_whatever_is_left(room: int) -> None:
    model = Model(GIB)
    assert prepare(model, room, dense_copies="always") == GIB and model.kept
    assert prepare(model, room, dense_copies="never") == 0 and not model.kept


@pytest.mark.parametrize(
    ("options", "kept", "said"),
    [
        ({}, True, "take another 24.00 GiB; --dense-copies never leaves that to the KV cache"),
        ({"memory_ratio": 0.5}, False, "no dense copies, which would take 24.00 GiB; --dense-copi"),
        ({"dense_copies": "always", "memory_ratio": 0.5}, True, "another 24.00 GiB"),
        ({"dense_copies": "never"}, False, ""),
        # Pages that the user wants are not given away.
        ({"num_pages": 60 * GIB // (2 * 512 * 16)}, False, "no dense copies"),
    ],
    ids=str,
)
def test_the_log_says_what_is_kept(
    options: dict[str, Any],
    kept: bool,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = Model()
    assert prepare(model, **options) == (24 * GIB if kept else 0)
    assert model.kept is kept
    assert said in caplog.text and bool(caplog.text) == bool(said)


def test_a_rank_without_room_decides_for_all() -> None:
    model = Model()
    assert prepare(model, ranks=BesideAnother()) == 0
    assert model.kept is False


def test_copies_that_do_not_fit_are_refused_with_the_option() -> None:
    with pytest.raises(DeviceMemoryError, match=r"take 24\.0 GiB, .* --dense-copies never does"):
        prepare(Model(fits=False), dense_copies="always")
