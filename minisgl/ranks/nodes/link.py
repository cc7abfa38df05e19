"""The connection between node 0 and another node, after the handshake.

    node 0   ── Start, plans, masks, Close ──▶  node
             ◀── Join, Ready, Answered ───────
             ◀── Landed, Encoded ─────────────
             ◀── Failed, Beat ───────────────▶

It carries frames, each with its length and kind: encoded plans and token masks as they are, and
messages in MessagePack, whose types are below. Nothing that is received can name code or a type.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from minisgl.errors import MinisglError
from minisgl.matcher import MaskRows
from minisgl.ranks.processes.channel import HEARTBEAT_S, Answered, Encoded, Failed, Landed, Ready
from minisgl.ranks.processes.mask_ring import StepMasks

# A node with a heartbeat of its own process is silent for this long only if it, its machine or the
# network is gone.
SILENCE_LIMIT_S = 8.0
# A node sends its last words within this time, or not at all.
FAREWELL_S = 0.5

_HEADER = struct.Struct("!IB")  # the length of what follows; its kind
_MASK_HEADER = struct.Struct("!QI")  # step, number of rows
_MESSAGE, _PLAN, _MASKS = range(3)
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_FRAME_BYTES = 1 << 29
_CHUNK_BYTES = 1 << 20


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node."""

    node: int
    facts: dict[str, str]  # see agreement.py


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to a node that cannot take part."""

    reason: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """The answer to all nodes once there is one of each: load the model."""

    host: str  # of the store of torch.distributed
    port: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """There are no more plans."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat."""

    limit_s: float  # the sender will never be silent for longer
    ranks: tuple[float, ...] = ()  # a number of each of its ranks, which changes with its heartbeat


Message = Join | Refused | Start | Ready | Landed | Encoded | Answered | Failed | Close | Beat
Frame = Message | StepMasks | bytes  # bytes: an encoded plan


class LinkError(MinisglError):
    """The connection is of no more use; the message says why, of `NodeLink.name`."""


class NodeLink:
    """One end of a connection. Thread-safe."""

    def __init__(self, connection: socket.socket, name: str, beat: Callable[[], Beat]) -> None:
        """Begin to send heartbeats. name: of the other end, for messages. beat: makes the next."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self.beat = beat
        self._connection = connection
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._silence_s = 0.0
        self._looked_s = time.monotonic()
        self._limit_s = SILENCE_LIMIT_S
        self._closed = threading.Event()
        threading.Thread(target=self._keep_beating, name="minisgl-node-beat", daemon=True).start()

    def fileno(self) -> int:
        """The descriptor to wait on; negative once the connection is closed."""
        return self._connection.fileno()

    @property
    def own_address(self) -> str:
        """The IP address of this end."""
        address: str = self._connection.getsockname()[0]
        return address

    # -- sending -----------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Raises OSError if the connection is closed."""
        data = msgspec.msgpack.encode(message)
        self._send(_HEADER.pack(len(data), _MESSAGE) + data)

    def send_plan(self, data: bytes, masks: StepMasks | None = None) -> None:
        """Send an encoded plan or SAMPLE, after the masks that it asks for. Raises OSError."""
        frame = _HEADER.pack(len(data), _PLAN) + data
        if masks is not None:
            words = masks.rows.astype("<u4").tobytes()
            header = _MASK_HEADER.pack(masks.step, len(masks.rows))
            frame = _HEADER.pack(len(header) + len(words), _MASKS) + header + words + frame
        self._send(frame)

    def send_last(self, message: Message) -> None:
        """Send a message before `close`, unless the connection is clogged or closed."""
        if self._sending.acquire(timeout=FAREWELL_S):
            try:
                data = msgspec.msgpack.encode(message)
                self._connection.settimeout(FAREWELL_S)
                self._connection.sendall(_HEADER.pack(len(data), _MESSAGE) + data)
            except OSError:
                pass
            finally:
                self._sending.release()

    def close(self) -> None:
        """Close the connection; what was sent still arrives. Any thread may call it, also while
        others send, which then fails. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._sending:
            self._connection.close()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._connection.sendall(frame)

    def _keep_beating(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                self.send(self.beat())
                self._closed.wait(HEARTBEAT_S / 2)

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> list[Frame]:
        """Wait until frames have come, up to `timeout_s`, and return them.

        Raises LinkError if the other end has closed the connection, is silent, or sends nonsense.
        """
        with self._receiving:
            return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> list[Frame]:
        try:
            if self._poll.poll(timeout_s * 1000):
                data = self._connection.recv(_CHUNK_BYTES)
                if not data:
                    raise LinkError(f"{self.name} has closed the connection; its log may say why")
                self._received += data
                self._silence_s = 0.0
                self._looked_s = time.monotonic()
                return self._frames()
        except OSError as error:
            raise LinkError(f"The connection to {self.name} is lost ({error.strerror})") from error
        except (ValueError, struct.error) as error:  # of msgspec, too
            raise LinkError(f"{self.name} sends what is no message of minisgl") from error
        self._look()
        return []

    def _look(self) -> None:
        """Measure the silence. A late look counts for at most two heartbeats, because this process
        may have been stopped."""
        now = time.monotonic()
        self._silence_s += min(now - self._looked_s, 2 * HEARTBEAT_S)
        self._looked_s = now
        if self._silence_s > self._limit_s:
            raise LinkError(
                f"{self.name} has given no sign of life for {self._silence_s:.0f} s: it, its "
                "machine or the network is down"
            )

    def _frames(self) -> list[Frame]:
        frames: list[Frame] = []
        buffer, at = self._received, 0
        while len(buffer) - at >= _HEADER.size:
            size, kind = _HEADER.unpack_from(buffer, at)
            if size > (_MAX_MESSAGE_BYTES if kind == _MESSAGE else _MAX_FRAME_BYTES):
                raise ValueError("a frame is too large")
            end = at + _HEADER.size + size
            if len(buffer) < end:
                break
            frames.append(self._frame(kind, bytes(buffer[at + _HEADER.size : end])))
            at = end
        del buffer[:at]
        return frames

    def _frame(self, kind: int, data: bytes) -> Frame:
        if kind == _PLAN:
            return data
        if kind == _MASKS:
            step, num_rows = _MASK_HEADER.unpack_from(data)
            words: MaskRows = np.frombuffer(data, "<u4", offset=_MASK_HEADER.size)
            return StepMasks(step, words.reshape(num_rows, -1))
        if kind != _MESSAGE:
            raise ValueError("a frame of an unknown kind")
        message: Message = self._decoder.decode(data)
        if isinstance(message, Beat):
            self._limit_s = max(message.limit_s, SILENCE_LIMIT_S)
        return message
