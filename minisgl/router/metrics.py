"""/metrics: the pages of several processes as one, with a label for each, and the router's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from minisgl.router.fleet import DONE, FAILED, Fleet
from minisgl.server.metrics import MetricsPage, counter, gauge
from minisgl.server.metrics_format import OPEN_METRICS

END = OPEN_METRICS.end.rstrip()


@dataclass(slots=True)
class _Family:
    """The lines of one metric."""

    comments: list[bytes] = field(default_factory=list)  # of the first page that has it
    samples: list[bytes] = field(default_factory=list)


def join_pages(*groups: tuple[Mapping[str, bytes], str]) -> bytes:
    """Join pages of one text format, without its last line, so that each metric has one place.

    groups: pages, each with the name of a label more, whose value is the key of the page.
    """
    families: dict[bytes, _Family] = {}
    labelled = [(page, label, value) for pages, label in groups for value, page in pages.items()]
    for page, label, value in labelled:
        added = f'{label}="{value}"'.encode()
        known = {*families}
        family = _Family()
        for line in page.splitlines():
            if line == END:
                break
            if line.startswith(b"#"):
                name = line.split(b" ", 3)[2]
                family = families.setdefault(name, _Family())
                if name not in known:
                    family.comments.append(line)
            elif line:
                family.samples.append(_labelled(line, added))
    lines = [line for each in families.values() for line in (*each.comments, *each.samples)]
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    """`sample` with a label more, in front of its others."""
    name, brace, rest = sample.partition(b"{")
    if brace:
        return name + b"{" + label + b"," + rest
    name, _, value = sample.partition(b" ")
    return name + b"{" + label + b"} " + value


class RouterMetrics(MetricsPage):
    """The metrics of this routing process."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the registry at each scrape."""
        fleet = self._fleet
        yield self._responses(
            "minisgl_router_responses",
            "HTTP responses that the router has started; status 499: the client left before.",
        )
        names = {str(replica.index): replica for replica in fleet.replicas}
        yield counter(
            "router_requests",
            {name: fleet.num_sent[each.index] for name, each in names.items()},
            "replica",
            "Requests sent to a replica.",
        )
        yield gauge(
            "router_replica_ready",
            {name: each.state.is_ready for name, each in names.items()},
            "replica",
            "1 if a replica takes requests.",
        )
        yield counter(
            "router_replica_starts",
            {name: each.state.start for name, each in names.items()},
            "replica",
            "Number of times that a replica was started.",
        )
        if any(replica.role for replica in fleet.replicas):
            roles = GaugeMetricFamily(
                "minisgl_router_replica_role",
                "Always 1: what each replica does.",
                labels=["replica", "role"],
            )
            for name, each in names.items():
                roles.add_metric([name, each.role], 1)
            yield roles
            yield counter(
                "router_prefills",
                {result: fleet.num_prefills[result] for result in (DONE, FAILED)},
                "result",
                "Prompts that one replica should compute for another, by what became of them.",
            )
        about = "Requests sent to another replica because one ended before it answered."
        yield counter("router_resent_requests", fleet.num_resent, about=about)
