"""The prefix cache: what a request finds of its prompt, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.lease import PageGroup
from minisgl.kvcache.prefix import Node
from minisgl.kvcache.residency import Device
from minisgl.kvcache.tree import Found, PrefixTree


@dataclass(frozen=True, slots=True)
class Match:
    """A locked prefix, which stays cached until `release(node)`: pages on the device, then
    `num_to_load` pages in another memory. Of `num_found` pages it has those that are of use."""

    node: Node
    pages: list[int]
    num_to_load: int
    num_found: int


class RadixCache:
    def __init__(
        self,
        tree: PrefixTree,
        device: Device,
        groups: Sequence[PageGroup] = (),
        *,
        rule: LoadRule = ALWAYS,
        keeps: bool = True,
        num_spared: int = 0,
    ) -> None:
        """groups: what else a request needs to go on behind a prefix. rule: whether the end of a
        prefix is loaded that the device has not. keeps: otherwise it takes no page, and every
        request computes its whole prompt. num_spared: pages at the end of a match that are not of
        use."""
        self.rule = rule
        self._tree = tree
        self._device = device
        self._groups = groups
        self._keeps = keeps
        self._num_spared = num_spared

    # -- finding -----------------------------------------------------------------------------------

    def max_match(self, num_tokens: int) -> int:
        """Number of pages of the longest prefix that leaves at least one token to compute."""
        return (num_tokens - 1) // self._tree.page_size

    def match_pages(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        """Number of pages of `key` that are cached and of use, at most `max_pages`. Changes
        nothing. O(key)."""
        return self._num_useful(self._tree.match(key, max_pages, namespace))

    def _num_useful(self, found: Found) -> int:
        num_pages = sum(common for _, common in found)
        for group in self._groups:
            num_pages = group.usable(found, num_pages)
        return max(0, num_pages - self._num_spared)

    def acquire(self, key: bytes, max_pages: int, namespace: bytes = b"") -> Match:
        """Lock the longest cached prefix of `key` that is of use, at most `max_pages` pages.
        O(key).

        Its end in another memory is left out where computing it is faster than loading it.
        """
        tree, resident = self._tree, self._device.pages
        root = tree.root(namespace)
        found = tree.below(root, key, 0, max_pages)
        path = tree.path(found, self._num_useful(found))
        on_device = [*takewhile(resident.__contains__, path)]
        pages = [page for node in on_device for page in resident[node]]
        num_to_load = sum(node.num_pages for node in path[len(on_device) :])
        if num_to_load and not self.rule.pays(num_to_load):
            path, num_to_load = on_device, 0
        tree.use(path)
        node = path[-1] if path else root
        tree.lock(node)
        return Match(node, pages, num_to_load, sum(common for _, common in found))

    def release(self, node: Node) -> None:
        """Release one lock on `node`."""
        self._tree.release(node)

    # -- adding ------------------------------------------------------------------------------------

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        """Take the pages `start`, `start + 1`, ... of `key`, following the locked `node`.

        `node` must end where `start` begins; its lock moves to the returned node. Returns None
        without a change if the cache already has device pages with the same tokens. O(pages).
        """
        if not self._keeps or self._tree.child(node, key, start) in self._device.pages:
            return None
        added, _ = self._put(node, key, start, pages)
        self._tree.lock(added)
        self._tree.release(node)
        return added

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        """Take the pages that the cache does not have on the device, and return the others.

        `node` must end where `start` begins; its lock stays where it is. O(pages).
        """
        if not self._keeps:
            return list(pages)
        last, refused = self._put(node, key, start, pages)
        self._tree.let_go(last)
        return refused

    def _put(
        self, node: Node, key: bytes, start: int, pages: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Add pages below `node`, where the device has none; returns the last node and the others.

        Nodes that are in another memory only get theirs back.
        """
        tree, num_put, refused = self._tree, 0, list[int]()
        for last in tree.path(tree.below(node, key, start, start + len(pages)), len(pages)):
            run = pages[num_put : num_put + last.num_pages]
            if last in self._device.pages:
                refused += run
            else:
                self._device.put(last, list(run))
                tree.let_go(last)
            num_put += len(run)
            node = last
        if num_put < len(pages):
            node = tree.add(node, key, start + num_put, start + len(pages))
            self._device.put(node, list(pages[num_put:]))
        return node, refused
