"""The options of a server that a command asks. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from minisgl.client.address import check_address
from minisgl.config import check_types, option, refuse
from minisgl.errors import ConfigError
from minisgl.keys import (
    FILE_OPTION,
    VARIABLE,
    check_key,
    keys_of_environment,
    keys_of_file,
    named_key,
)

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
        "",
        "Key for the server at --url; MINISGL_API_KEY if not given.",
        secret=True,
        variable=VARIABLE,
    )
    api_key_file: str = remote_option("", "File with that key.")
    request_timeout: float = remote_option(
        3600.0, "Seconds that an answer of the server at --url may take."
    )

    def __post_init__(self) -> None:
        check_types(self)
        if self.url is not None:
            check_address(self.url)
        if self.api_key:
            check_key("--api-key", self.api_key)
            if self.api_key_file:
                allowed = "--api-key gives the key already; allowed: one of the two"
                raise ConfigError(FILE_OPTION, self.api_key_file, allowed)
        if not self.request_timeout > 0:
            refuse(self, "request_timeout", "allowed: a number above 0")

    def find_key(self) -> str:
        """The key that the options give, else the environment's, else "". Raises ConfigError.

        The first one if there are several, as a server may have them there.
        """
        if self.api_key or not self.api_key_file:
            return self.api_key or next(iter(keys_of_environment()), "")
        return named_key(keys_of_file(self.api_key_file)[0])[1]
