"""Pages on a socket between two engines: what arrives, and what a peer cannot do to the other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from minisgl.engine import page_wire
from minisgl.engine.page_wire import PageServer, TransferError, Want, receive_pages
from minisgl.subprocesses import LENGTH

WANT = Want(fingerprint=b"model", key=b"prefix", first=1)


@contextlib.contextmanager
def served(path: Path, views: Iterable[memoryview]) -> Iterator[list[Want]]:
    """A server that sends two pages from `views`, and the prefixes that it was asked for."""
    wanted: list[Want] = []

    @contextlib.contextmanager
    def opened(want: Want) -> Iterator[tuple[int, Iterable[memoryview]]]:
        wanted.append(want)
        if want.fingerprint != WANT.fingerprint:
            raise TransferError("another model")
        yield 2, views

    server = PageServer(str(path), opened)
    yield wanted
    server.close()


def test_pages_arrive_as_they_are_whatever_their_pieces(tmp_path: Path) -> None:
    sent = bytes(range(256)) * 4000
    path = tmp_path / "pages.sock"
    with served(path, [memoryview(sent)[:1000], memoryview(sent)[1000:]]) as wanted:
        got = bytearray(len(sent))

        def into(num_pages: int) -> Sequence[memoryview]:
            assert num_pages == 2
            return [memoryview(got)[:700_000], memoryview(got)[700_000:]]

        assert receive_pages(str(path), WANT, into) == 2
        assert bytes(got) == sent
        other = Want(b"other", b"prefix", 0)
        with pytest.raises(TransferError, match="another model"):
            receive_pages(str(path), other, into)
        assert wanted == [WANT, other]
    with pytest.raises(TransferError):
        receive_pages(str(path), WANT, into)


def test_an_engine_that_ends_or_falls_silent_in_between_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_wire, "SILENCE_S", 0.2)
    path = str(tmp_path / "pages.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    offer = b"\x92\x01\xa0"  # one page
    answers = (
        (LENGTH.pack(len(offer)) + offer + b"x" * 10, True, "has ended"),
        (LENGTH.pack(1 << 40), True, "has ended"),
        (LENGTH.pack(4) + b"junk", True, "Error"),
        (LENGTH.pack(len(offer)) + offer + b"x" * 10, False, "is silent for 0.2 s"),
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
    for _, _, reason in answers:
        with pytest.raises(TransferError, match=reason):
            receive_pages(path, WANT, lambda _: [memoryview(bytearray(100))])
    thread.join()
    for peer in (*silent, listener):
        peer.close()


def test_a_peer_that_talks_nonsense_or_leaves_does_not_disturb_others(tmp_path: Path) -> None:
    path = tmp_path / "pages.sock"
    with served(path, [memoryview(b"twelve bytes")]) as wanted:
        for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", LENGTH.pack(3) + b"\xc1\xc1\xc1"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                peer.sendall(nonsense)
        got = bytearray(12)
        assert receive_pages(str(path), WANT, lambda _: [memoryview(got)]) == 2
        assert got == b"twelve bytes" and wanted == [WANT]
