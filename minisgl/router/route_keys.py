"""The keys by which requests are routed: their prompts as the client wrote them.

No tokenizer is needed: requests whose bodies begin alike have prompts that begin alike. What comes
first in a rendered prompt comes first in the key, and a conversation's next request begins with all
of this one. What each message has in common with all others is left out, because it is cached
nowhere. Of an image in the body the key has a digest, so that it has what follows, too.
"""

from __future__ import annotations

import re
from hashlib import blake2b

import msgspec
from msgspec import Raw, Struct

from minisgl.router.table import MAX_KEY_BYTES
from minisgl.server.apis.responses.ids import replica_of
from minisgl.server.endpoints import ENDPOINTS

RESPONSES = "/v1/responses"
CANCEL = "/cancel"  # behind the path of one
# Whose prompts stay in the prefix cache: of answers that can be streamed.
CACHED_PATHS = frozenset(
    each.path for each in ENDPOINTS if each.event is not None and each.method == "POST"
)
FRAME = re.compile(rb'"(?:role|content|type|text)"\s*:\s*|"(?:text|message|input_text)"\s*,\s*')
# Claude Code puts a line with a number of the request in front of its system prompt, which servers
# leave out.
NONCE = re.compile(rb'"x-anthropic-billing-header[^"]*"')
# What a string begins with that has an image, or something else in base64. Long ones are looked at.
IN_BASE64 = re.compile(rb"[A-Za-z0-9+/=:;,.-]*")
MIN_IMAGE_BYTES = 512
NONE = Raw(b"")


class Prompt(Struct):
    """What a prompt is made of, in the bodies of all APIs."""

    model: Raw = NONE
    cache_salt: Raw = NONE
    extra_key: Raw = NONE
    tools: Raw = NONE
    system: Raw = NONE
    instructions: Raw = NONE
    messages: Raw = NONE
    input: Raw = NONE
    prompt: Raw = NONE


class Reference(Struct):
    """What an item of the Responses API has that stands for another one."""

    id: str | None = None
    type: Raw = NONE
    role: Raw = NONE
    content: Raw = NONE

    @property
    def is_one(self) -> bool:
        bare = not (bytes(self.type) or bytes(self.role) or bytes(self.content))
        return bare or bytes(self.type) == b'"item_reference"'


class References(Struct):
    """What a request to the Responses API goes on from, or refers to."""

    previous_response_id: str | None = None
    input: str | list[Reference] = ""


_decode = msgspec.json.Decoder(Prompt).decode
_decode_references = msgspec.json.Decoder(References).decode


def holder_of(path: str, body: bytes) -> str:
    """The name of the replica that has a response which a request needs; empty if it needs none.

    A client's requests that refer to each other go to one replica, so the last name is enough.
    """
    if path.startswith(f"{RESPONSES}/"):
        return replica_of(path.removeprefix(f"{RESPONSES}/").removesuffix(CANCEL))
    if path != RESPONSES:
        return ""
    try:
        found = _decode_references(body)
    except (ValueError, RecursionError):
        return ""
    if found.previous_response_id:
        return replica_of(found.previous_response_id)
    items = found.input if isinstance(found.input, list) else []
    names = [replica_of(item.id) for item in items if item.id and item.is_one]
    return names[-1] if names else ""


def route_key(path: str, body: bytes, client: str) -> bytes | None:
    """The key of a POST; None if it leaves nothing in the cache or its body is no request.

    client: whose cache it uses (server/http/auth.py). Whether the body is valid, the engine says.
    O(body).
    """
    if path not in CACHED_PATHS:
        return None
    try:
        prompt = _decode(body)
    except (ValueError, RecursionError):
        return None
    system = NONCE.sub(b"", bytes(prompt.system)[:MAX_KEY_BYTES])
    parts = (prompt.tools, system, prompt.instructions, prompt.messages, prompt.input)
    said = b"".join(FRAME.sub(b"", _beginning(bytes(part))) for part in parts)
    # Adapters have caches of their own. A whole name would count as a prefix in common.
    model = blake2b(bytes(prompt.model), digest_size=4).digest()
    salt = bytes(prompt.cache_salt) + bytes(prompt.extra_key)
    return b"\0".join((client.encode(), salt, model + said + bytes(prompt.prompt)))


def _beginning(part: bytes) -> bytes:
    """As much of a part as a key takes, with digests of its images. O(part), mostly in C."""
    if b"base64" not in part:
        return part[:MAX_KEY_BYTES]
    pieces: list[bytes] = []
    length = start = 0
    while start < len(part) and length < MAX_KEY_BYTES:
        end = part.find(b'"', start) + 1 or len(part)
        piece = part[start:end]
        if IN_BASE64.fullmatch(piece, 0, MIN_IMAGE_BYTES) and len(piece) > MIN_IMAGE_BYTES:
            piece = blake2b(piece).hexdigest().encode()  # longer than prefixes that count as equal
        pieces.append(piece)
        length += len(piece)
        start = end
    return b"".join(pieces)[:MAX_KEY_BYTES]
