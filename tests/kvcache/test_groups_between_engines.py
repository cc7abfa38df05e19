"""What groups keep beside pages, on its way between engines: a request of the engine that receives
goes on from it, and it is what the other engine has computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_memory import KINDS, PAGE, SPARED, STATES, WINDOW, WINDOWS, Engine

from minisgl.kvcache.prefix import pack_tokens


def hand_over(sender: Engine, receiver: Engine, tokens: list[int], num_lost: int = 0) -> int:
    """Send what the receiver lacks, of which the last `num_lost` pages do not come; returns how
    many pages were sent."""
    key = pack_tokens(tokens)
    left = sender.transits.copy_out(key, len(tokens))
    if left is None:
        return 0
    sender.copy()
    first = receiver.kv.match(key, len(tokens)) // PAGE
    pages, num_beside = left.lacked_by(first)
    sent = [sender.host[page] for page in pages]
    num_pages = len(pages) - num_beside
    if num_pages > 0 and (coming := receiver.transits.expect(num_pages, first)) is not None:
        assert len(coming.beside) == num_beside, "both know what is beside the pages"
        sender.kv.audit(sender.step)
        receiver.kv.audit(receiver.step)
        num_come = max(0, len(sent) - num_lost)
        receiver.host.update(zip(coming.pages[:num_come], sent, strict=False))
        receiver.transits.adopt(coming, key, first, num_come)
        receiver.kv.audit(receiver.step)
    sender.transits.drop(left)
    sender.kv.audit(sender.step)
    return max(0, len(pages))


PROMPT = [*range(21)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_on_behind_all_that_another_engine_has_computed(kind: str) -> None:
    sender, receiver = Engine(kind), Engine(kind)
    assert sender.run(PROMPT) == 0
    seen = (WINDOW + PAGE - 2) // PAGE
    beside = sum(each * (1 if group == STATES else seen) for group, each in KINDS[kind].items())
    assert hand_over(sender, receiver, PROMPT) == 10 + beside
    assert receiver.kv.match(pack_tokens(PROMPT), len(PROMPT)) == 20
    assert receiver.run(PROMPT) == 20
    assert sender.kv.tiers.host.pool.num_used == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_shared", [4, 18])
def test_what_is_beside_the_pages_of_the_receiver_stays_away(kind: str, num_shared: int) -> None:
    sender, receiver = Engine(kind), Engine(kind)
    assert sender.run(PROMPT) == 0 and receiver.run(PROMPT[: num_shared + 1]) == 0
    sent = hand_over(sender, receiver, PROMPT)
    windows = min(2, 10 - num_shared // PAGE)
    beside = sum(each * (1 if group == STATES else windows) for group, each in KINDS[kind].items())
    assert sent == 10 - num_shared // PAGE + beside
    assert receiver.run(PROMPT) == 20


@pytest.mark.parametrize("kind", KINDS)
def test_pages_whose_end_has_come_without_what_is_beside_it_are_computed(kind: str) -> None:
    sender, receiver = Engine(kind), Engine(kind)
    assert sender.run(PROMPT) == 0
    assert hand_over(sender, receiver, PROMPT, num_lost=1) > 10
    assert receiver.run(PROMPT) == 0
    receiver.kv.tiers.offload_all()
    receiver.copy()
    assert receiver.run(PROMPT) == 20


@pytest.mark.parametrize("is_in_host_memory", [False, True])
def test_an_end_whose_snapshot_the_device_has_lost_is_sent_up_to_an_earlier_one(
    is_in_host_memory: bool,
) -> None:
    sender, receiver = Engine(STATES), Engine(STATES)
    assert sender.run(PROMPT[:9]) == 0
    assert sender.run(PROMPT) == 8
    if is_in_host_memory:
        sender.kv.tiers.offload_all()
        sender.copy()
        assert sender.run(PROMPT[:9]) == 8 and sender.run(PROMPT) == 20
    sender.lose_snapshot(PROMPT, 10)
    assert hand_over(sender, receiver, PROMPT) == 4 + 2
    assert receiver.run(PROMPT) == 8
    sender.lose_snapshot(PROMPT, 4)
    assert hand_over(sender, receiver, PROMPT) == 0


def test_a_snapshot_that_is_on_its_way_from_host_memory_is_not_sent() -> None:
    sender = Engine(STATES)
    assert sender.run(PROMPT) == 0
    sender.kv.tiers.offload_all()
    sender.copy()
    assert sender.run(PROMPT) == 20
    sender.lose_snapshot(PROMPT, 10)
    key = pack_tokens(PROMPT)
    lease = sender.kv.acquire(key, len(PROMPT))
    assert sender.kv.reserve(lease, len(PROMPT)) is not None and sender.kv.is_loading(lease)
    assert sender.transits.copy_out(key, len(PROMPT)) is None
    sender.copy()  # and it lands
    assert sender.transits.copy_out(key, len(PROMPT)) is not None
    sender.kv.close(lease)


def test_a_request_that_spares_the_last_page_finds_windows_behind_the_one_before() -> None:
    sender, receiver = Engine(SPARED), Engine(SPARED)
    assert sender.run(PROMPT) == 0
    assert hand_over(sender, receiver, PROMPT) == 9 + 2 * 2
    assert receiver.run(PROMPT) == 16
    lease = sender.kv.acquire(pack_tokens(PROMPT), len(PROMPT))
    pages = [*lease.pages]
    sender.kv.close(lease)
    assert sender.kv.windows is not None
    sender.kv.windows.forget([pages[6]])  # before those of its own window
    assert hand_over(sender, Engine(SPARED), PROMPT) == 0


def test_windows_that_the_device_has_lost_are_not_sent() -> None:
    sender, receiver = Engine(WINDOWS), Engine(WINDOWS)
    assert sender.run(PROMPT) == 0 and sender.kv.windows is not None
    lease = sender.kv.acquire(pack_tokens(PROMPT), len(PROMPT))
    pages = [*lease.pages]
    sender.kv.close(lease)
    sender.kv.windows.forget(pages[-1:])
    assert hand_over(sender, receiver, PROMPT) == 9 + 4
    assert receiver.run(PROMPT) == 18


PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=24)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 1), PROMPTS),
    st.tuples(st.just("leave"), st.integers(0, 1), st.none()),
    st.tuples(st.just("lose"), st.integers(0, 1), st.none()),
    st.tuples(st.just("hand over"), st.integers(0, 40), PROMPTS),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*KINDS, SPARED]), st.lists(ACTIONS, max_size=25), st.integers(1, 4))
def test_any_exchange_beside_evictions_leaves_each_page_right_and_with_one_owner(
    kind: str, actions: list[tuple[str, int, list[int] | None]], num_snapshots: int
) -> None:
    engines = [Engine(kind, num_pages=30, num_snapshots=num_snapshots) for _ in range(2)]
    for action, which, tokens in actions:
        if action == "hand over":
            assert tokens is not None
            engines[0].run(tokens)
            hand_over(*engines, tokens, num_lost=which if which < 8 else 0)
        elif action == "run":
            assert tokens is not None
            engines[which].run(tokens)
        elif action == "leave":
            engines[which].kv.tiers.offload_all()
            engines[which].copy()
        else:
            engines[which].kv.tiers.host.make_room(110)
        for engine in engines:
            engine.kv.audit(engine.step)
