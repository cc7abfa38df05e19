"""Weights that a trainer in a process of its own sends to an engine in a group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from support.ports import free_port
from support.replaced_weights import (
    GREEDY,
    PROMPTS,
    answers,
    answers_of,
    engine_of,
    folder_of,
    weights_of,
)
from support.started_trainers import start_trainer

from minisgl.distributed import weight_group
from minisgl.distributed.addresses import GroupAddress
from minisgl.distributed.weight_group import WeightGroup
from minisgl.engine.weights import WeightsIncompleteError
from minisgl.errors import CheckpointError, MinisglError
from minisgl.models.filling import InMemory
from minisgl.models.refilling import TensorInfo

PACKED_BYTES = 100_000  # of a bucket


def infos() -> list[TensorInfo]:
    """In the order in which the trainer sends them."""
    tensors = weights_of(1)
    return [TensorInfo.of(name, InMemory(tensors[name])) for name in sorted(tensors)]


def run(
    backend: str,
    options: Mapping[str, Any],
    check: Callable[[GroupAddress], Coroutine[Any, Any, None]],
) -> None:
    """options: of the engine."""
    num_ranks = options.get("tp", 1) * options.get("pp", 1)
    with free_port() as port:
        address = GroupAddress("127.0.0.1", port, 1, 1 + num_ranks, "weights", backend)
        asyncio.run(check(address))


def check_sent(backend: str, device: str, /, **options: Any) -> None:
    """An engine answers with what came as one that was loaded with it. device: the trainer's."""
    expected, told = answers_of(1, tuple(options.items())), infos()

    async def check(address: GroupAddress) -> None:
        async with engine_of(0, **options) as engine:
            with start_trainer(address, folder_of(1), device=device):
                await engine.weights.join_group(address)
                for number, part in enumerate((told[:9], told[9:])):
                    await engine.weights.update_from_group("weights", part, version=f"{number}")
            assert await answers(engine) == expected
            assert engine.weights.version == "1"
            for name in sorted(weights_of(1)):  # cut by outputs, by inputs, and not at all
                found = await engine.weights.read(name, 70)
                sent = weights_of(1)[name][:70].to(getattr(torch, options.get("dtype", "float32")))
                assert found == sent.float().tolist(), name
            await engine.weights.leave_group("weights")
            with pytest.raises(CheckpointError, match="There is no group weights"):
                await engine.weights.update_from_group("weights", told[:9])

    run(backend, options, check)


def check_killed(backend: str, device: str, /, **options: Any) -> None:
    """An engine whose trainer is killed before its second bucket says so until a whole update has
    come, also from the next trainer, and can be closed with a group whose trainer was killed."""
    expected, told = answers_of(1, tuple(options.items())), infos()

    async def check(address: GroupAddress) -> None:
        async with engine_of(0, **options) as engine:
            in_buckets = {"packed_bytes": PACKED_BYTES, "device": device}
            with start_trainer(address, folder_of(1), stop_after=1, **in_buckets):
                await engine.weights.join_group(address)
                with (
                    mock.patch.object(weight_group, "PACKED_BYTES", PACKED_BYTES),
                    pytest.raises(CheckpointError, match="The update ends: "),
                ):
                    await engine.weights.update_from_group("weights", told, packed=True)
            with pytest.raises(WeightsIncompleteError) as refused:
                engine.submit(PROMPTS[0], GREEDY)
            assert (refused.value.http_status, refused.value.code) == (503, "weights_incomplete")
            with pytest.raises(CheckpointError, match="There is no group weights"):
                await engine.weights.update_from_group("weights", told)
            with start_trainer(address, folder_of(1), device=device) as trainer:
                await engine.weights.join_group(address)
                await engine.weights.update_from_group("weights", told)
                trainer.kill()
            assert await answers(engine) == expected

    run(backend, options, check)


def check_closed(backend: str, device: str, /, **options: Any) -> None:
    """An engine of one rank that waits for a trainer can be closed."""
    waits, has_ended = threading.Event(), WeightGroup._trainer_has_ended

    def noted(group: WeightGroup) -> bool:
        waits.set()
        return has_ended(group)

    async def check(address: GroupAddress) -> None:
        with start_trainer(address, folder_of(1), device=device):
            async with engine_of(0, **options) as engine:
                await engine.weights.join_group(address)
                await engine.weights.update_from_group("weights", infos())
                with mock.patch.object(WeightGroup, "_trainer_has_ended", noted):
                    update = engine.weights.update_from_group("weights", infos())
                    waiting = asyncio.ensure_future(update)
                    await asyncio.to_thread(waits.wait)
            with pytest.raises(MinisglError):
                await waiting

    with mock.patch.object(weight_group, "LEFT_S", 0.0):
        run(backend, options, check)
