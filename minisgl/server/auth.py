"""API keys: which requests may pass, and which client each comes from."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.access_log import log_failure, request_id
from minisgl.server.faults import HTTPError
from minisgl.server.root_path import route_path

CLIENT = "client"  # in the state of a scope
# For probes, and for the pages, which ask for a key themselves.
OPEN_PATHS = frozenset(("/health", "/metrics", "/version", "/", "/docs"))


class RequireKey:
    """Middleware that rejects requests without a valid key, and marks which of several it was."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        error_response: Callable[[Scope, Exception, Mapping[str, str]], ASGIApp],
    ) -> None:
        self._app = app
        self._error_response = error_response
        self._keys = [key.encode() for key in keys]
        # Not its place among the keys: what a client has on disk outlives a change of those.
        self._clients = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS:
            given = _given_keys(scope)
            # Compare all keys, so that the time does not reveal which one matched.
            found = [
                any(hmac.compare_digest(key, expected) for key in given) for expected in self._keys
            ]
            if len(found) > 1 and True in found:
                scope["state"][CLIENT] = self._clients[found.index(True)]
            if True not in found:
                error = HTTPError(401, "The API key is missing or wrong.", "invalid_api_key")
                log_failure(request_id(scope), 401, error)
                app = self._error_response(scope, error, {"www-authenticate": "Bearer"})
        await app(scope, receive, send)


def _given_keys(scope: Scope) -> list[bytes]:
    """The keys that a request has: as bearer token, and as clients of Anthropic's API send it."""
    headers = dict(scope["headers"])
    # The case of a scheme's name does not matter (RFC 9110, 11.1).
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    keys = [token] if scheme.lower() == b"bearer" else []
    return [*keys, headers[b"x-api-key"]] if b"x-api-key" in headers else keys


def client_of(scope: Scope) -> str:
    """A name of the key that a request came with; empty unless there are several keys."""
    client: str = scope["state"].get(CLIENT, "")
    return client


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"minisgl client").hexdigest()
