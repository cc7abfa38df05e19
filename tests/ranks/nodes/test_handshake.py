"""Both ends of a connection prove that they know the secret, and never send it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.resolving import CPU, MODEL

from minisgl.config import EngineConfig, ResolvedConfig, resolve
from minisgl.distributed import handshake
from minisgl.distributed.cluster_token import cluster_token
from minisgl.distributed.handshake import (
    NONCE_BYTES,
    PREAMBLE,
    PROOF_BYTES,
    HandshakeError,
    prove_to_main,
    prove_to_node,
)
from minisgl.errors import ConfigError

SECRET = b"the secret of all nodes"


def outcome(main: Callable[[socket.socket], Any], node: Callable[[socket.socket], Any]) -> Any:
    """What the functions raise for the two ends of a connection, or None."""

    def run(function: Callable[[socket.socket], Any], connection: socket.socket) -> None:
        try:
            function(connection)
        finally:
            connection.shutdown(socket.SHUT_WR)

    ends = socket.socketpair()
    with ends[0], ends[1], ThreadPoolExecutor(2) as threads:
        futures: list[Future[None]] = [
            threads.submit(run, *job) for job in zip((main, node), ends, strict=True)
        ]
        return [future.exception() for future in futures]


def test_nodes_with_one_secret_accept_each_other() -> None:
    def main(connection: socket.socket) -> None:
        prove_to_node(connection, SECRET)
        connection.sendall(b"first word")

    def node(connection: socket.socket) -> None:
        prove_to_main(connection, SECRET)
        assert connection.recv(100) == b"first word"
        assert connection.gettimeout() is None

    assert outcome(main, node) == [None, None]


def test_another_secret_is_refused_and_both_ends_say_so() -> None:
    main, node = outcome(
        lambda connection: prove_to_node(connection, SECRET),
        lambda connection: prove_to_main(connection, SECRET + b"?"),
    )
    assert isinstance(main, HandshakeError) and str(main) == "it has another cluster token"
    assert isinstance(node, HandshakeError)
    assert str(node) == "it does not accept the cluster token of this node"


def test_a_main_node_that_accepts_everybody_is_refused() -> None:
    def main(connection: socket.socket) -> None:
        connection.sendall(PREAMBLE + bytes(NONCE_BYTES))
        connection.recv(1000)
        connection.sendall(b"\1" + bytes(PROOF_BYTES))

    found = outcome(main, lambda connection: prove_to_main(connection, SECRET))[1]
    assert isinstance(found, HandshakeError) and "does not know the cluster token" in str(found)


def test_a_proof_that_was_seen_cannot_be_used_again() -> None:
    """Nor can that of one side be used by the other: a reflected one is as wrong."""
    seen: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        connection.sendall(PREAMBLE + bytes(NONCE_BYTES))
        for size in (len(PREAMBLE) + NONCE_BYTES, PROOF_BYTES):
            seen.append(connection.recv(size, socket.MSG_WAITALL))
        connection.sendall(b"\1" + seen[-1])  # reflected

    reflected = outcome(listen, lambda connection: prove_to_main(connection, SECRET))[1]
    assert isinstance(reflected, HandshakeError)

    def replay(connection: socket.socket) -> None:
        for data in seen:
            connection.sendall(data)

    replayed = outcome(lambda connection: prove_to_node(connection, SECRET), replay)[0]
    assert isinstance(replayed, HandshakeError) and "another cluster token" in str(replayed)
    assert SECRET not in b"".join(seen)


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", "it is no node of minisgl"),
        (PREAMBLE[:-1] + b"\7" + bytes(NONCE_BYTES), r"another version of minisgl \(protocol 7, h"),
    ],
)
def test_a_stranger_and_another_version_are_told_apart(greeting: bytes, reason: str) -> None:
    main, _ = outcome(
        lambda connection: prove_to_node(connection, SECRET),
        lambda connection: (connection.sendall(greeting), connection.recv(1000)),
    )
    with pytest.raises(HandshakeError, match=reason):
        raise main


def test_who_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "LIMIT_S", 0.05)
    main, _ = outcome(
        lambda connection: prove_to_node(connection, SECRET),
        lambda connection: [connection.recv(1000) for _ in range(2)],
    )
    assert isinstance(main, TimeoutError)


# -- the secret ------------------------------------------------------------------------------------


def config(**options: Any) -> ResolvedConfig:
    return resolve(EngineConfig(tp=2, nnodes=2, **options), MODEL, CPU, overlap=True)


def test_the_secret_comes_from_the_file_or_the_environment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", " of the environment ")
    assert cluster_token(config(), "10.0.0.1") == b"of the environment"
    file = tmp_path / "token"
    file.write_text("that of the file\n")
    file.chmod(0o600)
    named = config(cluster_token_file=str(file))
    assert cluster_token(named, "10.0.0.1") == b"that of the file"
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"--cluster-token-file \(not shown\): allowed: 16 char"):
        cluster_token(named, "127.0.0.1")
    file.unlink()
    with pytest.raises(ConfigError, match=r"--cluster-token-file .*: No such file"):
        cluster_token(named, "127.0.0.1")


def test_without_a_secret_nodes_meet_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_CLUSTER_TOKEN", raising=False)
    assert cluster_token(config(), "127.0.0.2") == cluster_token(config(), "::1") == b""
    with pytest.raises(ConfigError, match=r"--master-addr main: beyond this machine .* secret"):
        cluster_token(config(master_addr="main"), "10.0.0.1")
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", "too short")
    with pytest.raises(ConfigError, match=r"^MINISGL_CLUSTER_TOKEN \(not shown\): allowed: 16"):
        cluster_token(config(), "127.0.0.1")
