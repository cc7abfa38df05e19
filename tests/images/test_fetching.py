"""Images at addresses: of listed hosts only, at public addresses only, and nowhere else."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from support.raw_server import HEAD, RawServer, raw_server
from support.tls import CERTIFICATE, KEY
from support.waiting import LIMIT_S, until

from minisgl.errors import InvalidRequestError
from minisgl.images.fetching import Fetcher, Resolver, is_public
from minisgl.images.limits import MAX_BYTES

HOST = "images.example"
IMAGE = bytes(range(256)) * 9


class Names:
    """Resolves every name to the next of these addresses."""

    def __init__(self, *addresses: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._addresses = iter(addresses)

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return list(next(self._addresses))


def fetcher_for(server: RawServer, **options: Any) -> Fetcher:
    """It takes the loopback for public, which no test can do without."""
    options = {"resolve": Names(["127.0.0.1"]), "is_allowed": lambda _: True, **options}
    return Fetcher([HOST], ports=[server.port], **options)


def url_of(server: RawServer, path: str = "/a.png") -> str:
    return f"http://{HOST}:{server.port}{path}"


async def refused(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await fetcher.fetch(url)
    return str(caught.value)


@pytest.mark.parametrize(
    "head",
    [HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(IMAGE)],
    ids=["to the end", "of a length"],
)
async def test_an_image_is_fetched_from_a_listed_host(head: bytes) -> None:
    async with raw_server({"/a.png?b=%20c": head + IMAGE}) as server:
        names = Names(["127.0.0.1"])
        fetcher = fetcher_for(server, resolve=names)
        assert (
            await fetcher.fetch(
                url_of(server, "/a.png?b=%20c#d")
                .upper()
                .replace("A.PNG?B=%20C#D", "a.png?b=%20c#d")
            )
            == IMAGE
        )
        [head_sent] = server.heads
    assert names.asked == [HOST]
    assert f"host: {HOST}:{server.port}\r\n" in head_sent.lower()
    assert "cookie" not in head_sent.lower()
    assert "authorization" not in head_sent.lower()


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "192.0.0.1", "198.18.0.1", "224.0.0.1", "239.1.1.1"),
        *("240.0.0.1", "255.255.255.255", "192.0.2.1", "192.0.0.9", "192.88.99.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "::127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b:1::a9fe:a9fe", "2002:7f00:1::", "2001::1", "2001:db8::1"),
        *("fec0::1", "feff::1", "3fff::1", "3fff:fff::1"),
    ],
)
async def test_an_address_that_is_not_public_is_not_connected_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_public(address)

    async def connect(*_: object, **__: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect)
    for addresses in ([address], ["93.184.216.34", address], [address, "93.184.216.34"]):
        fetcher = Fetcher([HOST], resolve=Names(addresses))
        assert "whose address is not public" in await refused(fetcher, f"http://{HOST}/a.png")


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"])
async def test_the_loopback_is_refused_even_if_it_is_listed(host: str) -> None:
    async with raw_server({"": HEAD + IMAGE}) as server:
        fetcher = Fetcher([host.strip("[]")], ports=[server.port])
        said = await refused(fetcher, f"http://{host}:{server.port}/")
        assert "whose address is not public" in said
        assert not server.heads


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a.png",
        f"http://{HOST}.other.example/a.png",
        f"http://other.example/{HOST}",
        f"http://other.example#{HOST}",
        f"http://other.example?{HOST}",
        f"http://{HOST}@other.example/",
        f"http://other.example\\@{HOST}/",
        f"http://other.example\\.{HOST}/",
        f"http://{HOST}%2eother.example/",
        f"http://sub.{HOST}/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://[::1]/",
        "http:///a.png",
        "http:a.png",
        f"http://{HOST}\n.other.example/",
        "http://ⓘmages.example.evil/",
    ],
)
async def test_a_host_that_is_not_listed_is_not_even_resolved(url: str) -> None:
    names = Names()
    said = await refused(Fetcher([HOST], resolve=names), url)
    assert not names.asked
    assert "not allowed; allowed: " in said or "could not be fetched" in said


@pytest.mark.parametrize(
    "host", ["xn--bcher-kva.example", "XN--BCHER-KVA.example", "bücher.example"]
)
async def test_a_host_is_listed_and_resolved_by_its_name_in_punycode(host: str) -> None:
    name = "xn--bcher-kva.example"
    async with raw_server({"": HEAD + IMAGE}) as server:
        names = Names(["127.0.0.1"])
        fetcher = Fetcher([name], ports=[server.port], resolve=names, is_allowed=lambda _: True)
        assert await fetcher.fetch(f"http://{host}:{server.port}/") == IMAGE
        [head] = server.heads
    assert names.asked == [name]
    assert f"host: {name}:" in head.lower()


async def test_without_listed_hosts_nothing_is_fetched() -> None:
    said = await refused(Fetcher([]), "http://example.com/a.png")
    assert "allowed: none (--image-hosts lists them), and data: URLs" in said


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HOST}:22/",
        f"http://{HOST}:8080/",
        f"https://{HOST}:6379/",
        f"http://user:password@{HOST}/",
        f"ftp://{HOST}/",
    ],
)
async def test_other_ports_schemes_and_users_are_refused(url: str) -> None:
    names = Names()
    said = await refused(Fetcher([HOST], resolve=names), url)
    assert "allowed: http(s) on the ports 80 and 443" in said
    assert not names.asked


async def test_a_name_that_is_resolved_again_would_lead_elsewhere() -> None:
    """The second answer of the name server is a private address (DNS rebinding)."""
    async with raw_server({"": HEAD + IMAGE}) as server:
        names = Names(["127.0.0.1"], ["10.0.0.1"])
        assert await fetcher_for(server, resolve=names).fetch(url_of(server)) == IMAGE
        assert names.asked == [HOST]


async def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[tuple[str, int]] = []

    async def connect(_: object, host: str, port: int, **__: object) -> None:
        connected.append((host, port))
        raise OSError(f"nobody is at {host}")

    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect)
    for scheme, address, port in (("http", "93.184.216.34", 80), ("https", "2606:4700::1111", 443)):
        fetcher = Fetcher([HOST], resolve=Names([address]))
        said = await refused(fetcher, f"{scheme}://{HOST}/")
        assert "could not be fetched" in said
        assert address not in said
        assert connected.pop() == (address, port)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_server({"": HEAD + b"proxy"}) as proxy, raw_server({"": HEAD + IMAGE}) as server:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert await fetcher_for(server).fetch(url_of(server)) == IMAGE
        assert not proxy.heads


@pytest.mark.parametrize("status", [301, 302, 307, 308, 204, 401, 404, 500])
async def test_redirects_and_errors_are_refused_without_a_word_of_the_host(status: int) -> None:
    async with raw_server({"": HEAD + b"secret"}) as other:
        answer = f"HTTP/1.1 {status} Secret\r\nLocation: {other.url}\r\nX-A: secret\r\n\r\nsecret"
        async with raw_server({"": answer.encode()}) as server:
            said = await refused(fetcher_for(server), url_of(server))
    assert f"status {status}" in said
    assert "secret" not in said.lower()
    assert not other.heads


async def test_bytes_are_counted_as_they_come() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while True:
            writer.write(b"x" * (1 << 20))
            await writer.drain()

    async with raw_server({"": endless}) as server:
        assert "allowed: 16 MiB an image" in await refused(fetcher_for(server), url_of(server))
        assert server.heads


async def test_a_compressed_answer_is_not_unpacked() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    async with raw_server({"": head + IMAGE}) as server:
        assert await fetcher_for(server).fetch(url_of(server)) == IMAGE
        assert "accept-encoding: identity" in server.heads[0].lower()


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH secret\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 200_000, HEAD],
)
async def test_what_is_no_answer_of_http_is_not_quoted(answer: bytes) -> None:
    async with raw_server({"": answer}) as server:
        said = await refused(fetcher_for(server), url_of(server))
    assert "secret" not in said
    assert "could not be fetched" in said or "is empty" in said


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD[:9]])
async def test_a_host_that_says_nothing_is_given_up(sent: bytes) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await asyncio.get_running_loop().create_future()

    async with raw_server({"": silent}) as server:
        fetcher = fetcher_for(server, seconds=0.2)
        assert "took longer than 0.2 s" in await refused(fetcher, url_of(server))


async def test_a_name_without_addresses_and_a_resolver_that_fails_are_refused() -> None:
    async def fails(host: str, port: int) -> list[str]:
        raise OSError("internal-name-server says no")

    said = await refused(Fetcher([HOST], resolve=fails), f"http://{HOST}/")
    assert "internal" not in said
    assert "not public" in await refused(Fetcher([HOST], resolve=Names([])), f"http://{HOST}/")


async def test_names_are_resolved_by_the_system() -> None:
    assert set(await Resolver()("localhost", 80)) <= {"127.0.0.1", "::1"}
    assert MAX_BYTES == 16 << 20


async def test_a_name_server_that_is_silent_keeps_no_threads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, asked = threading.Event(), threading.Semaphore(0)

    def silent(*_: object, **__: object) -> list[object]:
        asked.release()
        gate.wait(LIMIT_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    fetcher = Fetcher([HOST])
    fetches = [asyncio.ensure_future(fetcher.fetch(f"http://{HOST}/")) for _ in range(64)]
    try:
        await until(lambda: asked.acquire(blocking=False))
        assert not await asyncio.to_thread(gate.is_set)
    finally:
        gate.set()
        found = await asyncio.gather(*fetches, return_exceptions=True)
    assert all(isinstance(each, InvalidRequestError) for each in found)


async def test_authorities_are_loaded_once_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    load = ssl.create_default_context

    def loaded(*args: Any, **options: Any) -> ssl.SSLContext:
        threads.append(threading.current_thread())
        return load(*args, **options)

    monkeypatch.setattr(ssl, "create_default_context", loaded)
    async with raw_server({"": HEAD + IMAGE}) as server:
        fetcher = fetcher_for(server, resolve=Names(*[["127.0.0.1"]] * 4))
        url = url_of(server)
        leaves = asyncio.ensure_future(fetcher.fetch(url))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await asyncio.gather(*(fetcher.fetch(url) for _ in range(2))) == [IMAGE] * 2
        assert await fetcher.fetch(url) == IMAGE
    [thread] = threads
    assert thread is not threading.main_thread()


@pytest.mark.parametrize(("host", "is_its_own"), [("localhost", True), (HOST, False)])
async def test_tls_asks_for_the_name_and_not_for_the_address(
    host: str, is_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = ssl.create_default_context(cafile=CERTIFICATE)
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **_: trusted)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE, KEY)
    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)
    async with raw_server({"": HEAD + IMAGE}, ssl=context) as server:
        fetcher = Fetcher(
            [host], ports=[server.port], resolve=Names(["127.0.0.1"]), is_allowed=lambda _: True
        )
        url = f"https://{host}:{server.port}/a.png"
        if is_its_own:
            assert await fetcher.fetch(url) == IMAGE
        else:
            assert "could not be fetched" in await refused(fetcher, url)
            assert not server.heads
    assert names == [host]
