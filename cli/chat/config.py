"""The chat's own options. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from minisgl.client.remote import RemoteConfig
from minisgl.config import check_at_least, check_parameter, option

chat_option = partial(option, group="Chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(RemoteConfig):
    """The options as the user gave them. Raises ConfigError for an invalid value."""

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
        RemoteConfig.__post_init__(self)
        check_at_least(self, "max_tokens", 1)
        check_parameter(self, "temperature")

    @property
    def sampling(self) -> dict[str, float]:
        """The given sampling parameters, by their names in the API and in SamplingParams."""
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in given.items() if value is not None}
