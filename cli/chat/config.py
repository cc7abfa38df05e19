"""The chat's own options. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.client.address import check_address
from minisgl.client.keys import check_key_options
from minisgl.config import check_at_least, check_types, option, refuse
from minisgl.errors import one_of

GROUP = "Chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The options as the user gave them. Raises ConfigError for an invalid value."""

    url: str = option(
        "",
        "An OpenAI-compatible server to talk to, such as http://127.0.0.1:1919, instead of an "
        "engine of its own; --model then names one of its models.",
        group=GROUP,
    )
    api_key: str = option(
        "", "Key for the server at --url; MINISGL_API_KEY if not given.", group=GROUP, secret=True
    )
    api_key_file: str = option("", "File with that key.", group=GROUP)
    request_timeout: float = option(
        3600.0, "Seconds that an answer of the server at --url may take.", group=GROUP
    )
    system: str = option("", "System prompt.", group=GROUP)
    temperature: float | None = option(
        None, "Sampling temperature; the model's own if not given.", group=GROUP
    )
    max_tokens: int | None = option(
        None, "Longest answer in tokens; all the room there is if not given.", group=GROUP
    )
    thinking: str = option(
        "fold", "fold (thinking becomes one line once it ends) or show (all of it).", group=GROUP
    )
    plain: bool = option(False, "Print answers as they come, without Markdown.", group=GROUP)

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "max_tokens", 1)
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            refuse(self, "temperature", "allowed: 0 to 2")
        if self.thinking not in ("fold", "show"):
            refuse(self, "thinking", one_of(("fold", "show")))
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
