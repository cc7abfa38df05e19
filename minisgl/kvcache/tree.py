"""The radix tree of prefixes: runs of pages, keyed by their tokens (Zheng et al., SGLang, 2024).

A node is in use while a lock ends at it or at a descendant. Users are counted incrementally, so
matching costs O(prompt), independent of the size of the tree. The tree knows which tokens a run
has and who uses it; its followers know where its pages are, and which of them go first.

Each namespace has a tree with its own root, which exists while there are nodes or locks below it:
a namespace without cached pages takes no memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from minisgl.kvcache.prefix import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages. The run's tokens follow those of its parents."""

    key: bytes  # packed tokens; only the first num_pages pages of it count
    num_pages: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)  # by the packed first page
    num_users: int = 0  # locks that end here, plus children with users
    last_used: int = 0

    def upwards(self) -> Iterator[Node]:
        """The node and all above it, up to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent


# The nodes that a key passes, from the top, and how many pages of each it matches.
Found = list[tuple[Node, int]]


class Follower:
    """Keeps something beside the nodes of a tree, which tells of its changes."""

    def locked(self, node: Node) -> None:
        """Note that `node` has come into use."""

    def released(self, node: Node) -> None:
        """Note that `node` has gone out of use."""

    def offer(self, node: Node) -> None:
        """Note that `node`, which is not in use, may go, as far as this depends on the tree."""

    def split(self, upper: Node, node: Node) -> None:
        """Note that the first pages of `node` have moved to `upper`, its new parent."""

    def ended(self, node: Node) -> None:
        """Note that the end of a node is not in the tree any more."""


class PrefixTree:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.followers: list[Follower] = []
        self.num_nodes = 0  # without the roots
        self._roots: dict[bytes, Node] = {}  # by namespace, which is also the key of the root
        self._clock = 0

    # -- finding -----------------------------------------------------------------------------------

    def match(self, key: bytes, max_pages: int, namespace: bytes = b"") -> Found:
        """The longest prefix of `key`, at most `max_pages` pages. Changes nothing. O(key)."""
        root = self._roots.get(namespace)
        return [] if root is None else self.below(root, key, 0, max_pages)

    def below(self, node: Node, key: bytes, start: int, end: int) -> Found:
        """What there is below `node` of the pages `start` .. `end` - 1 of `key`."""
        found: Found = []
        is_whole = True
        while is_whole and start < end and (child := self.child(node, key, start)) is not None:
            common = self._common_pages(child, key, start, end)
            is_whole = common == child.num_pages
            found.append((child, common))
            node, start = child, start + common
        return found

    def along(self, node: Node, key: bytes, num_pages: int) -> Found:
        """What the tree of `node` has of the first `num_pages` pages of `key`."""
        *_, root = node.upwards()
        return self.below(root, key, 0, num_pages)

    def child(self, node: Node, key: bytes, start: int) -> Node | None:
        """The node below `node` that begins with page `start` of `key`."""
        return node.children.get(self._first_page(key, start))

    def _first_page(self, key: bytes, start: int) -> bytes:
        return key[start * self.page_bytes : (start + 1) * self.page_bytes]

    def _common_pages(self, node: Node, key: bytes, start: int, end: int) -> int:
        """Number of equal pages of `node` and pages `start` .. `end` - 1 of `key`, at least one."""
        size, most = self.page_bytes, min(node.num_pages, end - start)
        if key.startswith(node.key[: most * size], start * size):
            return most

        def differ(num_pages: int) -> bool:
            return not key.startswith(node.key[: num_pages * size], start * size)

        return bisect_left(range(1, most), True, key=differ)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def place(self, node: Node) -> tuple[bytes, bytes, int]:
        """The namespace of a node, the tokens up to its end, and the index of its first page."""
        *path, root = node.upwards()
        size = self.page_bytes
        tokens = b"".join(each.key[: each.num_pages * size] for each in reversed(path))
        return root.key, tokens, len(tokens) // size - node.num_pages

    # -- growing and shrinking ---------------------------------------------------------------------

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace, made if there is none; `let_go` ends it. Begins a new time: what
        is used or added from now on is used later than all before."""
        self._clock += 1
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(key=namespace, num_pages=0, parent=None)
        return root

    def path(self, found: Found, num_pages: int) -> list[Node]:
        """The nodes with the first `num_pages` pages of a match. Splits the last one where it has
        more."""
        path: list[Node] = []
        for node, common in found:
            if num_pages <= 0:
                break
            common = min(common, num_pages)
            path.append(node if common == node.num_pages else self._split(node, common))
            num_pages -= common
        return path

    def add(self, parent: Node, key: bytes, start: int, end: int) -> Node:
        """Add a node for the pages `start` .. `end` - 1 of `key`."""
        run = key[start * self.page_bytes : end * self.page_bytes]
        node = Node(key=run, num_pages=end - start, parent=parent, last_used=self._clock)
        parent.children[self._first_page(run, 0)] = node
        self.num_nodes += 1
        return node

    def cut(self, node: Node, at_most: int) -> None:
        """Split `node` so that it has at most its last `at_most` pages."""
        if node.num_pages > at_most:
            self._split(node, node.num_pages - at_most)

    def _split(self, node: Node, num_pages: int) -> Node:
        """Move the first pages of `node` into a new parent, and return the parent.

        `node` keeps the rest of the run, so that locks that end at it remain valid.
        """
        parent, cut = node.parent, num_pages * self.page_bytes
        assert parent is not None
        upper = Node(
            key=node.key[:cut],
            num_pages=num_pages,
            parent=parent,
            num_users=1 if node.num_users else 0,
            last_used=node.last_used,
        )
        parent.children[self._first_page(upper.key, 0)] = upper
        node.key, node.num_pages, node.parent = node.key[cut:], node.num_pages - num_pages, upper
        upper.children[self._first_page(node.key, 0)] = node
        self.num_nodes += 1
        for each in self.followers:
            each.split(upper, node)
        self.let_go(upper)
        return upper

    def trim(self, node: Node, num_pages: int) -> None:
        """Drop the last pages of a node without children, but not all."""
        node.num_pages -= num_pages
        for each in self.followers:
            each.ended(node)

    def remove(self, node: Node) -> None:
        """Remove a node without children."""
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[self._first_page(node.key, 0)]
        node.parent = None
        self.num_nodes -= 1
        for each in self.followers:
            each.ended(node)
        if parent.parent is None:
            self.let_go(parent)

    def let_go(self, node: Node) -> None:
        """Offer `node` to the followers if it is not in use; end the root of nothing."""
        if node.num_users:
            return
        if node.parent is not None:
            for each in self.followers:
                each.offer(node)
        elif not node.children:
            del self._roots[node.key]

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: Node, used: Iterable[Node] = ()) -> None:
        """Keep `node`, and what is above it, until `release`. used: the nodes that are used now."""
        for each in used:
            each.last_used = self._clock
        for at in node.upwards():
            at.num_users += 1
            if at.num_users > 1:
                return
            for follower in self.followers:
                follower.locked(at)

    def release(self, node: Node) -> None:
        """Release one lock on `node`."""
        self._clock += 1
        node.last_used = self._clock
        for at in node.upwards():
            at.num_users -= 1
            if at.num_users:
                return
            for each in self.followers:
                each.released(at)
        self.let_go(at)  # the root

    # -- audit -------------------------------------------------------------------------------------

    def audit(self, locked: Iterable[Node]) -> None:
        """Recompute every invariant, given the node of each lock; AssertionError if one fails."""
        users = Counter(locked)
        nodes = [*self._roots.values(), *self.nodes()]
        assert set(users) <= set(nodes), "a lock ends outside the tree"
        for node in nodes:
            num_users = users[node] + sum(1 for each in node.children.values() if each.num_users)
            assert node.num_users == num_users, "a user count is wrong"
            for first, child in node.children.items():
                assert child.parent is node and first == self._first_page(child.key, 0)
            if node.parent is None:
                assert self._roots.get(node.key) is node and not node.num_pages
                assert num_users or node.children, "the root of an empty namespace is left"
            else:
                assert node.num_pages and len(node.key) >= node.num_pages * self.page_bytes
        assert len(nodes) - len(self._roots) == self.num_nodes
