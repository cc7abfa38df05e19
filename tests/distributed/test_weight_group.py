"""A group in which weights come, whose trainer is a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ports import free_port
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from minisgl.distributed import weight_group
from minisgl.distributed.addresses import GroupAddress
from minisgl.distributed.weight_group import WeightGroup

COMING = [([3], torch.float32)]


class Trainer:
    """The store, and rank 0 of a group of two."""

    def __init__(self, port: int) -> None:
        self.store: Any = TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
        keys: Any = TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
        for prefix in ("weights", "weights/", "cpu/"):
            keys = PrefixStore(prefix, keys)
        address = GroupAddress("127.0.0.1", port, 1, 2, "weights", "gloo")
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(WeightGroup, address, 1, torch.device("cpu"))
            self.group: Any = dist.ProcessGroupGloo(keys, 0, 2)
            self.weights = joined.result()

    def close(self) -> None:
        self.group = None  # which ends what the other waits for
        self.weights.close()
        self.store = None


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with free_port() as port:
        found = Trainer(port)
        yield found
        found.close()


def test_what_is_sent_comes_also_from_a_trainer_that_has_ended(trainer: Trainer) -> None:
    sent = torch.tensor([1.0, 2.0, 3.0])
    sending = trainer.group.broadcast([sent], dist.BroadcastOptions())
    trainer.store = None
    [found] = trainer.weights.receive(COMING)
    sending.wait()
    assert found.equal(sent)


def test_a_trainer_that_ends_ends_the_wait_for_it(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_group, "LEFT_S", 0.0)
    trainer.store = None
    with pytest.raises(RuntimeError, match="the trainer has ended"):
        next(trainer.weights.receive(COMING))


def test_a_trainer_that_sends_nothing_ends_the_wait_for_it(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_group, "LIMIT_S", 0.0)
    with pytest.raises(RuntimeError, match="nothing has come"):
        next(trainer.weights.receive(COMING))
