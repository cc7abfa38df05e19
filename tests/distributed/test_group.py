"""Which communicator the ranks of a stage get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.distributed import group
from minisgl.distributed.layout import RankLayout


@pytest.mark.parametrize(
    ("capability", "least", "plain", "expected"),
    [
        ((9, 0), 1, False, "peer memory"),
        ((9, 0), 0, False, "NCCL"),  # another rank has an older GPU
        ((8, 0), 1, False, "NCCL"),
        ((10, 0), 1, False, "NCCL"),
        ((9, 0), 1, True, "NCCL"),
    ],
)
def test_our_collectives_are_taken_only_where_they_have_run(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    least: int,
    plain: bool,
    expected: str,
) -> None:
    """least: what the other ranks say."""
    nccl = SimpleNamespace(
        device=torch.device("cuda", 0), rank=0, host_min=lambda value: min(value, least)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(group, "GroupCommunicator", lambda *arguments: nccl)
    monkeypatch.setattr(group, "over_peer_memory", lambda *arguments: "peer memory")
    monkeypatch.setattr(group, "OneStage", lambda ranks: None)
    found: Any
    found, _ = group.join_group(
        None,
        0,
        RankLayout(tp=2),
        nccl.device,
        hidden_size=8,
        dtype=torch.bfloat16,
        plain=plain,
    )
    assert ("NCCL" if found is nccl else found) == expected
