"""The options of a server that a command asks. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from minisgl.client.address import check_address
from minisgl.client.keys import check_key_options
from minisgl.config import check_types, option, refuse

remote_option = partial(option, group="Another server")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """The server that is asked instead of an engine in this process, if any."""

    url: str | None = remote_option(
        None,
        "An OpenAI-compatible server to ask, such as http://127.0.0.1:1919, instead of an engine "
        "of its own; in a chat or a benchmark --model then names one of its models.",
    )
    api_key: str = remote_option(
        "", "Key for the server at --url; MINISGL_API_KEY if not given.", secret=True
    )
    api_key_file: str = remote_option("", "File with that key.")
    request_timeout: float = remote_option(
        3600.0, "Seconds that an answer of the server at --url may take."
    )

    def __post_init__(self) -> None:
        check_types(self)
        if self.url is not None:
            check_address(self.url)
        check_key_options(self)
        if not self.request_timeout > 0:
            refuse(self, "request_timeout", "allowed: a number above 0")
