"""Fetches images from the hosts that --image-hosts lists.

An address in a request is chosen by a stranger, and the server may reach what the stranger cannot.
So a name is resolved once, all of its addresses must be public, and the connection goes to one of
them; nothing else that the answer or the environment says leads anywhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from minisgl.errors import InvalidRequestError
from minisgl.images.limits import MAX_BYTES, check_size, refuse

PORTS = (80, 443)
SECONDS = 10.0  # for all of an image, resolving its name included
NUM_RESOLVERS = 32  # threads at most
OPTION = "--image-hosts"
EMBEDDING = tuple(  # networks of IPv6 whose addresses mean others, of IPv4
    ipaddress.IPv6Network(network)
    for network in ("::ffff:0:0/96", "::/96", "64:ff9b::/32", "2002::/16", "2001::/32")
)
SPECIAL = tuple(  # networks that Python takes for public
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "3fff::/20")
)

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, and not one of this or a near network."""
    found = ipaddress.ip_address(address)
    if any(found in each for each in (*EMBEDDING, *SPECIAL)):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved)


class Resolver:
    """Resolves names in threads of its own: a name server that is silent keeps them, not those that
    others wait for."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_RESOLVERS, "minisgl-resolving")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Raises OSError."""
        find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, find)
        return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches images by HTTP."""

    def __init__(
        self,
        hosts: Collection[str],
        *,
        is_allowed: Callable[[str], bool] = is_public,
        ports: Collection[int] = PORTS,
        resolve: Resolve | None = None,
        seconds: float = SECONDS,
    ) -> None:
        """hosts: whose images are fetched, by their names."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._is_allowed = is_allowed
        self._ports = ports
        self._resolve = resolve or Resolver()
        self._seconds = seconds
        self._trusted: asyncio.Future[ssl.SSLContext] | None = None

    async def fetch(self, url: str) -> bytes:
        """The bytes at an address. Raises InvalidRequestError, without a word of the other side."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetch(url)
        except InvalidRequestError:
            raise
        except TimeoutError:
            refuse(f"took longer than {self._seconds:g} s to fetch; send it as a data: URL.")
        except Exception:  # of the resolver, of TLS, or of HTTP: about a host that may be private
            refuse("could not be fetched from its address; send it as a data: URL.")

    async def _fetch(self, url: str) -> bytes:
        import httpx

        asked = httpx.URL(url)
        host = asked.raw_host.decode("ascii").lower()  # in punycode, as name servers know it
        if host not in self._hosts:
            known = ", ".join(sorted(self._hosts)) or f"none ({OPTION} lists them)"
            refuse(f"is at a host that is not allowed; allowed: {known}, and data: URLs.")
        port = asked.port or (443 if asked.scheme == "https" else 80)
        if asked.scheme not in ("http", "https") or port not in self._ports or asked.userinfo:
            ports = " and ".join(map(str, self._ports))
            refuse(f"has an address that is not allowed; allowed: http(s) on the ports {ports}.")
        addresses = await self._resolve(host, port)
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            refuse("is at a host whose address is not public; send it as a data: URL.")
        # A connection by address leaves no second resolution, whose answer may be another one. TLS
        # still checks the name.
        target = asked.copy_with(host=addresses[0], port=port, fragment=None)
        headers = {"host": asked.netloc.decode("ascii"), "accept-encoding": "identity"}
        async with (
            httpx.AsyncClient(
                verify=await self._trust(), trust_env=False, follow_redirects=False, timeout=None
            ) as client,
            client.stream(
                "GET", target, headers=headers, extensions={"sni_hostname": host}
            ) as answer,
        ):
            if answer.status_code != 200:
                refuse(
                    f"was answered with status {answer.status_code} at its address; allowed: 200, "
                    "without redirects."
                )
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > MAX_BYTES:
                    check_size(len(data))
        check_size(len(data))
        return bytes(data)

    async def _trust(self) -> ssl.SSLContext:
        """The authorities of certificates. Loaded once, in a thread: it takes some 20 ms."""
        import httpx

        if self._trusted is None:
            load = asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
            self._trusted = asyncio.ensure_future(load)
        return await asyncio.shield(self._trusted)  # others wait for it, too
