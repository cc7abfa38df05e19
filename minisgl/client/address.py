"""Addresses of servers of the OpenAI API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from minisgl.errors import ConfigError

DEFAULT_PORTS = {"http": 80, "https": 443}


def api_base(url: str) -> str:
    """The base URL: adds the /v1 that users omit, unless there is another path."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"


def check_address(url: str) -> None:
    """Raise ConfigError unless --url has only a scheme, a host, a port and a path.

    A user name, a password or a query may be a secret, which reports and messages would show.
    """
    try:
        parts = urlsplit(url)
        Address.of(url)
        # urlsplit drops white space of some kinds without a word.
        has_space_or_query = re.search(r"[\s?#]", url) is not None
        is_wrong = "@" in parts.netloc or parts.port == 0 or has_space_or_query
    except ValueError:  # a port that is no number, a bracket that is not closed, an empty label
        is_wrong = True
    if is_wrong:
        shown = "(not shown)" if re.search("[@?]", url) else url or "''"
        allowed = "an address such as http://127.0.0.1:1919, without a user name or a query"
        raise ConfigError("--url", shown, f"allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a URL that a request needs."""

    scheme: str
    host: str
    port: int
    target: str  # path and query

    @classmethod
    def of(cls, url: str) -> Address:
        """Parses an HTTP URL. Raises ValueError for another one."""
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"not an address of HTTP: {url}")
        host = parts.hostname.encode("idna").decode()  # as the look-up of the name will have it
        query = f"?{parts.query}" if parts.query else ""
        target = (parts.path or "/") + query
        if not re.fullmatch("[!-~]+", target):
            raise ValueError(f"not a path of HTTP: {target}")
        return cls(parts.scheme, host, parts.port or DEFAULT_PORTS[parts.scheme], target)

    @property
    def secure(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def has_origin_of(self, other: Address) -> bool:
        return (self.scheme, self.host, self.port) == (other.scheme, other.host, other.port)

    def without_query(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target.partition('?')[0]}"
