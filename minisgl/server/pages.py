"""The web pages, put together from the files of `minisgl/assets` and served from memory.

The scripts and the styles that a page refers to are put in their place, so a browser gets one file
with everything in it. Its policy (CSP) allows exactly these, by their hashes, requests to this
server, and nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ASSETS = Path(__file__).resolve().parents[1] / "assets"
CHAT, DOCS = "chat.html", "docs.html"
PAGES = {"/": CHAT, "/docs": DOCS}  # by path
REFERENCE = re.compile(
    rb'<script src="(?P<script>[\w/.-]+)"></script>'
    rb'|<link rel="stylesheet" href="(?P<style>[\w/.-]+)">'
)

# Beside the hashes. Trusted types make assignments such as innerHTML an error.
POLICY = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)


@dataclass(frozen=True, slots=True)
class Page:
    plain: bytes
    packed: bytes  # with gzip
    etag: str
    policy: str

    @classmethod
    @cache
    def read(cls, name: str) -> Page:
        """Read a page of the assets, once in a process. Blocks."""
        plain = _put_together(ASSETS / name)
        # Weak, because both encodings have it.
        etag = f'W/"{hashlib.sha256(plain).hexdigest()[:32]}"'
        hashes = (f"{kind}-src {_hashes(kind, plain)}" for kind in ("script", "style"))
        policy = "; ".join((*POLICY, *hashes))
        return cls(plain, gzip.compress(plain, mtime=0), etag, policy)

    async def answer(self, request: Request) -> Response:
        """Answer a GET or HEAD request, with a 304 if the client has this version."""
        headers = {
            "etag": self.etag,
            "cache-control": "no-cache",  # kept, and asked for again each time
            "vary": "accept-encoding",
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
        }
        if self._is_known(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        content = self.plain
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            content = self.packed
            headers["content-encoding"] = "gzip"
        return Response(content, headers=headers, media_type="text/html")

    def _is_known(self, tags: str) -> bool:
        """Whether the header If-None-Match has this version, or any."""
        # A weak comparison: the prefix does not count (RFC 9110, 13.1.2).
        known = {tag.strip().removeprefix("W/") for tag in tags.split(",")}
        return not known.isdisjoint(("*", self.etag.removeprefix("W/")))


def page_routes() -> list[Route]:
    """The routes of the pages. Blocks: reads them."""
    return [Route(path, Page.read(name).answer) for path, name in PAGES.items()]


def _put_together(page: Path) -> bytes:
    """The page, with each script and each style that it refers to in its place."""

    def inlined(reference: re.Match[bytes]) -> bytes:
        tag = str(reference.lastgroup)
        source = (page.parent / reference[tag].decode()).read_bytes()
        return f"<{tag}>\n".encode() + source + f"</{tag}>".encode()

    return REFERENCE.sub(inlined, page.read_bytes())


def _hashes(tag: str, page: bytes) -> str:
    """The sources of all elements `tag` in the page, as the policy names them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
    digests = (b64encode(hashlib.sha256(source).digest()).decode() for source in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _takes_gzip(header: str) -> bool:
    """Whether the header Accept-Encoding allows gzip."""
    for item in header.lower().split(","):
        coding, _, quality = item.partition(";")
        if coding.strip() in ("gzip", "x-gzip", "*"):
            return re.fullmatch(r"q=0(\.0*)?", quality.strip()) is None
    return False
