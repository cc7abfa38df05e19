"""The connection of a client to the router, to which streams are relayed as they are."""

from __future__ import annotations

from starlette.types import Scope

from minisgl.router.upstream import Upstream
from minisgl.server.http.connection import ServerConnection

KEY = "minisgl.connection"  # in the state of a scope


class RelayConnection(ServerConnection):
    """A server's connection that tells the application where to write a stream."""

    upstream: Upstream | None = None  # whose stream is relayed

    def on_headers_complete(self) -> None:
        self.scope["state"][KEY] = self
        super().on_headers_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.upstream is not None:
            self.upstream.resume()


def connection_of(scope: Scope) -> RelayConnection:
    connection: RelayConnection = scope["state"][KEY]
    return connection
