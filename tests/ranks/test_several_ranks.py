"""What rank 0 makes of what the others answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.errors import CheckpointError, DeviceMemoryError, MinisglError, UnsupportedModelError
from minisgl.ranks.processes.channel import Answered
from minisgl.ranks.processes.worker import _called
from minisgl.ranks.several_ranks import RankWeights


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (DeviceMemoryError("It is full."), DeviceMemoryError),
        (CheckpointError("It is full."), CheckpointError),
        (UnsupportedModelError("It is full."), CheckpointError),
        (RuntimeError("It is full."), CheckpointError),
    ],
)
def test_too_little_memory_of_another_rank_is_called_that(
    error: Exception, raised: type[MinisglError]
) -> None:
    def wake(tags: object) -> None:
        raise error

    other: Any = SimpleNamespace(weights=SimpleNamespace(wake=wake))

    def call(name: str, *arguments: object) -> list[Answered]:
        return [_called(other, 1, name, arguments)]

    own: Any = SimpleNamespace(wake=lambda tags: None)
    others: Any = SimpleNamespace(call=call)
    with pytest.raises(raised, match=r"^Rank 1: .*It is full") as caught:
        RankWeights(own, others).wake(["weights"])
    assert type(caught.value) is raised
    assert caught.value.http_status == (503 if raised is DeviceMemoryError else 500)
