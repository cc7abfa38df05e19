"""A radix tree of keys, which tells how long a prefix of a new key it has seen.

It stands for the prefix cache of one engine: what the engine was sent, least recently used first to
be forgotten. Nothing but the keys is stored, so a tree is cheap to drop.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

NODE_BYTES = 400  # that a node takes besides its run
# Nodes of a key that are looked at. Keys that differ from another one each a little further on make
# a path as long as there are keys, which would have to be walked for each request.
MAX_DEPTH = 128


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of bytes that follows those of its parents."""

    run: bytes
    parent: PrefixNode | None
    children: dict[int, PrefixNode] = field(default_factory=dict)  # by the first byte of their runs


class PrefixTree:
    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of memory, at most."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._root = PrefixNode(b"", None)
        # Least recently used first. Parents come after their children, so the first is a leaf.
        self._by_age: OrderedDict[PrefixNode, None] = OrderedDict()

    def match(self, key: bytes) -> int:
        """Length of the longest prefix of `key` that some key in the tree has, as far as the first
        MAX_DEPTH nodes go. O(key)."""
        node, found = self._root, 0
        for _ in range(MAX_DEPTH):
            child = self._child(node, key, found)
            if child is None:
                break
            common = _num_common(child.run, key, found)
            found += common
            if common < len(child.run):
                break
            node = child
        return found

    def add(self, key: bytes) -> bool:
        """Add `key`, or mark it as used; returns whether some of it is new. Behind MAX_DEPTH nodes
        nothing is added. O(key), and what is forgotten for it."""
        path = list[PrefixNode]()
        node, found = self._root, 0
        while len(path) < MAX_DEPTH and (child := self._child(node, key, found)) is not None:
            common = _num_common(child.run, key, found)
            found += common
            node = child if common == len(child.run) else self._split(child, common)
            path.append(node)
        is_new = found < len(key) and len(path) < MAX_DEPTH
        if is_new:
            leaf = PrefixNode(key[found:], node)
            node.children[key[found]] = leaf
            self.num_bytes += len(leaf.run) + NODE_BYTES
            path.append(leaf)
        for node in reversed(path):
            self._by_age[node] = None
            self._by_age.move_to_end(node)
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._by_age)))
        return is_new

    def remove(self, key: bytes) -> None:
        """Forget what `add` has added for `key`, unless other keys go on from there. O(key)."""
        node, found = self._root, 0
        for _ in range(MAX_DEPTH):
            child = self._child(node, key, found)
            if child is None or not key.startswith(child.run, found):
                break
            node, found = child, found + len(child.run)
        if found == len(key) and node is not self._root and not node.children:
            self._forget(node)

    def _child(self, node: PrefixNode, key: bytes, start: int) -> PrefixNode | None:
        return node.children.get(key[start]) if start < len(key) else None

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Move the first `length` bytes of `node` into a new parent, and return the parent."""
        assert node.parent is not None
        upper = PrefixNode(node.run[:length], node.parent)
        node.parent.children[upper.run[0]] = upper
        node.run, node.parent = node.run[length:], upper
        upper.children[node.run[0]] = node
        self.num_bytes += NODE_BYTES
        return upper

    def _forget(self, leaf: PrefixNode) -> None:
        del self._by_age[leaf]
        assert leaf.parent is not None
        del leaf.parent.children[leaf.run[0]]
        self.num_bytes -= len(leaf.run) + NODE_BYTES


def _num_common(run: bytes, key: bytes, start: int) -> int:
    """Number of bytes in which `run` and `key` from `start` on agree, at memory speed."""
    length = min(len(run), len(key) - start)
    if key.startswith(run[:length], start):
        return length
    low, high = 0, length
    while high - low > 1:  # bytes below low are equal, those below high are not
        middle = (low + high) // 2
        if key.startswith(run[low:middle], start + low):
            low = middle
        else:
            high = middle
    return low
