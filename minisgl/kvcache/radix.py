"""The radix prefix cache: a tree of page runs keyed by their tokens (Zheng et al., SGLang, 2024).

A node is in use while a lease ends at it or at a descendant; only leaves that are not in use are
evicted, least recently used first. Users and evictable pages are counted incrementally, so matching
costs O(prompt) and eviction O(evicted pages · log leaves), independent of the size of the tree.

Each namespace has a tree with its own root, which exists while there are pages or leases below it:
a namespace without cached pages takes no memory. Eviction ignores namespaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from minisgl.kvcache.prefix import TOKEN_BYTES, Match, Node

# (last_used, order of insertion, leaf). An entry is stale, and skipped, if its leaf has changed.
_HeapEntry = tuple[int, int, Node]


class RadixCache:
    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}  # by namespace, which is also the key of the root
        self._num_evictable = 0
        self._num_nodes = 0
        self._clock = 0
        self._leaves: list[_HeapEntry] = []
        self._num_offers = 0

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    # -- finding -----------------------------------------------------------------------------------

    def match_pages(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        root = self._roots.get(namespace)
        if root is None:
            return 0
        node, found = root, 0
        while found < max_pages:
            child = self._child(node, key, found)
            if child is None:
                break
            common = self._common_pages(child, key, found, max_pages)
            found += common
            if common < len(child.pages):
                break
            node = child
        return found

    def acquire(self, key: bytes, max_pages: int, namespace: bytes = b"") -> Match:
        self._clock += 1
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(key=namespace, pages=[], parent=None)
        node, pages = root, list[int]()
        while len(pages) < max_pages:
            child = self._child(node, key, len(pages))
            if child is None:
                break
            common = self._common_pages(child, key, len(pages), max_pages)
            node = child if common == len(child.pages) else self._split(child, common)
            node.last_used = self._clock
            pages += node.pages
        self._lock(node)
        return Match(node, pages)

    def _child(self, node: Node, key: bytes, start: int) -> Node | None:
        return node.children.get(self._first_page(key, start))

    def _first_page(self, key: bytes, start: int) -> bytes:
        return key[start * self._page_bytes : (start + 1) * self._page_bytes]

    def _common_pages(self, node: Node, key: bytes, start: int, end: int) -> int:
        """Number of equal pages of `node` and pages `start` .. `end` - 1 of `key`, at least one."""
        size = self._page_bytes
        low, high = 1, min(len(node.pages), end - start)
        if key.startswith(node.key[: high * size], start * size):
            return high
        while high - low > 1:  # pages below low are equal, those below high are not
            middle = (low + high) // 2
            if key.startswith(node.key[low * size : middle * size], (start + low) * size):
                low = middle
            else:
                high = middle
        return low

    # -- adding ------------------------------------------------------------------------------------

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        if self._child(node, key, start) is not None:
            return None
        added = self._add(node, key, start, pages)
        self._lock(added)
        self.release(node)
        return added

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        at, end = start, start + len(pages)
        while at < end:
            child = self._child(node, key, at)
            if child is None:
                self._let_go(self._add(node, key, at, pages[at - start :]))
                break
            common = self._common_pages(child, key, at, end)
            node = child if common == len(child.pages) else self._split(child, common)
            at += common
        return list(pages[: at - start])

    def _add(self, parent: Node, key: bytes, start: int, pages: Sequence[int]) -> Node:
        run = key[start * self._page_bytes : (start + len(pages)) * self._page_bytes]
        node = Node(key=run, pages=list(pages), parent=parent, last_used=self._clock)
        parent.children[self._first_page(run, 0)] = node
        self._num_nodes += 1
        self._num_evictable += len(pages)
        return node

    def _split(self, node: Node, num_pages: int) -> Node:
        """Move the first pages of `node` into a new parent, and return the parent.

        `node` keeps the rest of the run, so that leases that end at it remain valid.
        """
        assert node.parent is not None
        cut = num_pages * self._page_bytes
        upper = Node(
            key=node.key[:cut],
            pages=node.pages[:num_pages],
            parent=node.parent,
            num_users=1 if node.num_users else 0,
            last_used=node.last_used,
        )
        node.parent.children[self._first_page(upper.key, 0)] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[num_pages:], upper
        upper.children[self._first_page(node.key, 0)] = node
        self._num_nodes += 1
        return upper

    # -- locks -------------------------------------------------------------------------------------

    def _lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.num_users += 1
            if at.num_users > 1:
                return
            self._num_evictable -= len(at.pages)
            at = at.parent

    def release(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock
        at: Node | None = node
        while at is not None:
            at.num_users -= 1
            if at.num_users:
                return
            self._num_evictable += len(at.pages)
            self._let_go(at)
            at = at.parent

    # -- eviction ----------------------------------------------------------------------------------

    def _let_go(self, node: Node) -> None:
        """Make `node` evictable if it is a leaf without users; drop it if it is a root."""
        if node.num_users or node.children:
            return
        if node.parent is None:
            del self._roots[node.key]
            return
        self._num_offers += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_offers, node))
        if len(self._leaves) > 64 + 2 * self._num_nodes:  # amortized: most are stale
            fresh = {entry[2]: entry for entry in self._leaves if self._is_fresh(entry)}
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)

    @staticmethod
    def _is_fresh(entry: _HeapEntry) -> bool:
        last_used, _, node = entry
        return not (
            node.num_users
            or node.children
            or node.parent is None  # removed from the tree
            or node.last_used != last_used
        )

    def evict(self, num_pages: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < num_pages:
            entry = heapq.heappop(self._leaves)
            if not self._is_fresh(entry):
                continue
            node, wanted = entry[2], num_pages - len(evicted)
            if len(node.pages) > wanted:  # evicting the tail is enough
                evicted += node.pages[-wanted:]
                del node.pages[-wanted:]
                heapq.heappush(self._leaves, entry)
            else:
                evicted += node.pages
                self._remove(node)
        self._num_evictable -= len(evicted)
        return evicted

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[self._first_page(node.key, 0)]
        node.parent = None
        self._num_nodes -= 1
        self._let_go(parent)

    def drop_written_since(self, step: int, written_by: Sequence[int]) -> list[int]:
        dropped: list[int] = []
        for node in reversed(list(self._nodes())):  # children first
            late = [page for page in node.pages if written_by[page] >= step]
            if not late:
                continue
            assert not node.num_users and not node.children, "a dropped page is still in use"
            # Pages of a run are written in order, so those written late are its tail.
            del node.pages[len(node.pages) - len(late) :]
            dropped += late
            if not node.pages:
                self._remove(node)
        self._num_evictable -= len(dropped)
        return dropped

    # -- looking at it -----------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def pages(self) -> list[int]:
        return [page for node in self._nodes() for page in node.pages]

    def check(self, locked: Sequence[Node]) -> None:
        users: dict[Node, int] = {}
        for node in locked:
            users[node] = users.get(node, 0) + 1
        nodes = [*self._roots.values(), *self._nodes()]
        assert set(users) <= set(nodes), "a lease ends outside the tree"
        evictable = 0
        offered = {entry[2] for entry in self._leaves if self._is_fresh(entry)}
        for node in reversed(nodes):
            num_users = users.get(node, 0) + sum(
                1 for child in node.children.values() if child.num_users
            )
            assert node.num_users == num_users, "a user count is wrong"
            for first, child in node.children.items():
                assert child.parent is node and first == self._first_page(child.key, 0)
            if node.parent is None:
                assert self._roots.get(node.key) is node and not node.pages
                assert num_users or node.children, "the root of an empty namespace is left"
                continue
            assert node.pages and len(node.key) >= len(node.pages) * self._page_bytes
            if not num_users:
                evictable += len(node.pages)
                assert node.children or node in offered, "a leaf cannot be evicted"
        assert evictable == self._num_evictable, "the number of evictable pages is wrong"
        assert len(nodes) - len(self._roots) == self._num_nodes
