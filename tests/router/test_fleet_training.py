"""What a router does for a replica that starts after the others have got other weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minisgl.router.adapters import ReplicaRefusedError
from minisgl.router.exchange import HTTPRequest
from minisgl.router.training import FROM_DISK, FROM_GROUP, FleetTraining


class Started:
    """A replica that notes what it is asked for."""

    index = 0

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[str] = []

    async def whole(self, sent: bytes) -> tuple[int, bytes]:
        self.asked.append(sent.decode().split()[1])
        return self.status, b"{}"


@pytest.mark.parametrize(
    ("updates", "status", "brought"),
    [
        ((), 200, []),
        ((FROM_DISK,), 400, []),
        ((FROM_DISK,), 200, [FROM_DISK]),
        ((FROM_DISK, FROM_GROUP), 200, ["/sleep?level=2", "/wake_up"]),
    ],
)
async def test_a_replica_that_starts_later_gets_the_weights_or_waits_for_them(
    updates: tuple[str, ...], status: int, brought: list[str]
) -> None:
    fleet = SimpleNamespace(replicas=[Started(status)])
    training = FleetTraining(fleet, "admin", 1)  # type: ignore[arg-type]
    for path in updates:
        asked = HTTPRequest("POST", path, b"", [], b"{}", raw_path=path.encode())
        if status == 200:
            await training._ask(asked)
        else:
            with pytest.raises(ReplicaRefusedError):
                await training._ask(asked)
    fleet.replicas = [later] = [Started()]
    await training.bring(0)
    assert later.asked == brought
    if brought == [FROM_DISK]:
        fleet.replicas = [without] = [Started(400)]
        await training.bring(0)
        assert without.asked == [FROM_DISK, "/sleep?level=2", "/wake_up"]
