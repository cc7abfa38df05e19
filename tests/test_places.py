"""Turns of clients at places, and their shares of them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.errors import EngineStoppedError
from minisgl.places import Places, Shares
from minisgl.request import EVERYONE, Tenant


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Waiting:
    """Callers that wait for places, in the order in which they have got one."""

    def __init__(self, num_places: int) -> None:
        self.places = Places(num_places)
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, client: str, *names: str, user: str = "") -> None:
        for name in names:
            self.tasks[name] = asyncio.ensure_future(self._take(Tenant(client, user), name))
            await settle()

    async def _take(self, tenant: Tenant, name: str) -> None:
        await self.places.take(tenant)
        self.served.append(name)

    async def serve(self, times: int) -> list[str]:
        """Who gets a place next."""
        before = len(self.served)
        for _ in range(times):
            self.places.give_back()
        await settle()
        return self.served[before:]


async def test_clients_and_the_users_of_each_take_turns() -> None:
    waiting = Waiting(1)
    await waiting.come("many", *"0123456", user="x")
    await waiting.come("many", *"yz", user="y")
    await waiting.come("few", "a", "b")
    await waiting.come("one", "c")
    assert waiting.served == ["0"]
    served = [(await waiting.serve(1))[0] for _ in range(11)]
    assert served == ["1", "a", "c", "y", "b", "2", "z", "3", "4", "5", "6"]
    assert await waiting.serve(1) == []
    await waiting.come("many", "7")  # the place is free
    assert waiting.served[-1] == "7"


async def test_a_place_is_taken_by_as_many_as_there_are() -> None:
    waiting = Waiting(3)
    await waiting.come("a", *"01234")
    assert waiting.served == [*"012"]
    assert await waiting.serve(2) == ["3", "4"]
    await waiting.serve(2)
    await waiting.come("a", *"567")
    assert waiting.served == [*"0123456"]


async def test_who_leaves_takes_no_place_with_him() -> None:
    waiting = Waiting(1)
    await waiting.come("a", *"0123")
    await waiting.come("b", "4")
    for name in "124":
        waiting.tasks[name].cancel()
    await settle()
    assert list(waiting.places._waiting) == ["a"]
    assert await waiting.serve(1) == ["3"]
    await waiting.come("a", "5", "6")
    waiting.places.give_back()  # to 5, which leaves before it runs
    waiting.tasks["5"].cancel()
    await settle()
    assert waiting.served == ["0", "3", "6"]
    await waiting.serve(1)
    async with waiting.places.place(EVERYONE):
        assert not waiting.places._num_free
    assert waiting.places._num_free == 1 and not waiting.places._waiting


async def test_a_failure_ends_all_that_wait_and_locks_no_place() -> None:
    waiting = Waiting(1)
    await waiting.come("a", *"012")
    await waiting.come("b", "3")
    waiting.places.fail(EngineStoppedError("closed"))
    waiting.tasks["1"].cancel()  # at the same time
    await settle()
    assert waiting.tasks["1"].cancelled()
    for name in "23":
        with pytest.raises(EngineStoppedError, match="closed"):
            await waiting.tasks[name]
    assert await waiting.serve(1) == []
    assert waiting.places._num_free == 1


ACTIONS = st.tuples(
    st.sampled_from(("come", "cancel", "end")), st.integers(0, 2), st.integers(0, 1), st.booleans()
)


@given(st.lists(ACTIONS, max_size=60), st.integers(1, 3))
async def test_any_sequence_keeps_order_turns_and_places(
    actions: list[tuple[str, int, int, bool]], num_places: int
) -> None:
    """Beside a model that visits clients and users one after the other."""
    waiting = Waiting(num_places)
    lines: dict[str, dict[str, deque[str]]] = {}  # the next turn first
    free, holding, served = num_places, 0, list[str]()

    def hand_out() -> None:
        nonlocal free, holding
        while free and lines:
            client = next(iter(lines))
            users = lines.pop(client)
            user = next(iter(users))
            line = users.pop(user)
            served.append(line.popleft())
            if line:
                users[user] = line
            if users:
                lines[client] = users
            free, holding = free - 1, holding + 1

    for number, (action, client, user, later) in enumerate(actions):
        if action == "come":
            name = f"{client}.{user}.{number}"
            task = waiting._take(Tenant(str(client), str(user)), name)
            waiting.tasks[name] = asyncio.ensure_future(task)
            lines.setdefault(str(client), {}).setdefault(str(user), deque()).append(name)
            await settle()
            hand_out()
        elif action == "cancel":
            line = lines.get(str(client), {}).get(str(user))
            if line:
                name = line.pop() if later else line.popleft()
                waiting.tasks[name].cancel()
                if not line:
                    del lines[str(client)][str(user)]
                if not lines[str(client)]:
                    del lines[str(client)]
        elif holding:
            waiting.places.give_back()
            free, holding = free + 1, holding - 1
            hand_out()
        await settle()
        assert waiting.served == served
        assert waiting.places._num_free == free
        assert {
            client: {user: len(line) for user, line in users.items()}
            for client, users in waiting.places._waiting.items()
        } == {
            client: {user: len(line) for user, line in users.items()}
            for client, users in lines.items()
        }
    for task in waiting.tasks.values():
        task.cancel()
    await settle()
    assert not waiting.places._waiting


def test_a_client_gets_its_part_of_what_others_have_taken() -> None:
    shares = Shares(6)
    assert all(shares.take("many") for _ in range(6))
    assert not shares.take("many")
    got = Counter(name for name in [*"aaaa", *"bbbb"] if shares.take(name))
    assert got == {"a": 3, "b": 2}
    assert not shares.take("many") and shares.num_taken == 11
    shares.give_back("many", 6)
    assert [shares.take("a"), shares.take("a")] == [True, False]
    for name, num in (("a", 4), ("b", 2)):
        shares.give_back(name, num)
    assert shares.num_taken == 0 and shares.take("many", 6)
