"""Whether requests are traced with OpenTelemetry, which its own environment variables say.

Nothing of it is imported, or done for a request, unless they name where spans go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.types import Scope

if TYPE_CHECKING:
    from minisgl.server.http.spans import RequestSpan, Tracing

logger = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENDPOINTS = (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
PACKAGE = "opentelemetry-exporter-otlp-proto-http"  # which needs all others
SPAN = "span"  # in the state of a scope


def tracing_of(environment: Mapping[str, str]) -> Tracing | None:
    """What makes spans and sends them; None if no variable says where to, or that none are sent."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporters = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if is_off or "otlp" not in exporters.split(","):
        return None
    named = next((name for name in ENDPOINTS if environment.get(name)), None)
    if named is None:
        return None
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), HTTP)
    if protocol != HTTP:
        logger.warning("%s is set, but spans are sent as %s, not as %s", named, HTTP, protocol)
        return None
    try:
        from minisgl.server.http.spans import Tracing
    except ImportError:
        logger.warning("%s is set, but spans need a package: pip install %s", named, PACKAGE)
        return None
    return Tracing(environment)


async def end_tracing(app: Starlette) -> None:
    """Send the spans of an application that are not sent yet, for as long as the SDK's variables
    allow."""
    tracing: Tracing | None = app.state.tracing
    if tracing is not None:
        await asyncio.to_thread(tracing.end)


def span_of(scope: Scope) -> RequestSpan | None:
    """The span of a request; None if it is not traced."""
    span: RequestSpan | None = scope["state"].get(SPAN)
    return span
