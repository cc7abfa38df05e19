"""Which replica gets a request.

The rule of the policy `cache` is that of SGLang's router (Zheng et al., 2024): the replica that was
sent the longest prefix of the request, unless its load is uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from minisgl.errors import one_of
from minisgl.kvcache.prefix import pack_tokens
from minisgl.router.config import CACHE, LEAST_LOADED, POLICIES, ROUND_ROBIN
from minisgl.router.prefixes import PrefixTree

# What a table remembers of the keys of each replica, and of one key.
MAX_BYTES = 64 << 20
MAX_KEY_BYTES = 256 << 10
# Prefixes that differ by less count as equally long: engines cache whole pages.
BLOCK_BYTES = 64
# A load is uneven if it exceeds the least one by more than this, and by more than this factor.
MAX_AHEAD = 8
MAX_RATIO = 1.5

Key = bytes | Sequence[int]
Replica = TypeVar("Replica", bound=Hashable)


class RouteTable(Generic[Replica]):
    """Chooses replicas, and remembers what each of them was sent.

    A key is a request's prompt: bytes of its text, or its token ids. Keys of one table are of one
    kind. Replicas have any names; they are known by what they are sent.
    """

    def __init__(self, policy: str = CACHE, max_bytes: int = MAX_BYTES) -> None:
        """max_bytes: memory for the keys of each replica. Raises ValueError for the policy."""
        choosers: dict[str, Callable[[Key, Mapping[Replica, int]], Replica]] = {
            CACHE: self._choose_cached,
            LEAST_LOADED: lambda key, loads: min(loads, key=loads.__getitem__),
            ROUND_ROBIN: self._choose_next,
        }
        if policy not in choosers:
            raise ValueError(f"policy {policy!r}: {one_of(POLICIES)}")
        self._choose = choosers[policy]
        self._remembers = policy == CACHE
        self._max_bytes = max_bytes
        self._trees: dict[Replica, PrefixTree] = {}
        # Of round-robin: at which turn each replica was chosen last.
        self._last_turns: dict[Replica, int] = {}
        self._num_turns = 0

    def choose(self, key: Key, loads: Mapping[Replica, int]) -> Replica:
        """The replica for the request with `key`, among those of `loads`, at least one.

        loads: the open requests of each replica that takes requests. Changes nothing but the turn
        of round-robin: `sent` tells that the request was sent. O(key · replicas).
        """
        return self._choose(key, loads)

    def sent(self, key: Key, replica: Replica) -> bool:
        """Remember that the request with `key` was sent to `replica`; returns whether it is new."""
        if not self._remembers:
            return False
        if replica not in self._trees:
            self._trees[replica] = PrefixTree(self._max_bytes)
        return self._trees[replica].add(_packed(key))

    def refused(self, key: Key, replica: Replica) -> None:
        """Forget a new `key` that `replica` has refused: it is not in its cache."""
        if (tree := self._trees.get(replica)) is not None:
            tree.remove(_packed(key))

    def gone(self, replica: Replica) -> None:
        """Forget what `replica` was sent: it has ended, and its cache with it."""
        self._trees.pop(replica, None)
        self._last_turns.pop(replica, None)

    def matches(self, key: Key, replicas: Sequence[Replica]) -> dict[Replica, int]:
        """Bytes of the longest prefix of `key` that each replica was sent. Token ids have four."""
        packed = _packed(key)
        trees = {replica: self._trees.get(replica) for replica in replicas}
        return {each: tree.match(packed) if tree else 0 for each, tree in trees.items()}

    def _choose_cached(self, key: Key, loads: Mapping[Replica, int]) -> Replica:
        matches = self.matches(key, [*loads])
        longest = max(matches.values())
        if longest >= BLOCK_BYTES:
            holders = [each for each in loads if longest - matches[each] < BLOCK_BYTES]
            holder = min(holders, key=loads.__getitem__)
            least = min(loads.values())
            if not is_uneven(loads[holder], least):
                return holder
        return min(loads, key=lambda each: (loads[each], self._num_bytes(each)))

    def _num_bytes(self, replica: Replica) -> int:
        tree = self._trees.get(replica)
        return tree.num_bytes if tree else 0

    def _choose_next(self, key: Key, loads: Mapping[Replica, int]) -> Replica:
        # Requests may take turns among several groups, such as those for prefill and for decode.
        chosen = min(loads, key=lambda each: self._last_turns.get(each, 0))
        self._num_turns += 1
        self._last_turns[chosen] = self._num_turns
        return chosen


def is_uneven(load: int, least: int) -> bool:
    """Whether a replica has so much more to do than another that its cache does not outweigh it."""
    return load - least > MAX_AHEAD and load > MAX_RATIO * least


def _packed(key: Key) -> bytes:
    """The beginning of the key as bytes. Whatever follows does not matter to the choice."""
    if isinstance(key, bytes):
        return key[:MAX_KEY_BYTES]
    return pack_tokens(key[: MAX_KEY_BYTES // 4])
