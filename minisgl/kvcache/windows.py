"""The pages of layers with a sliding window, which are given up once no later query can see them.

These layers have pages of their own, beside the full pages of the other layers and for the same
tokens. A lease has those of the tokens that its next query sees, and of the chunk that is planned.
The cache may keep the others beside its own full pages. Where pages run out, it gives up those used
least recently, and keeps the full ones; a request can go on behind a prefix only where all pages
that its window reaches back to are left.

In another memory, pages are beside those of full layers there, and only those that a prefix needs:
behind whose end a request begins or has ended.

A page belongs to the free list, or to any number of leases and at most once to the cache. It is
shared once all of it is written. Launch order is the fence, as for full pages: one that is given up
may be written by the next step.

Every lease has a claim: the number of pages that it may need at once. Beside all claims, `spare`
pages are left for the chunks of prompts, which give up what is behind them when they are launched.
So a lease never lacks a page within its claim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from minisgl.config import WindowSizes
from minisgl.kvcache.lease import Beside, Lease, WindowPages, last_end
from minisgl.kvcache.numbered_group import NumberedGroup
from minisgl.kvcache.page_pool import SCRATCH_PAGE, PagePool
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Found, Node


class Windows(NumberedGroup):
    """The pages 1 .. num_pages - 1 of windowed layers, as a `PageGroup`."""

    def __init__(self, num_pages: int, sizes: WindowSizes, cache: RadixCache) -> None:
        """cache: of full pages."""
        super().__init__(num_pages, cache, sizes.pages_each)
        self.sizes = sizes
        cache.pool.on_free = self.forget
        self._pool = PagePool(num_pages, first=SCRATCH_PAGE + 1)
        self._num_usable = num_pages - 1
        self._num_leases = [0] * num_pages  # that have a page
        # Of the cache: the page beside each full page, least recently used first; and these pages.
        self._beside: OrderedDict[int, int] = OrderedDict()
        self._cached: set[int] = set()
        self._needless: set[int] = set()  # full pages beside which no end needs what there is
        self._num_claimed = 0
        self._num_extra = 0
        self._ends: set[Node] = set()  # with which prefixes end that requests may go on behind

    def first_needed(self, num_pages: int) -> int:
        return self.sizes.first_seen(num_pages)

    def ended(self, node: Node) -> None:
        self._ends.discard(node)

    def usable(self, found: Found, num_pages: int, *, may_load: bool) -> int:
        """A request can go on behind a page if all are left that its window reaches back to."""
        starts = [0, *accumulate(common for _, common in found)]

        def has(page: int) -> bool:
            place = bisect_right(starts, page) - 1
            node, at = found[place][0], page - starts[place]
            return self._is_here(node, at) or (may_load and bool(self._in_host(node, at)))

        return last_end(num_pages, self.first_needed, has)

    def _is_here(self, node: Node, at: int) -> bool:
        """Whether the device has the page beside page `at` of a node."""
        pages = self._cache.pages.get(node)
        return pages is not None and pages[at] in self._beside

    def on_device(self, node: Node) -> Beside:
        """The pages that a request sees behind the next end of a prefix."""
        depth = end = sum(each.num_pages for each in node.upwards())
        last = node
        while last not in self._ends and len(last.children) == 1 and self.first_needed(end) < depth:
            (last,) = last.children.values()
            end += last.num_pages
        first = max(0, self.first_needed(end) - (depth - node.num_pages))
        return {
            (at, index): number
            for at, full_page in enumerate(self._cache.pages[node][first:], first)
            if full_page in self._beside
            for index, number in zip(
                self.indices, self._parts(self._beside[full_page]), strict=True
            )
        }

    def on_device_for(self, node: Node, pages: Sequence[int]) -> Sequence[int]:
        found = filter(self._beside.__contains__, pages)
        return [number for page in found for number in self._parts(self._beside[page])]

    def to_load(self, node: Node) -> Sequence[int]:
        if self._host is None:
            return ()
        end = at = sum(each.num_pages for each in node.upwards())
        found: list[int] = []
        for each in node.upwards():
            at -= each.num_pages
            for place in reversed(range(max(0, self.first_needed(end) - at), each.num_pages)):
                if not self._is_here(each, place):
                    found += reversed(self._in_host(each, place))
        return found[::-1]

    def load(self, lease: Lease) -> Sequence[int]:
        held, columns = _held(lease), lease.pages[: lease.num_committed]
        held.first = self.first_needed(len(columns))
        columns = columns[held.first :]
        self._use([each for each in columns if each in self._beside], lease)
        missing = [each for each in columns if each not in self._beside]
        taken = self._take(len(missing))
        self._beside.update(zip(missing, taken, strict=True))
        self._cached.update(taken)
        held.pages = [self._beside[each] for each in columns]
        self._count_extra(held)
        return [number for page in taken for number in self._parts(page)]

    def give_up(self) -> bool:
        return False

    def open(self, lease: Lease, ends: Iterable[int]) -> None:
        found = {end - self._cache.num_spared for end in ends}
        held = WindowPages(self.first_needed(len(lease.pages)), [], found, prompt_end=max(found))
        lease.windows = held
        if not lease.must_load:  # otherwise `load` does this
            full_pages = lease.pages[held.first :]
            self._use(full_pages, lease)
            held.pages = [self._beside[each] for each in full_pages]
            self._count_extra(held)

    def _use(self, full_pages: Sequence[int], lease: Lease) -> None:
        """Keep the cached pages beside these for a lease."""
        for full_page in full_pages:
            self._beside.move_to_end(full_page)
            self._needless.discard(full_page)
            self._num_leases[self._beside[full_page]] += 1
            if self._loads is not None:
                self._loads.wait_for(self._parts(self._beside[full_page]), lease)

    def close(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        held = _held(lease)
        held.ends.add(num_pages - self._cache.num_spared)
        self._share(lease, key, num_pages, step)
        self._num_claimed -= held.claim
        held.claim = 0
        self._let_go(held, len(held.pages))

    def claim(self, lease: Lease, num_tokens: int) -> bool:
        """Claim the pages for a request of `num_tokens` tokens or more; False if there are too few.
        Any request may have its claim if it is the only one."""
        held = _held(lease)
        claim = self.sizes.num_needed(max(num_tokens, held.num_expected))
        others = self._num_claimed - held.claim
        if claim <= held.claim:
            return True
        if others and others + claim > self._num_usable - self.sizes.spare:
            return False
        if lease.must_load and others + claim + self._num_extra > self._num_usable:
            return False  # chunks of the same plan have what it needs at once
        self._num_claimed, held.claim = others + claim, claim
        self._count_extra(held)
        return True

    def room(self, held: WindowPages) -> int:
        """Number of tokens for which a lease has pages, or can take them for a chunk."""
        others = self._num_claimed + self._num_extra - held.claim - held.extra
        left = self._num_usable - others - len(held.pages)
        return (held.end + max(0, left)) * self.sizes.page_size

    def cover(self, held: WindowPages, num_columns: int) -> list[int]:
        """Take pages up to column `num_columns`; returns them."""
        count = num_columns - held.end
        if count <= 0:
            return []
        pages = self._take(count)
        held.pages += pages
        self._count_extra(held)
        return pages

    def _take(self, count: int) -> list[int]:
        """Take pages for one lease."""
        while self._pool.num_free < count:
            if not self._demote():
                self._evict()
        pages = self._pool.take(count)
        for page in pages:
            self._num_leases[page] = 1
        return pages

    def trim(self, held: WindowPages, num_columns: int) -> None:
        """Give up what no query sees that follows the launched ones. num_columns: up to which they
        have pages, or will have them with the next step."""
        first = self.sizes.first_seen(num_columns - self.sizes.num_behind)
        self._let_go(held, max(0, min(first - held.first, len(held.pages))))

    def commit(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Share the pages of a lease, whose last one a launched chunk ends in, and give up what is
        behind the window."""
        self._share(lease, key, num_pages, step)
        held = _held(lease)
        self.trim(held, held.end)

    def _share(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Let the cache keep the pages of a lease beside its own full pages with the same tokens.
        They are written by steps up to `step`. Those that no prefix needs go first."""
        held, cache = _held(lease), self._cache
        found = cache.tree.along(lease.node, key, num_pages)
        full_pages = [page for node, common in found for page in cache.pages.get(node, ())[:common]]
        pages = zip(full_pages[held.first :], held.pages, strict=False)
        for column, (full_page, page) in enumerate(pages, held.first):
            if full_page not in self._beside and page not in self._cached:
                self._beside[full_page] = page
                self._cached.add(page)
                self._cache.pool.mark_written(self._parts(page), step)
            if full_page in self._beside:
                ends = (end for end in {*held.ends, num_pages} if end > column)
                is_needed = self.first_needed(min(ends)) <= column
                self._beside.move_to_end(full_page, last=is_needed)
                (self._needless.discard if is_needed else self._needless.add)(full_page)
        if self._host is not None:
            self._mark_ends(lease, key, num_pages)

    def _mark_ends(self, lease: Lease, key: bytes, num_pages: int) -> None:
        """Have prefixes end with the prompt and with the answer of a lease. Those in the middle of
        the prompt end no more, unless another one goes on there."""
        held, tree = _held(lease), self._cache.tree
        for end in sorted(held.ends):
            if max(held.num_marked + 1, held.prompt_end) <= end <= num_pages:
                held.num_marked = end
                path = tree.path(tree.along(lease.node, key, end), end)
                if sum(node.num_pages for node in path) == end:
                    self._ends.add(path.pop())
                    if end == held.prompt_end:
                        self._ends.difference_update(path)

    def forget(self, full_pages: Iterable[int]) -> None:
        """Note that these pages of full layers are no longer in the cache."""
        for full_page in full_pages:
            page = self._beside.pop(full_page, None)
            self._needless.discard(full_page)
            if page is not None:
                self._leave_cache(page)

    def drop_written_since(self, step: int) -> None:
        """Drop the cached pages that failed steps wrote."""
        beside = self._beside.items()
        self.forget([full for full, page in beside if self._written(page) >= step])

    def _demote(self) -> bool:
        """Let the device evict a prefix, where it would lose pages that one needs before host
        memory has them; False if there is nothing to gain."""
        num_evictable = self._cache.num_evictable
        if self._host is None or not num_evictable or next(iter(self._beside)) in self._needless:
            return False
        self._host.evict(1, self._host.offloads_per_plan)
        return self._cache.num_evictable < num_evictable

    def _evict(self) -> None:
        """Take the least recently used page from the cache. One that a lease has counts as used."""
        full_page, page = self._beside.popitem(last=False)
        if self._num_leases[page]:
            self._beside[full_page] = page
        else:
            self._needless.discard(full_page)
            if self._loads is not None:  # the next plan awaits one that nobody wants any more
                for load_id in self._loads.of(self._parts(page)):
                    self._loads.landed(load_id)
            self._leave_cache(page)

    def _leave_cache(self, page: int) -> None:
        self._cached.remove(page)
        if not self._num_leases[page]:
            self._pool.free([page])

    def _let_go(self, held: WindowPages, count: int) -> None:
        """Take the first `count` pages from a lease."""
        for page in held.pages[:count]:
            self._num_leases[page] -= 1
            if not self._num_leases[page] and page not in self._cached:
                self._pool.free([page])
        held.first += count
        del held.pages[:count]
        self._count_extra(held)

    def _count_extra(self, held: WindowPages) -> None:
        extra = max(0, len(held.pages) - held.claim)
        self._num_extra += extra - held.extra
        held.extra = extra

    def audit(self, leases: Sequence[Lease], launched: int) -> None:
        held = [_held(lease) for lease in leases]
        users = Counter(page for each in held for page in each.pages)
        assert all(users[page] == count for page, count in enumerate(self._num_leases))
        assert all(len(set(each.pages)) == len(each.pages) for each in held)
        assert all(_held(lease).end <= len(lease.pages) for lease in leases)
        assert self._cached == set(self._beside.values())
        assert self._needless <= self._beside.keys()
        assert len(self._cached) == len(self._beside), "two pages of the cache share one"
        full_pages = {page for run in self._cache.pages.values() for page in run}
        assert self._beside.keys() <= full_pages, "a page is left of a prefix that is gone"
        owned = sorted([*self._pool.free_pages, *self._cached.union(users)])
        assert owned == list(range(1, self._num_usable + 1)), "a page is lost or owned twice"
        self._audit_written(self._cached, launched)
        assert self._ends <= {*self._cache.tree.nodes()}, "an end is left of a prefix that is gone"
        assert self._num_claimed == sum(each.claim for each in held)
        assert self._num_extra == sum(each.extra for each in held)
        assert all(each.extra == max(0, len(each.pages) - each.claim) for each in held)
        num_claims = sum(bool(each.claim) for each in held)
        most = self._num_usable - self.sizes.spare
        assert num_claims < 2 or self._num_claimed <= most, "claims take the room of chunks"


def _held(lease: Lease) -> WindowPages:
    assert lease.windows is not None
    return lease.windows
