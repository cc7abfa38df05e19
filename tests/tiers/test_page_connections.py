"""Connections between engines: who may connect, what arrives, and what a peer cannot do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from support.resolving import CPU, MODEL
from support.waiting import wait_until

from minisgl.config import EngineConfig, resolve
from minisgl.distributed.addresses import Address, check_address
from minisgl.errors import ConfigError
from minisgl.subprocesses import LENGTH
from minisgl.tiers.carriers import connections
from minisgl.tiers.carriers.connections import (
    PageServer,
    TransferError,
    connection,
    fill,
    receive,
    send,
)

TOKEN = b"the secret of the cluster"


class Word(Struct, array_like=True):
    text: str


@contextlib.contextmanager
def served(
    address: Address, views: list[memoryview], token: bytes = b""
) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every word with `views`; its address, and the words that came."""
    words: list[str] = []

    def answer(peer: socket.socket) -> None:
        words.append(receive(peer, Word).text)
        for view in views:
            peer.sendall(view)

    server = PageServer(address, token, answer)
    yield str(server.address), words
    server.close()


def ask(address: str, views: list[memoryview], token: bytes = b"") -> None:
    with connection(address, token) as peer:
        send(peer, Word("pages"))
        for view in views:
            fill(peer, view)


@pytest.mark.parametrize("kind", ["path", "IPv4", "name"])
def test_pages_arrive_as_they_are_whatever_their_pieces(tmp_path: Path, kind: str) -> None:
    sent, got = bytes(range(256)) * 4000, bytearray(256 * 4000)
    pieces = [memoryview(got)[:700_000], memoryview(got)[700_000:]]
    where = {
        "path": Address(path=str(tmp_path / "pages")),
        "IPv4": Address.parse("127.0.0.1:0"),
        "name": Address.parse("localhost:0"),
    }[kind]
    with served(where, [memoryview(sent)[:1000], memoryview(sent)[1000:]]) as (address, words):
        ask(address, pieces)
        assert bytes(got) == sent and words == ["pages"]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    with pytest.raises(TransferError):
        ask(address, pieces)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", ["/tmp/pages-0.sock", "./pages", "10.0.0.1:80", "[::1]:0", "h:1"])
def test_an_address_is_a_path_or_a_host_with_a_port(text: str) -> None:
    address = Address.parse(text)
    assert str(address) == text and bool(address.path) == ("/" in text)
    ranks = [address.of_rank(rank) for rank in range(2)]
    assert len(set(ranks)) == 2 if address.path else {each.port for each in ranks} == {0}


def test_tcp_is_for_those_who_know_the_token(caplog: pytest.LogCaptureFixture) -> None:
    got = bytearray(6)
    with served(Address.parse("127.0.0.1:0"), [memoryview(b"secret")], TOKEN) as (address, words):
        for token in (b"", TOKEN + b"?"):
            with pytest.raises(TransferError, match="does not accept the cluster token"):
                ask(address, [memoryview(got)], token)
        assert not words and not any(got)
        ask(address, [memoryview(got)], TOKEN)
        assert got == b"secret"
    wait_until(
        lambda: caplog.text.count("it has another cluster token") == 2
    )  # said after the refusal
    with pytest.raises(TransferError, match="need a shared secret"):
        ask("192.0.2.1:4000", [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost", "allowed: HOST:PORT, or the path"),
        ("localhost:http", "allowed: HOST:PORT, or the path"),
        ("localhost:65536", "allowed: HOST:PORT, or the path"),
        ("0.0.0.0:4000", "the address at which the other engines find this one"),
        ("no.such.host.invalid:4000", "not an address"),
        ("192.0.2.1:4000", "need a shared secret: set MINISGL_CLUSTER_TOKEN or --cluster-token"),
    ],
)
def test_an_address_that_cannot_be_is_refused(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINISGL_CLUSTER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=reason):
        check_address(text, config())


def test_the_token_is_that_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN.decode())
    assert check_address("192.0.2.1:4000", config()) == (Address("", "192.0.2.1", 4000), TOKEN)
    assert check_address("127.0.0.1:0", config())[1] == TOKEN
    assert check_address("/tmp/pages", config()) == (Address("/tmp/pages"), b"")
    file = tmp_path / "token"
    file.write_text("too short")
    with pytest.raises(ConfigError, match="--cluster-token-file"):
        check_address("127.0.0.1:0", config(cluster_token_file=str(file)))


def config(**options: Any) -> Any:
    return resolve(EngineConfig(**options), MODEL, CPU, overlap=True)


def test_an_engine_that_ends_or_falls_silent_in_between_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "pages.sock")
    listener = Address(path=path).listen()
    answers = (
        (b"x" * 10, True, "has ended"),
        (LENGTH.pack(1 << 40), True, "has ended"),
        (LENGTH.pack(4) + b"junk", True, "Error"),
        (b"x" * 10, False, "is silent for 0.2 s"),
    )
    silent: list[socket.socket] = []

    def answer() -> None:
        for message, ends, _ in answers:
            peer, _ = listener.accept()
            peer.recv(1 << 16)
            peer.sendall(message)
            if ends:
                peer.close()
            else:
                silent.append(peer)

    thread = threading.Thread(target=answer)
    thread.start()
    for message, ends, reason in answers:
        if not ends:
            monkeypatch.setattr(connections, "SILENCE_S", 0.2)
        with pytest.raises(TransferError, match=reason), connection(path, b"") as peer:
            send(peer, Word("pages"))
            if message.startswith(b"x"):
                fill(peer, memoryview(bytearray(100)))
            else:
                receive(peer, Word)
    thread.join()
    for each in (*silent, listener):
        each.close()


def is_left(peer: socket.socket) -> bool:
    """Wait for the end of the connection; False if bytes come."""
    with contextlib.suppress(ConnectionResetError):
        return not peer.recv(1)
    return True


def test_peers_that_talk_nonsense_leave_or_stay_do_not_disturb_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PEERS", 2)
    path = tmp_path / "pages.sock"
    path.touch()  # of an engine that was killed
    with served(Address(path=str(path)), [memoryview(b"twelve bytes")]) as (address, words):
        for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", LENGTH.pack(3) + b"\xc1\xc1\xc1"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(address)
                peer.sendall(nonsense)
                peer.shutdown(socket.SHUT_WR)
                assert is_left(peer)
        with monkeypatch.context() as impatient:
            impatient.setattr(connections, "SILENCE_S", 0.2)
            waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
            for peer in waiting:
                peer.connect(address)
            for peer in waiting:
                assert is_left(peer), "one too many, or silent"
                peer.close()
        got = bytearray(12)
        while not words:
            with contextlib.suppress(TransferError):  # the last peer's place may not be free yet
                ask(address, [memoryview(got)])
        assert got == b"twelve bytes" and words == ["pages"]
