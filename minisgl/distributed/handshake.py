"""Proves to both ends of a connection that the other one knows the shared secret.

    node                                                   node 0
    PREAMBLE, nonce a ─────────▶  ◀───────── PREAMBLE, nonce b
    HMAC(secret, "node", a, b) ──────────────────────────────▶
    ◀────── KNOWN, HMAC(secret, "main", a, b); UNKNOWN, zeros

HMAC-SHA256 (RFC 2104). The secret itself is never sent, and what is sent says nothing about it to
those who cannot guess it. What follows the proofs is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from minisgl.errors import MinisglError

# The last byte is the version of everything that follows on the connection.
PREAMBLE = b"minisgl-node\2"
NONCE_BYTES = PROOF_BYTES = 32
# The handshake takes two round trips; who takes longer is none of the nodes.
LIMIT_S = 10.0

_KNOWN, _UNKNOWN = b"\1", b"\0"


class HandshakeError(MinisglError):
    """The other end is no node of this engine."""


def prove_to_main(connection: socket.socket, token: bytes) -> None:
    """The handshake of a node that has connected to node 0.

    Raises HandshakeError, OSError, or EOFError if node 0 closes the connection.
    """
    deadline = time.monotonic() + LIMIT_S
    own, other = _exchange_nonces(connection, deadline)
    _send(connection, _proof(token, b"node", own + other), deadline)
    answer = _receive(connection, 1 + PROOF_BYTES, deadline)
    if answer[:1] != _KNOWN:
        raise HandshakeError("it does not accept the cluster token of this node")
    if not hmac.compare_digest(answer[1:], _proof(token, b"main", own + other)):
        raise HandshakeError("it does not know the cluster token of this node")
    connection.settimeout(None)


def prove_to_node(connection: socket.socket, token: bytes) -> None:
    """The handshake of node 0 with a connection that it has accepted; raises as the other one."""
    deadline = time.monotonic() + LIMIT_S
    own, other = _exchange_nonces(connection, deadline)
    proof = _receive(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(token, b"node", other + own)):
        _send(connection, _UNKNOWN + bytes(PROOF_BYTES), deadline)
        raise HandshakeError("it has another cluster token")
    _send(connection, _KNOWN + _proof(token, b"main", other + own), deadline)
    connection.settimeout(None)


def _exchange_nonces(connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """The nonces of this end and of the other one."""
    own = secrets.token_bytes(NONCE_BYTES)
    _send(connection, PREAMBLE + own, deadline)
    # All of it is read before an error closes the connection, lest the other end miss what was
    # sent.
    found = _receive(connection, len(PREAMBLE) + NONCE_BYTES, deadline)
    preamble, other = found[: len(PREAMBLE)], found[len(PREAMBLE) :]
    if preamble[:-1] != PREAMBLE[:-1]:
        raise HandshakeError("it is no node of minisgl")
    if preamble != PREAMBLE:
        raise HandshakeError(
            f"it runs another version of minisgl (protocol {preamble[-1]}, here {PREAMBLE[-1]})"
        )
    return own, other


def _proof(token: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, side + nonces, hashlib.sha256)


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(data)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(size - len(received))
        if not data:
            raise EOFError
        received += data
    return received
