"""The tree of prefixes, and the choice of a replica."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.router.config import CACHE, LEAST_LOADED, POLICIES, ROUND_ROBIN
from minisgl.router.fleet import MIN_PREFILL_BYTES, Fleet, ReplicaState
from minisgl.router.prefixes import MAX_DEPTH, NODE_BYTES, PrefixTree
from minisgl.router.table import BLOCK_BYTES, MAX_AHEAD, MAX_KEY_BYTES, RouteTable, is_uneven

IDLE = {"a": 0, "b": 0, "c": 0}
LONG = b"x" * 2 * BLOCK_BYTES
# Few letters, so that keys have prefixes in common.
KEYS = st.lists(st.binary(max_size=8).map(lambda raw: bytes(byte % 3 for byte in raw)))


def num_common(one: bytes, other: bytes) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def check(tree: PrefixTree) -> None:
    """Recompute every invariant of a tree."""
    age = {node: place for place, node in enumerate(tree._by_age)}
    pending, num_bytes, num_nodes = [tree._root], 0, 0
    while pending:
        node = pending.pop()
        for first, child in node.children.items():
            assert child.parent is node and child.run[0] == first
            assert node is tree._root or age[child] < age[node], "a parent is older"
            num_bytes += len(child.run) + NODE_BYTES
            num_nodes += 1
            pending.append(child)
    assert num_nodes == len(age), "a node has no age, or is no longer in the tree"
    assert num_bytes == tree.num_bytes <= tree._max_bytes


@given(keys=KEYS, asked=KEYS)
def test_a_tree_finds_the_longest_prefix_of_all_its_keys(
    keys: list[bytes], asked: list[bytes]
) -> None:
    tree = PrefixTree(1 << 20)
    for count, key in enumerate(keys):
        tree.add(key)
        check(tree)
        for wanted in asked:
            longest = max(num_common(known, wanted) for known in keys[: count + 1])
            assert tree.match(wanted) == longest


@given(keys=KEYS, num_nodes=st.integers(9, 40))
def test_a_tree_forgets_the_least_recently_used_keys_first(
    keys: list[bytes], num_nodes: int
) -> None:
    max_bytes = num_nodes * (1 + NODE_BYTES)
    tree = PrefixTree(max_bytes)
    for count, key in enumerate(keys):
        tree.add(key)
        check(tree)
        assert tree.match(key) == len(key)
        # The newest keys that fit into the tree together are there in full.
        newest, size = set[bytes](), 0
        for recent in reversed(keys[: count + 1]):
            size += len(recent) * (1 + NODE_BYTES)  # if each of its bytes is a node
            if size > max_bytes:
                break
            newest.add(recent)
        assert all(tree.match(recent) == len(recent) for recent in newest)


@pytest.mark.parametrize("ascending", [True, False])
def test_keys_that_differ_each_a_little_further_on_make_no_longer_walks(ascending: bool) -> None:
    tree, long = PrefixTree(64 << 20), b"x" * 2000
    lengths = range(len(long)) if ascending else reversed(range(len(long)))
    for length in lengths:
        tree.add(long[:length] + b"y")
    check(tree)
    assert tree.match(long) == MAX_DEPTH  # one byte a node
    assert tree.match(long[:50] + b"y") == 51


@given(keys=KEYS, removed=KEYS)
def test_a_tree_forgets_a_key_that_is_taken_back_unless_others_go_on(
    keys: list[bytes], removed: list[bytes]
) -> None:
    tree = PrefixTree(1 << 20)
    for key in keys:
        tree.add(key)
    for key in removed:
        before = [tree.match(other) for other in (key, *keys)]
        if tree.add(key):
            tree.remove(key)
        check(tree)
        assert [tree.match(other) for other in (key, *keys)] == before


@given(data=st.data(), policy=st.sampled_from(POLICIES))
def test_any_use_of_a_table_gives_a_replica_that_takes_requests(
    data: st.DataObject, policy: str
) -> None:
    table: RouteTable[str] = RouteTable(policy, max_bytes=4 * NODE_BYTES)
    for _ in range(data.draw(st.integers(1, 20))):
        loads = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(0, 40), min_size=1))
        key = data.draw(st.sampled_from((LONG, LONG[:-1], b"y" * 100, b"")))
        chosen = table.choose(key, loads)
        assert chosen in loads
        table.sent(key, chosen)
        if policy != ROUND_ROBIN:
            assert not is_uneven(loads[chosen], min(loads.values()))
        if data.draw(st.booleans()):
            table.gone(chosen)
            assert table.matches(key, "abc")[chosen] == 0


def test_a_conversation_stays_where_it_is_and_new_ones_spread() -> None:
    table: RouteTable[str] = RouteTable()
    history = [LONG + bytes([index]) * 100 for index in range(30)]
    home = []
    for first in history:  # all begin with the same, which is soon everywhere
        loads = {name: home.count(name) for name in IDLE}
        home.append(table.choose(first, loads))
        table.sent(first, home[-1])
    assert min(home.count(name) for name in IDLE) >= 30 // 3 - MAX_AHEAD // 2
    for index, first in enumerate(history):
        later = first + b"an answer, and the next question"
        assert table.choose(later, IDLE) == home[index]


def test_prompts_of_token_ids_are_matched_like_texts() -> None:
    table: RouteTable[int] = RouteTable()
    table.sent(list(range(100)), 1)
    assert table.choose([*range(90), 7], {0: 0, 1: 3}) == 1
    assert table.choose([7, *range(90)], {0: 0, 1: 3}) == 0
    assert table.matches([*range(90), 7], [0, 1]) == {0: 0, 1: 360}


def test_uneven_load_outweighs_a_cached_prefix() -> None:
    table: RouteTable[str] = RouteTable()
    table.sent(LONG, "a")
    assert table.choose(LONG, {"a": MAX_AHEAD, "b": 0}) == "a"
    assert table.choose(LONG, {"a": MAX_AHEAD + 1, "b": 0}) == "b"
    assert table.choose(LONG, {"a": 100 + MAX_AHEAD + 1, "b": 100}) == "a"
    assert table.choose(LONG, {"a": 151, "b": 100}) == "b"


def test_requests_without_a_common_prefix_go_to_the_least_loaded_and_then_emptiest() -> None:
    table: RouteTable[str] = RouteTable()
    table.sent(b"1" * 500, "a")
    table.sent(b"2" * 400, "b")
    assert table.choose(LONG, {"a": 0, "b": 1}) == "a"
    assert table.choose(LONG, {"a": 0, "b": 0}) == "b"
    assert table.choose(LONG, IDLE) == "c"


def test_what_a_replica_was_sent_is_forgotten_with_it() -> None:
    table: RouteTable[str] = RouteTable()
    table.sent(LONG, "b")
    assert table.choose(LONG, IDLE) == "b"
    table.gone("b")
    assert table.choose(LONG, IDLE) == "a"


def test_the_end_of_a_very_long_key_is_not_kept() -> None:
    table: RouteTable[str] = RouteTable()
    table.sent(b"z" * (MAX_KEY_BYTES + 100), "b")
    assert table.matches(b"z" * (MAX_KEY_BYTES + 200), ["b"]) == {"b": MAX_KEY_BYTES}


def test_the_other_policies_ignore_prefixes() -> None:
    even: RouteTable[str] = RouteTable(LEAST_LOADED)
    even.sent(LONG, "c")
    assert even.choose(LONG, {"a": 2, "b": 1, "c": 2}) == "b"
    turns: RouteTable[str] = RouteTable(ROUND_ROBIN)
    turns.sent(LONG, "c")
    chosen = [turns.choose(LONG, IDLE) for _ in range(6)]
    assert sorted(chosen[:3]) == ["a", "b", "c"] and chosen[:3] == chosen[3:]


@pytest.mark.parametrize("roles", ["prefill,decode,decode", "prefill,prefill,decode"])
def test_replicas_of_each_role_take_turns(roles: str) -> None:
    fleet = Fleet(["a", "b", "c"], ROUND_ROBIN, roles.split(","))
    fleet.update([ReplicaState(is_ready=True)] * 3)
    ways = [fleet.choose(b"%d" % number * MIN_PREFILL_BYTES) for number in range(8)]
    chosen = Counter(each.index for way in ways for each in (way.replica, way.prefill) if each)
    assert sorted(chosen.values()) == [4, 4, 8]


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=f"allowed: {CACHE}, {LEAST_LOADED} or {ROUND_ROBIN}"):
        RouteTable("random")


def test_a_prompt_that_a_replica_refused_is_not_remembered_nor_told() -> None:
    fleet = Fleet(["a", "b"], CACHE)
    fleet.update([ReplicaState(is_ready=True), ReplicaState(is_ready=True)])
    told: list[int] = []
    fleet.tell = lambda key, index, start: told.append(index)
    route = fleet.choose(LONG)
    assert fleet._table.matches(LONG, [0, 1])[route.replica.index] == len(LONG)  # at once
    fleet.answered(LONG, route, accepted=False)
    assert fleet._table.matches(LONG, [0, 1]) == {0: 0, 1: 0} and not told
    route = fleet.choose(LONG)
    fleet.answered(LONG, route, accepted=True)
    again = fleet.choose(LONG)
    assert again.replica is route.replica and told == [route.replica.index]
    fleet.answered(LONG, again, accepted=False)  # now it is full; the prompt is in its cache
    assert fleet._table.matches(LONG, [0, 1])[route.replica.index] == len(LONG)
