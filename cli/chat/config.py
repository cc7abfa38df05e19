"""The chat's own options. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from minisgl.client.address import check_address
from minisgl.client.keys import check_key_options
from minisgl.config import (
    check_at_least,
    check_parameter,
    check_types,
    option,
    refuse,
)

chat_option = partial(option, group="Chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The options as the user gave them. Raises ConfigError for an invalid value."""

    url: str = chat_option(
        "",
        "An OpenAI-compatible server to talk to, such as http://127.0.0.1:1919, instead of an "
        "engine of its own; --model then names one of its models.",
    )
    api_key: str = chat_option(
        "", "Key for the server at --url; MINISGL_API_KEY if not given.", secret=True
    )
    api_key_file: str = chat_option("", "File with that key.")
    request_timeout: float = chat_option(
        3600.0, "Seconds that an answer of the server at --url may take."
    )
    system: str = chat_option("", "System prompt.")
    temperature: float | None = chat_option(
        None, "Sampling temperature; the model's own if not given."
    )
    max_tokens: int | None = chat_option(
        None, "Longest answer in tokens; all the room there is if not given."
    )
    thinking: str = chat_option(
        "fold",
        "fold (thinking becomes one line once it ends) or show (all of it).",
        choices=("fold", "show"),
    )
    plain: bool = chat_option(False, "Print answers as they come, without Markdown.")

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "max_tokens", 1)
        check_parameter(self, "temperature")
        if self.url:
            check_address(self.url)
        check_key_options(self)
        if not self.request_timeout > 0:
            refuse(self, "request_timeout", "allowed: a number above 0")

    @property
    def sampling(self) -> dict[str, float]:
        """The given sampling parameters, by their names in the API and in SamplingParams."""
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in given.items() if value is not None}
