"""A request and its answer, as they go between a router and an engine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope

from minisgl.router.route_keys import holder_of, route_key
from minisgl.server.answers.handover import PREFILL, PREFILLED
from minisgl.server.http.auth import client_of
from minisgl.server.http.bodies import read_bytes
from minisgl.server.http.deadlines import HEADER as TIMEOUT
from minisgl.server.http.paths import OVERLOADED, route_path
from minisgl.server.http.request_ids import HEADER, request_id

LEAST_S = 1e-6  # that a request may have left
# Of one connection, not of the request or the answer; and what the router sets itself.
HOP_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"),
        *(b"proxy-connection", b"expect", b"content-length", HEADER.encode()),
        *(TIMEOUT.encode(), PREFILL, PREFILLED),
    )
)

Headers = list[tuple[bytes, bytes]]


class EngineLostError(Exception):
    """The engine that was asked has ended before its answer, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class HTTPRequest:
    """A request whose body has arrived."""

    method: str
    path: str  # without the prefix of a proxy
    query: bytes
    headers: Headers
    body: bytes
    key: bytes | None = None  # by which it is routed; None: by load
    holder: str = ""  # the name of the engine that has a stored response which it needs
    raw_path: bytes = b""  # as the client wrote it

    def with_header(self, name: bytes, value: bytes) -> HTTPRequest:
        return replace(self, headers=[*self.headers, (name, value)])

    def within(self, seconds: float | None) -> HTTPRequest:
        """The request, which may take so many seconds from now; None: any number."""
        if seconds is None:
            return self
        return self.with_header(TIMEOUT.encode(), b"%.6f" % max(seconds, LEAST_S))

    def scope(self) -> Scope:
        """The request for an application of this process."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "server": None,
            "client": None,
        }

    def encoded(self) -> bytes:
        """The request for a connection."""
        target = self.raw_path + b"?" + self.query if self.query else self.raw_path
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), target)]
        lines += [b"%s: %s" % pair for pair in self.headers]
        if self.body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before the body of an answer."""

    status: int
    headers: Headers  # names in lower case
    is_stream: bool = False  # of events, in chunks

    @property
    def is_refusal(self) -> bool:
        """Whether an engine may have refused what another one takes. A request that has waited too
        long is told when to come again."""
        has_waited = any(name == b"retry-after" for name, _ in self.headers)
        return self.status in (503, OVERLOADED) and not has_waited


async def read_request(scope: Scope, receive: Receive) -> HTTPRequest:
    """The request as it goes to an engine, with the id that the client sees."""
    method, path, body, key = scope["method"], route_path(scope), b"", None
    if method not in ("GET", "HEAD"):
        body = await read_bytes(Request(scope, receive))
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    # The body is decoded here.
    headers = [
        pair for pair in headers if pair[0] not in HOP_HEADERS and pair[0] != b"content-encoding"
    ]
    headers.append((HEADER.encode(), request_id(scope).encode()))
    holder = holder_of(path, body)
    if method == "POST" and not holder:
        key = route_key(path, body, client_of(scope))
    raw_path = scope.get("raw_path", b"")
    return HTTPRequest(method, path, scope["query_string"], headers, body, key, holder, raw_path)


def code_of(body: bytes) -> object:
    """The code of an error, None in the form of an API without codes; empty if it is no error."""
    with suppress(msgspec.MsgspecError):
        answer = msgspec.json.decode(body)
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            return answer["error"].get("code")
    return ""
