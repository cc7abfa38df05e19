"""API keys: which requests may pass, and which client each comes from."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import Scope

from minisgl.keys import named_key
from minisgl.server.http.access_log import note
from minisgl.server.http.faults import HTTPError
from minisgl.server.http.paths import is_open

CLIENT = "client"  # in the state of a scope


class Keys:
    """The keys of which each request must have one."""

    def __init__(self, keys: Sequence[str]) -> None:
        """keys: each KEY or NAME: KEY."""
        named = [named_key(key) for key in keys]
        self._names = [name for name, _ in named]
        self._keys = [key.encode() for _, key in named]
        # Not its place among the keys: what a client has on disk outlives a change of those.
        self._clients = [
            hashlib.blake2b(key, digest_size=16, person=b"minisgl client").hexdigest()
            for key in self._keys
        ]

    def check(self, scope: Scope) -> None:
        """Raise HTTPError for a request without a valid key; mark which of several it has."""
        if is_open(scope):
            return
        given = _given_keys(scope)
        # Compare all keys, so that the time does not reveal which one matched.
        found = [
            any(hmac.compare_digest(key, expected) for key in given) for expected in self._keys
        ]
        if True not in found:
            message = "The API key is missing or wrong."
            raise HTTPError(401, message, "invalid_api_key", {"www-authenticate": "Bearer"})
        index = found.index(True)
        if len(found) > 1:
            scope["state"][CLIENT] = self._clients[index]
        if len(found) > 1 or self._names[index]:
            note(scope, key=self._names[index] or index + 1)


def check_admin(scope: Scope, key: str) -> None:
    """Raise HTTPError for a request without the admin key, which none has if it is empty."""
    if not key or not any(hmac.compare_digest(each, key.encode()) for each in _given_keys(scope)):
        raise HTTPError(401, "The admin key is missing or wrong.", "invalid_admin_key")


def _given_keys(scope: Scope) -> list[bytes]:
    """The keys that a request has: as bearer token, as the password of a URL, and as clients of
    Anthropic's API send it."""
    headers = dict(scope["headers"])
    # The case of a scheme's name does not matter (RFC 9110, 11.1).
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    keys = [token] if scheme.lower() == b"bearer" else []
    if scheme.lower() == b"basic":
        with suppress(binascii.Error):
            keys.append(base64.b64decode(token).partition(b":")[2])
    return [*keys, headers[b"x-api-key"]] if b"x-api-key" in headers else keys


def client_of(scope: Scope) -> str:
    """A name of the key that a request came with; empty unless there are several keys."""
    return str(scope["state"].get(CLIENT, ""))
