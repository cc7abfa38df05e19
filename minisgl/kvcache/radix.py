"""The radix prefix cache: a tree of page runs keyed by their tokens (Zheng et al., SGLang, 2024).

A node is in use while a lease ends at it or at a descendant; only leaves that are not in use are
evicted, least recently used first. Users and evictable pages are counted incrementally, so matching
costs O(prompt) and eviction O(evicted pages · log leaves), independent of the size of the tree.

Each namespace has a tree with its own root, which exists while there are pages or leases below it:
a namespace without cached pages takes no memory. Eviction ignores namespaces.

With a host tier, evicted pages are copied to host memory, and their nodes stay in the tree below
those with pages on the device. A node that is loaded again keeps its host pages until others need
them, so that evicting it once more copies nothing. Each tier has its own leaves and evicts its own.
Nodes that will be evicted soon may be copied ahead (`copy_ahead`), children before parents.

With a disk, host memory keeps some pages free (`make_spare`): what it evicts for that goes to disk.
What must make way at once is dropped.

With snapshots (`Snapshots`), a match ends with the deepest node that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from minisgl.kvcache.disk import DiskTier
from minisgl.kvcache.host import HostPool
from minisgl.kvcache.leaves import LeafQueue
from minisgl.kvcache.prefix import TOKEN_BYTES, Match, Node
from minisgl.kvcache.snapshots import Snapshots


class RadixCache:
    def __init__(
        self,
        page_size: int,
        host: HostPool,
        disk: DiskTier | None = None,
        snapshots: Snapshots | None = None,
        *,
        keeps: bool = True,
        looks_ahead: bool = False,
    ) -> None:
        """disk: behind host memory, without which there is none. snapshots: without which a prefix
        is of no use; None: it needs none. keeps: otherwise it takes no page, and every request
        computes its whole prompt. looks_ahead: what a page has of its last token depends on the
        next one, which its key does not have; so a match without snapshots ends a page earlier."""
        assert snapshots is None or not host.num_pages, "host memory keeps no snapshots"
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._keeps = keeps
        self._host = host
        self._disk = disk
        self._snapshots = snapshots
        self._spared = int(looks_ahead and snapshots is None)  # pages at the end of a match
        self._roots: dict[bytes, Node] = {}  # by namespace, which is also the key of the root
        self._num_evictable = 0
        self._num_ahead = 0  # of these, pages of nodes that are ahead
        self._num_nodes = 0
        self._clock = 0
        self._leaves = LeafQueue(_is_device_leaf)
        self._host_leaves = LeafQueue(_is_host_leaf)
        self._bare = LeafQueue(_is_bare_leaf)  # whom to copy ahead

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can return."""
        return self._num_evictable

    # -- finding -----------------------------------------------------------------------------------

    def max_match(self, num_tokens: int) -> int:
        """Number of pages of the longest prefix that leaves at least one token to compute."""
        return (num_tokens - 1) // self._page_size

    def match_pages(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        """Number of pages of `key` that `acquire` would find, at most `max_pages`. Changes nothing.
        O(key)."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        useful = found = 0
        for node, common in self._matches(root, key, 0, max_pages):
            found += common
            if self._snapshots is None or (node.snapshot is not None and common == node.num_pages):
                useful = found
        return max(0, useful - self._spared)

    def find(self, key: bytes, max_pages: int, namespace: bytes = b"") -> list[int]:
        """The pages of `key`, at most `max_pages`, that are on the device. Changes nothing."""
        root, pages = self._roots.get(namespace), list[int]()
        if root is not None:
            for node, common in self._matches(root, key, 0, max_pages):
                pages += node.pages[:common]
        return pages

    def acquire(self, key: bytes, max_pages: int, namespace: bytes = b"") -> Match:
        """Lock the longest cached prefix of `key`, at most `max_pages` pages. O(key).

        Its end in host memory is left out where computing it is faster than loading it.
        """
        self._clock += 1
        root = self._root(namespace)
        if self._spared:
            max_pages = self.match_pages(key, max_pages, namespace)
        path = [*self._walk(root, key, 0, max_pages)]
        num_found = sum(each.num_pages for each in path)
        if self._snapshots is not None:
            while path and path[-1].snapshot is None:
                path.pop()
            if path:
                self._snapshots.use(path[-1])
        on_device = [*takewhile(lambda each: each.pages, path)]
        num_host = sum(each.num_pages for each in path[len(on_device) :])
        if num_host and not self._host.rule.pays(num_host):
            path, num_host = on_device, 0
        for each in path:
            each.last_used = self._clock
        node = path[-1] if path else root
        self._lock(node)
        pages = [page for each in on_device for page in each.pages]
        return Match(node, pages, num_host, num_found)

    def place_snapshot(self, lease_node: Node, key: bytes, num_pages: int, snapshot: int) -> bool:
        """Give the node that ends with the first `num_pages` pages of `key` a snapshot; False if
        the tree does not have them all. lease_node: any node of the tree of its namespace."""
        assert self._snapshots is not None
        *_, root = lease_node.upwards()
        path = [*self._walk(root, key, 0, num_pages)]
        if sum(each.num_pages for each in path) < num_pages:
            return False
        self._snapshots.put(path[-1], snapshot)
        return True

    def _root(self, namespace: bytes) -> Node:
        """The root of a namespace, made if there is none; `_let_go` ends it."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(key=namespace, pages=[], parent=None)
        return root

    def _walk(self, node: Node, key: bytes, start: int, end: int) -> Iterator[Node]:
        """The nodes below `node` with the pages `start` .. `end` - 1 of `key`, from the top. Splits
        the last one where `key` leaves it."""
        for child, common in self._matches(node, key, start, end):
            yield child if common == child.num_pages else self._split(child, common)

    def _matches(self, node: Node, key: bytes, start: int, end: int) -> Iterator[tuple[Node, int]]:
        """The same nodes as they are, and how many pages of each match."""
        is_whole = True
        while is_whole and start < end and (child := self._child(node, key, start)) is not None:
            common = self._common_pages(child, key, start, end)
            is_whole = common == child.num_pages
            yield child, common
            node, start = child, start + common

    def _child(self, node: Node, key: bytes, start: int) -> Node | None:
        return node.children.get(self._first_page(key, start))

    def _first_page(self, key: bytes, start: int) -> bytes:
        return key[start * self._page_bytes : (start + 1) * self._page_bytes]

    def _common_pages(self, node: Node, key: bytes, start: int, end: int) -> int:
        """Number of equal pages of `node` and pages `start` .. `end` - 1 of `key`, at least one."""
        size = self._page_bytes
        low, high = 1, min(node.num_pages, end - start)
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
        """Take the pages `start`, `start + 1`, ... of `key`, following the locked `node`.

        `node` must end where `start` begins; its lock moves to the returned node. Returns None
        without a change if the cache already has device pages with the same tokens. O(pages).
        """
        child = self._child(node, key, start)
        if not self._keeps or (child is not None and child.pages):
            return None
        added, _ = self._put(node, key, start, pages)
        self._lock(added)
        self.release(node)
        return added

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        """Take the pages that the cache does not have on the device, and return the others.

        `node` must end where `start` begins; its lock stays where it is. O(pages).
        """
        if not self._keeps:
            return list(pages)
        last, refused = self._put(node, key, start, pages)
        self._let_go(last)
        return refused

    def _put(
        self, node: Node, key: bytes, start: int, pages: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Add pages below `node`, where the device has none; returns the last node and the others.

        Nodes that are in host memory only get theirs back.
        """
        last, num_put, refused = node, 0, list[int]()
        for last in self._walk(node, key, start, start + len(pages)):
            run = pages[num_put : num_put + last.num_pages]
            if last.pages:
                refused += run
            else:
                self._give(last, run)
                self._let_go(last)
            num_put += len(run)
        if num_put < len(pages):
            last = self._add(last, key, start + num_put, start + len(pages))
            self._give(last, pages[num_put:])
        return last, refused

    def _add(self, parent: Node, key: bytes, start: int, end: int) -> Node:
        """Add a node for the pages `start` .. `end` - 1 of `key`, which it is to get."""
        run = key[start * self._page_bytes : end * self._page_bytes]
        node = Node(key=run, pages=[], parent=parent, last_used=self._clock)
        parent.children[self._first_page(run, 0)] = node
        self._num_nodes += 1
        return node

    def _give(self, node: Node, pages: Sequence[int]) -> None:
        """Make `node` resident on the device."""
        assert node.parent is not None
        self._place_at(node, list(pages), node.host_pages)
        if not node.num_users:
            self._num_evictable += len(pages)

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
            num_resident=1 if node.pages else 0,
            host_pages=node.host_pages[:num_pages],
            num_bare=1 if node.is_bare else 0,
            is_ahead=node.is_ahead,
            load=node.load,
        )
        node.parent.children[self._first_page(upper.key, 0)] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[num_pages:], upper
        node.host_pages = node.host_pages[num_pages:]
        upper.children[self._first_page(node.key, 0)] = node
        self._num_nodes += 1
        self._let_go(upper)
        return upper

    # -- loads -------------------------------------------------------------------------------------

    def fill(self, node: Node, pages: Sequence[int], load: int) -> list[int]:
        """Give device pages to the end of a match, the locked `node`, for a load to fill them.

        Returns the host pages to load from. The load locks `node`, too, until `filled(node)`.
        """
        path = takewhile(lambda each: each.parent is not None and not each.pages, node.upwards())
        host_pages: list[int] = []
        for each in reversed([*path]):
            start = len(host_pages)
            host_pages += each.host_pages
            self._give(each, pages[start : len(host_pages)])
            each.load = load
        self._lock(node)
        return host_pages

    def filled(self, node: Node) -> None:
        """Mark the end of the load that `fill` began."""
        load = node.load
        for each in takewhile(lambda each: each.load == load, node.upwards()):
            each.load = 0
        self.release(node)

    # -- locks -------------------------------------------------------------------------------------

    def _lock(self, node: Node) -> None:
        for at in node.upwards():
            at.num_users += 1
            if at.num_users > 1:
                return
            self._num_evictable -= len(at.pages)
            if at.is_ahead:
                self._set_ahead(at, False)

    def release(self, node: Node) -> None:
        """Release one lock on `node`."""
        self._clock += 1
        node.last_used = self._clock
        for at in node.upwards():
            at.num_users -= 1
            if at.num_users:
                return
            self._num_evictable += len(at.pages)
            self._let_go(at)

    # -- eviction ----------------------------------------------------------------------------------

    def _let_go(self, node: Node) -> None:
        """Offer `node` to the tiers that may evict it; drop it if it is the root of nothing."""
        if node.num_users:
            return
        if node.parent is None:
            if not node.children:
                del self._roots[node.key]
            return
        if _is_device_leaf(node):
            self._leaves.offer(node, self._num_nodes)
        if not self._host.num_pages:
            return
        if _is_host_leaf(node):
            self._host_leaves.offer(node, self._num_nodes)
        if _is_bare_leaf(node):
            self._bare.offer(node, self._num_nodes)

    def evict(self, num_pages: int, max_offloads: int | None = None) -> list[int]:
        """Take at least `num_pages` pages off the device, least recently used first.

        Returns them; those that host memory has room for are copied there by the next plan, unless
        it has copies. The caller must have checked `num_evictable`. With `max_offloads` they are
        fewer once the next plan offloads so many pages, those of earlier calls included.
        """
        evicted: list[int] = []
        while len(evicted) < num_pages:
            node = self._leaves.pop()
            assert node is not None, "the caller has checked that there are enough"
            wanted = num_pages - len(evicted)
            if self._host.num_pages:
                at_most = max(wanted, self._host.piece)
                if max_offloads is not None and node.is_bare:
                    at_most = min(at_most, max_offloads - self._host.num_planned)
                    if at_most <= 0:
                        self._let_go(node)
                        break
                evicted += self._demote(node, at_most)
            elif len(node.pages) > wanted:  # evicting the tail is enough
                evicted += node.pages[-wanted:]
                del node.pages[-wanted:]
                self._drop_snapshot(node)  # of an end that it has no more
                self._leaves.offer(node, self._num_nodes)
            else:
                evicted += node.pages
                self._remove(node)
        self._num_evictable -= len(evicted)
        return evicted

    def _demote(self, node: Node, at_most: int) -> list[int]:
        """Take pages at the end of `node` off the device, and return them.

        They stay in host memory, if there is room for them.
        """
        self._cut(node, at_most)
        pages = node.pages
        if node.is_bare:
            if not self.make_room(len(pages)):
                self._forget(node)
                return pages
            self._place_at(node, pages, self._host.offload(pages))
        self._leave_device(node)
        return pages

    def _leave_device(self, node: Node) -> None:
        """Take a node off the device that stays in host memory."""
        self._place_at(node, [], node.host_pages)
        self._let_go(node)

    def _place_at(self, node: Node, pages: list[int], host_pages: list[int]) -> None:
        """Note where the pages of `node` are; its parent may lose its own if it has none left."""
        parent = node.parent
        assert parent is not None
        was_resident, was_bare = bool(node.pages), node.is_bare
        if not (pages and host_pages):
            self._set_ahead(node, False)
        node.pages, node.host_pages = pages, host_pages
        parent.num_resident += bool(pages) - was_resident
        parent.num_bare += node.is_bare - was_bare
        if was_resident > bool(pages) or was_bare > node.is_bare:
            self._let_go(parent)

    def _set_ahead(self, node: Node, is_ahead: bool) -> None:
        self._num_ahead += (is_ahead - node.is_ahead) * len(node.pages)
        node.is_ahead = is_ahead

    def copy_ahead(self, num_pages: int, max_offloads: int) -> None:
        """Let the next plan copy pages to host memory that `evict` would return next, until there
        are `num_pages` that were copied ahead of their eviction. They stay on the device.

        max_offloads: the most pages that the next plan offloads, those of earlier calls included.
        """
        host = self._host
        while self._num_ahead < num_pages:
            room = max_offloads - host.num_planned
            node = self._bare.pop() if room > 0 else None
            if node is None:
                return
            self._cut(node, min(room, max(num_pages - self._num_ahead, host.piece)))
            if not self._make_room_ahead(len(node.pages)):
                self._let_go(node)
                return
            self._place_at(node, node.pages, host.offload(node.pages))
            self._set_ahead(node, True)
            self._let_go(node)

    def _make_room_ahead(self, num_pages: int) -> bool:
        """As `make_room`, but drops neither copies that the device is to evict sooner than what
        they would make room for, nor what the disk can have: `make_spare` writes that."""
        if self._disk is not None:
            return self._host.num_free >= num_pages
        return self.make_room(num_pages, lambda node: not node.pages)

    def _cut(self, node: Node, at_most: int) -> None:
        """Split `node` so that it has at most `at_most` pages."""
        if node.num_pages > at_most:
            self._split(node, node.num_pages - at_most)

    def make_room(
        self, num_pages: int, may_drop: Callable[[Node], bool] = lambda node: True
    ) -> bool:
        """Free host pages, least recently used first, up to a node that `may_drop` keeps; False if
        there are too few."""
        host = self._host
        if num_pages > host.num_pages:
            return False
        while host.num_free < num_pages:
            node = self._host_leaves.pop()
            if node is None:
                return False
            if not may_drop(node):
                self._let_go(node)
                return False
            self._cut(node, max(num_pages - host.num_free, host.piece))
            self._leave_host(node)
        return True

    def make_spare(self, num_pages: int) -> None:
        """Send host pages to disk, least recently used first, until that many are free or will be.

        A page that is on the device, too, loses its host copy unwritten, unless it was copied
        ahead.
        """
        host, disk = self._host, self._disk
        assert disk is not None
        while host.num_free + host.num_leaving < num_pages:
            node = self._host_leaves.pop()
            if node is None:
                return
            if node.is_ahead:
                self._let_go(node)  # until the device has evicted it
                return
            self._cut(node, host.piece)
            if not node.pages and not self._write(node, disk):
                self._let_go(node)  # until its offload is settled
                return
            self._leave_host(node)

    def store_all(self) -> None:
        """Send all host pages to disk, where they stay in memory, too: the latest used first."""
        assert self._disk is not None
        for node in sorted(self.nodes(), key=lambda node: -node.last_used):  # parents first
            if node.host_pages:
                self._write(node, self._disk)

    def _write(self, node: Node, disk: DiskTier) -> bool:
        """Write the host pages of `node` to disk that are not there; False if it is too early."""
        if not self._host.are_settled(node.host_pages):
            return False
        disk.write(*self._place(node), node.host_pages)
        return True

    def _place(self, node: Node) -> tuple[bytes, bytes, int]:
        """The namespace of a node, the tokens up to its end, and the index of its first page."""
        *path, root = node.upwards()
        size = self._page_bytes
        tokens = b"".join(each.key[: each.num_pages * size] for each in reversed(path))
        return root.key, tokens, len(tokens) // size - node.num_pages

    def _leave_host(self, node: Node) -> None:
        """Take a node out of host memory."""
        self._host.free(node.host_pages)
        self._place_at(node, node.pages, [])
        if node.pages:
            self._let_go(node)
        else:
            self._remove(node)

    def put_host(
        self, namespace: bytes, key: bytes, start: int, host_pages: Sequence[int], num_pages: int
    ) -> None:
        """Take the first `num_pages` of `host_pages`, with the tokens of `key` from page `start`
        on, and free the others.

        Those that the tree has in any tier are not taken, and none if it lacks what is before them.
        """
        if not num_pages:
            self._host.free(host_pages)
            return
        self._clock += 1
        root = last = self._root(namespace)
        at, end = 0, start + num_pages
        for last in self._walk(root, key, 0, end):
            at += last.num_pages
        num_refused = num_pages
        if start <= at < end:
            last = self._add(last, key, at, end)
            num_refused = at - start
            last.host_pages = list(host_pages[num_refused:num_pages])
        self._let_go(last)
        self._host.free([*host_pages[num_pages:], *host_pages[:num_refused]])

    def _forget(self, node: Node) -> None:
        """Remove a node and those below it, which have no pages on the device."""
        doomed = [node]
        for each in doomed:  # it grows meanwhile
            doomed += each.children.values()
        for each in reversed(doomed):
            if each.host_pages:
                self._host.free(each.host_pages)
            self._remove(each)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self._drop_snapshot(node)
        self._place_at(node, [], [])
        del parent.children[self._first_page(node.key, 0)]
        node.parent = None
        self._num_nodes -= 1
        self._let_go(parent)

    def _drop_snapshot(self, node: Node) -> None:
        if self._snapshots is not None:
            self._snapshots.drop(node)

    def drop_written_since(self, step: int, written_by: Sequence[int]) -> list[int]:
        """Drop every device page whose entry in `written_by` is at least `step`, and every host
        page that such a step's plan wrote. None may be locked. Returns the device pages."""
        dropped: list[int] = []
        for node in reversed(list(self.nodes())):  # children first
            late = [page for page in node.pages if written_by[page] >= step]
            copied_late = any(self._host.written_by[page] >= step for page in node.host_pages)
            if copied_late:
                assert not node.load, "a dropped page is loaded from"
                self._host.free(node.host_pages)
                self._place_at(node, node.pages, [])
                self._let_go(node)
            if late:
                assert not node.num_users and not node.num_resident, "a dropped page is still used"
                dropped += late
                # Pages of a run are written in order, so those written late are its tail.
                self._cut(node, len(late))
                if node.host_pages:
                    self._leave_device(node)
                    continue
            if late or not node.num_pages:
                self._forget(node)
        self._num_evictable -= len(dropped)
        return dropped

    # -- looking at it -----------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def pages(self) -> list[int]:
        """Every device page in the cache. O(cache)."""
        return [page for node in self.nodes() for page in node.pages]

    def host_pages(self) -> list[int]:
        """Every host page in the cache. O(cache)."""
        return [page for node in self.nodes() for page in node.host_pages]

    def check(self, locked: Sequence[Node]) -> None:
        """Recompute every invariant, given the node of each lock; AssertionError if one fails."""
        users: dict[Node, int] = {}
        for node in locked:
            users[node] = users.get(node, 0) + 1
        nodes = [*self._roots.values(), *self.nodes()]
        assert set(users) <= set(nodes), "a lease ends outside the tree"
        evictable = ahead = 0
        offered, host_offered = self._leaves.nodes(), self._host_leaves.nodes()
        bare_offered = self._bare.nodes()
        for node in reversed(nodes):
            num_users = users.get(node, 0) + sum(
                1 for child in node.children.values() if child.num_users
            )
            assert node.num_users == num_users, "a user count is wrong"
            for first, child in node.children.items():
                assert child.parent is node and first == self._first_page(child.key, 0)
            if node.parent is None:
                assert self._roots.get(node.key) is node and not node.num_pages
                assert num_users or node.children, "the root of an empty namespace is left"
                continue
            assert node.num_pages and len(node.key) >= node.num_pages * self._page_bytes
            assert not (node.pages and node.host_pages) or len(node.pages) == len(node.host_pages)
            assert not node.load or (node.num_users and node.host_pages), "a load has no lock"
            resident = sum(1 for child in node.children.values() if child.pages)
            assert node.num_resident == resident and (node.pages or not resident)
            bare = sum(1 for child in node.children.values() if child.is_bare)
            assert node.num_bare == bare, "the number of children without copies is wrong"
            if node.is_ahead:
                ahead += len(node.pages)
                assert node.pages and node.host_pages and not num_users, "it was copied in vain"
            if not num_users:
                evictable += len(node.pages)
                assert not _is_device_leaf(node) or node in offered, "a leaf cannot be evicted"
                assert not _is_host_leaf(node) or node in host_offered, "host pages are stuck"
                if self._host.num_pages and _is_bare_leaf(node):
                    assert node in bare_offered, "a leaf cannot be copied ahead"
        assert evictable == self._num_evictable, "the number of evictable pages is wrong"
        assert ahead == self._num_ahead, "the number of pages copied ahead is wrong"
        assert len(nodes) - len(self._roots) == self._num_nodes


def _is_device_leaf(node: Node) -> bool:
    """Whether the device may evict the pages of `node`."""
    in_tree = node.parent is not None
    return in_tree and not node.num_users and bool(node.pages) and not node.num_resident


def _is_bare_leaf(node: Node) -> bool:
    """Whether `node` may be copied ahead: its children on the device, which go before it, have
    copies."""
    return node.parent is not None and not node.num_users and node.is_bare and not node.num_bare


def _is_host_leaf(node: Node) -> bool:
    """Whether host memory may drop its pages of `node`: nothing hangs on them."""
    in_tree = node.parent is not None
    if not in_tree or node.num_users or not node.host_pages:
        return False
    return bool(node.pages) or not node.children
