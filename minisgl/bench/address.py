"""Where a server of the OpenAI API is. Imports little: the chat starts with it."""

from __future__ import annotations

from urllib.error import URLError
from urllib.parse import urlsplit


def api_base(url: str) -> str:
    """With /v1, which people leave out, unless there is another path."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"


def unreachable(url: str, error: OSError) -> str:
    """What to say where no connection comes about, by asyncio or by urllib."""
    wrapped = error.reason if isinstance(error, URLError) else error
    cause = wrapped if isinstance(wrapped, OSError) else error
    # asyncio lists the addresses that it has tried, if they are several.
    refused = isinstance(cause, ConnectionRefusedError) or "Connect call failed" in str(cause)
    reason = "no server answers there" if refused else str(cause.strerror or cause)
    return f"{url} cannot be reached: {reason}."
