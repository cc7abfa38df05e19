"""The two text formats of /metrics, and which of them a client gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.responses import Response

TEXT_TYPE = "text/plain"
OPEN_TYPE = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class Format:
    """A text format of metrics. Its content type, sent as Accept header, asks for it."""

    content_type: str
    encode: Callable[[CollectorRegistry], bytes]
    end: bytes = b""  # the last line of a page

    def response(self, page: bytes) -> Response:
        return Response(page, headers={"content-type": self.content_type, "vary": "Accept"})


TEXT = Format(f"{TEXT_TYPE}; version=0.0.4; charset=utf-8", generate_latest)
OPEN_METRICS = Format(
    f"{OPEN_TYPE}; version=1.0.0; charset=utf-8", openmetrics.generate_latest, b"# EOF\n"
)


def format_for(accept: str) -> Format:
    """The format for a client that sends this Accept header: OpenMetrics if the header names it,
    with version 1.0.0 or without one, and does not prefer the other format."""
    # prometheus_client has a function for this, which ignores preferences and fails for a version
    # that is not a number.
    qualities: dict[str, float] = {}
    for accepted in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in accepted.split(";"))
        named = dict(parameter.partition("=")[::2] for parameter in parameters)
        if kind != OPEN_TYPE or named.get("version", "1.0.0") == "1.0.0":
            qualities[kind] = max(qualities.get(kind, 0.0), _quality(named.get("q", "1")))
    wanted = qualities.get(OPEN_TYPE, 0.0)
    return OPEN_METRICS if wanted > 0 and wanted >= qualities.get(TEXT_TYPE, 0.0) else TEXT


def _quality(text: str) -> float:
    """The weight of a format in an Accept header, 0 to 1; 0 if the text is no such number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value <= 1 else 0.0
