"""Copies of KV pages between the device and host memory, as integers, and when one pays."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields
from operator import sub


@dataclass(frozen=True, slots=True)
class Load:
    """Pages on their way from host memory to the device."""

    id: int  # from 1 on
    host_pages: tuple[int, ...]
    # On the device, as many. Behind the numbers of its pages come those of the parts of snapshots.
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """What a plan copies besides computing its step; all of it belongs to the plan's own place in
    the order of launches.

    First the compute lane waits for the loads in `awaits`: from this plan on their pages are read,
    or written again. Then it gathers the pages of `offloads`, which this plan may write. The pages
    of `loads` are written from then on, at any time, until a later plan awaits the load.
    """

    offloads: tuple[tuple[int, int], ...] = ()  # (page on the device, page in host memory)
    loads: tuple[Load, ...] = ()
    awaits: tuple[int, ...] = ()  # ids of loads


@dataclass(frozen=True, slots=True)
class LoadRule:
    """Decides whether a prefix is loaded from another tier: where that beats computing it.

    A page takes bytes / bandwidth in the one case, tokens / prefill rate in the other.
    """

    load_s: float  # of a page among many
    compute_s: float  # of the tokens of a page
    delay_s: float = 0.0  # of any load

    def pays(self, num_pages: int, num_saved: int) -> bool:
        """Whether to load `num_pages` is faster than to compute the tokens of `num_saved`."""
        return self.delay_s + num_pages * self.load_s < num_saved * self.compute_s


ALWAYS = LoadRule(load_s=0.0, compute_s=1.0)


@dataclass(slots=True)
class Traffic:
    """The copies in one direction since the start, without those under way."""

    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # in which the lane was busy with them

    def since(self, before: Traffic) -> Traffic:
        return Traffic(*map(sub, astuple(self), astuple(before)))


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """The copies of a rank."""

    offloads: Traffic = field(default_factory=Traffic)
    loads: Traffic = field(default_factory=Traffic)
    writes: Traffic = field(default_factory=Traffic)  # to disk
    reads: Traffic = field(default_factory=Traffic)  # from disk

    def since(self, before: HostTraffic) -> HostTraffic:
        names = (spec.name for spec in fields(self))
        return HostTraffic(*(getattr(self, each).since(getattr(before, each)) for each in names))
