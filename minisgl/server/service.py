"""What handlers are given: the service that they belong to, and a request that has been read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from starlette.types import Scope

from minisgl.request import Extra
from minisgl.server.apis.responses.background import RunningResponses
from minisgl.server.apis.responses.store import ResponseStore
from minisgl.server.engine_state import EngineState
from minisgl.server.http.auth import client_of
from minisgl.server.http.request_ids import request_id
from minisgl.server.metrics import Metrics
from minisgl.server.requests.chat_messages import Images
from minisgl.server.requests.templating import Reading

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

MEGABYTE = 1_000_000

Body = TypeVar("Body")


class Service:
    """What requests share. Each asks for the engine again, because its phase changes."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.metrics = Metrics(state)
        self.store = ResponseStore(state.config.response_store * MEGABYTE)
        self.running = RunningResponses(state.config.response_store * MEGABYTE)
        self.since = int(time.time())

    @property
    def reading(self) -> Reading:
        """How conversations are read; raises NotReadyError."""
        config = self.state.config
        return Reading(
            control_tokens_in_text=config.control_tokens_in_text,
            images=cast("Images", config.images),  # which checks it
            refusal=self.state.engine().image_refusal,
            form=self.state.answer_format.messages,
        )


@dataclass(frozen=True, slots=True)
class Asked(Generic[Body]):
    """A request whose body has been read, and the engine that it is for."""

    scope: Scope
    engine: AsyncEngine
    body: Body
    model: str  # by the name that the answer has: the model itself, or an adapter
    # What asks for its adapter, if it is for one, among the extras of a request. Taken along with
    # the name: if the adapter is unloaded while a prompt is tokenized, the engine refuses it.
    adapter: tuple[Extra, ...]

    @property
    def id(self) -> str:
        """The id in the log."""
        return request_id(self.scope)

    @property
    def client(self) -> str:
        return client_of(self.scope)
