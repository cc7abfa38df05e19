"""The end of a pipeline whose ranks have died."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.distributed import pipeline
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.pipeline import GroupPipeline


class FakeGroup:
    """The world, a part of it, or the ranks of a stage."""

    rank, group = 0, None

    def __init__(self) -> None:
        self.is_closed = False

    def part(self, ranks: list[list[int]]) -> FakeGroup:
        return self

    def close(self) -> None:
        self.is_closed = True


class LostWork:
    """A tensor on its way to a rank that has died."""

    def wait(self) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_stage_is_closed_though_nobody_receives_what_it_has_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline.dist, "isend", lambda *_, **group: LostWork())
    world, ranks = FakeGroup(), FakeGroup()
    stages: Any = GroupPipeline(world, RankLayout(tp=1, pp=2), ranks)  # type: ignore[arg-type]
    stages.send_tokens(torch.zeros(1))  # rank 0 is of the last stage
    stages.close()
    assert world.is_closed and ranks.is_closed
