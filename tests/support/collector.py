"""A collector of OpenTelemetry's spans on a port of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What has arrived: spans in the order of their end, and the names of the services."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(attributes(sent.resource)["service.name"])
            for scoped in sent.scope_spans:
                self.spans.extend(scoped.spans)

    def below(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == parent.span_id]


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {each.key: _value(each.value) for each in of.attributes}


def _value(value: Any) -> Any:
    if value.HasField("array_value"):
        return [_value(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
