"""The store of responses: what it keeps for whom, how much, and for how long."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.server.apis.responses.ids import item_id, new_response_id, replica_of, response_of
from minisgl.server.apis.responses.store import (
    ENTRY_BYTES,
    ITEM_BYTES,
    KEEP_S,
    USE_BYTES,
    ResponseStore,
    StoredResponse,
)

RESPONSE_BYTES = ENTRY_BYTES + 100 + USE_BYTES + ITEM_BYTES + len(b"answer a")  # see response()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def response(id: str, *items: bytes, size: int = 100) -> StoredResponse:
    return StoredResponse(id, None, items, (b"answer " + id.encode(),), b"x" * size)


def test_a_response_is_found_by_its_client_alone_and_until_it_is_removed() -> None:
    store = ResponseStore(1_000_000)
    kept = response("a", b"question")
    store.keep("me", kept)
    assert store.find("me", "a") == kept
    assert store.find("you", "a") is None and not store.remove("you", "a")
    assert store.remove("me", "a") and not store.remove("me", "a")
    assert store.find("me", "a") is None and store.num_bytes == 0


def test_the_least_recently_used_go_when_there_are_too_many_bytes() -> None:
    store = ResponseStore(4 * RESPONSE_BYTES)
    for id in "abcd":
        store.keep("", response(id))
    assert store.find("", "a") is not None
    store.keep("", response("e"))
    assert [id for id in "abcde" if store.find("", id)] == ["a", "c", "d", "e"]
    store.keep("", response("f", size=1_000_000))  # larger than the store
    assert store.find("", "f") is None and store.num_bytes == 0


def test_a_client_with_many_responses_does_not_push_out_those_of_others() -> None:
    store = ResponseStore(10 * (RESPONSE_BYTES + 1))
    store.keep("small", response("a"))
    for number in range(100):
        store.keep("large", response(str(number)))
    assert store.find("small", "a") is not None
    assert store.find("large", "99") is not None and store.find("large", "0") is None


def test_what_was_not_used_for_a_day_is_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(1_000_000, clock)
    for id in "ab":
        store.keep("", response(id))
    clock.now_s = KEEP_S
    assert store.find("", "a") is not None
    clock.now_s = KEEP_S + 1
    assert store.find("", "b") is None and store.find("", "a") is not None
    clock.now_s = 3 * KEEP_S
    store.keep("other", response("c"))
    assert store.find("", "a") is None
    assert store.num_bytes == RESPONSE_BYTES


def test_items_that_requests_have_in_common_are_kept_once() -> None:
    """Clients that send the whole conversation each time would fill the store with copies."""
    store = ResponseStore(10_000_000)
    items = [bytes([n]) * 10_000 for n in range(100)]
    for turn in range(100):
        store.keep("", response(str(turn), *items[: turn + 1]))
    assert store.num_bytes < 1_500_000
    assert store.remove("", "50")
    found = store.find("", "99")
    assert found is not None and list(found.input) == items


@pytest.mark.parametrize(
    ("num_responses", "items"),
    [
        (60, lambda serial: [b'{"type":"reasoning"}'] * 1000),
        (4, lambda serial: [b"%d %d" % (serial, index) for index in range(1000)]),
        (250, lambda serial: [b"%d" % serial]),
        (250, lambda serial: []),
    ],
    ids=["one many times", "many", "one", "none"],
)
def test_the_bound_is_what_memory_grows_by(
    num_responses: int, items: Callable[[int], list[bytes]]
) -> None:
    """However many clients have filled the store in turn."""
    max_bytes = 375_000
    store = ResponseStore(max_bytes)
    tracemalloc.start()
    try:
        for client in "abcde":
            for serial in range(num_responses):
                store.keep(client, response(f"{client}{serial}", *items(serial)))
            grown, _ = tracemalloc.get_traced_memory()
            assert grown < max_bytes
    finally:
        tracemalloc.stop()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("kfr"), st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)
        )
    )
)
def test_bytes_are_counted_whatever_is_kept_found_and_removed(
    steps: list[tuple[str, str, int, int]],
) -> None:
    store = ResponseStore(20_000)
    for serial, (what, client, number, items) in enumerate(steps):
        if what == "k":
            texts = [b"item %d" % item * 50 for item in range(items)]
            store.keep(client, response(f"{number}.{serial}", *texts))
        for id in [f"{number}.{serial}" for serial in range(serial)]:
            if what == "f":
                store.find(client, id)
            elif what == "r":
                store.remove(client, id)
        assert 0 <= store.num_bytes <= 20_000
    for client in "ab":
        for number in range(10):
            for serial in range(len(steps)):
                store.remove(client, f"{number}.{serial}")
    assert store.num_bytes == 0


@pytest.mark.parametrize("replica", ["", "0", "17", "x9ab3k2f"])
def test_an_items_id_leads_to_its_response_and_to_its_replica(replica: str) -> None:
    id = new_response_id(replica)
    assert replica_of(id) == replica
    for index in (0, 7, 99, 100, 8000):
        item = item_id("msg", id, index)
        assert len(item) <= 64
        assert (response_of(item), replica_of(item)) == (id, replica)
    assert len({new_response_id(replica) for _ in range(100)}) == 100


@pytest.mark.parametrize("id", ["", "resp_", "msg_1", "msg_" + "g" * 32, "x" * 1000, "msg_é"])
def test_ids_of_others_lead_nowhere(id: str) -> None:
    assert response_of(id) == replica_of(id) == ""
