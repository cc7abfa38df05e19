"""Servers that end as soon as they are told to.

uvicorn looks ten times a second whether it shall end, and then waits a tenth of a second for
connections that may still close. Hundreds of tests would wait for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

from minisgl.server.process import Server

CLOSING_TURNS = 3  # of the loop, in which transports that are closed tell their connections


class PlainServer(uvicorn.Server):
    """uvicorn's server. `should_exit = True` ends it at once, from any thread."""

    _wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
    _should_exit = False

    @property
    def should_exit(self) -> bool:
        return self._should_exit

    @should_exit.setter
    def should_exit(self, told: bool) -> None:
        self._should_exit = told
        if told and self._wake is not None:
            loop, event = self._wake
            with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
                loop.call_soon_threadsafe(event.set)

    async def main_loop(self) -> None:
        event = asyncio.Event()
        self._wake = asyncio.get_running_loop(), event
        if self.should_exit:
            event.set()
        tasks = [asyncio.ensure_future(each) for each in (super().main_loop(), event.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._wake = None
            for task in tasks:
                task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which is left to it where a connection or an answer is still open."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        for server in self.servers:
            await server.wait_closed()


class QuickServer(PlainServer, Server):
    """The server of minisgl."""
