"""The conversation of a request: what it goes on from, what it refers to, and its own input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from minisgl.errors import InvalidRequestError
from minisgl.server.apis.responses.answer_types import Response
from minisgl.server.apis.responses.ids import response_of
from minisgl.server.apis.responses.request_types import (
    REFERENCE,
    STATELESS,
    InputItem,
    ResponsesRequest,
)
from minisgl.server.apis.responses.store import ResponseStore, StoredResponse
from minisgl.server.http.bodies import MAX_BODY_BYTES
from minisgl.server.http.encoding import encode
from minisgl.server.requests.chat_messages import MAX_MESSAGES

PREVIOUS = "previous_response_id"

PlacedItem: TypeAlias = tuple[InputItem, str]  # with the field of the request that it comes from

_decode_item = msgspec.json.Decoder(InputItem).decode


class NotStoredError(InvalidRequestError):
    """A response, or an item of one, is not kept, or not for this client."""

    http_status = 404

    def __init__(self, param: str, id: str, kind: str, code: str) -> None:
        super().__init__(
            param,
            f"{kind} with id {id!r} not found: it was never stored, was deleted, or had to go for "
            "others. Send the whole conversation in input.",
        )
        self.code = code
        if param == PREVIOUS:
            self.http_status = 400  # as OpenAI's


class History:
    """What one request of a client sees of the responses that are kept for this client."""

    def __init__(self, store: ResponseStore, client: str) -> None:
        self._store = store
        self._client = client
        self._outputs: dict[str, dict[str | None, bytes]] = {}  # the items by their ids, once read
        self._num_bytes = 0  # of the items that were taken from the store

    def conversation(self, body: ResponsesRequest) -> list[PlacedItem]:
        """All items, in order; raises InvalidRequestError."""
        if not self._store.is_on and body.previous_response_id is not None:
            raise InvalidRequestError(PREVIOUS, STATELESS)
        items = [(item, PREVIOUS) for item in self._before(body.previous_response_id)]
        items += [(self._resolved(item, f"{path}.id"), path) for item, path in _own(body)]
        if len(items) > MAX_MESSAGES:
            raise InvalidRequestError(
                PREVIOUS, f"makes a conversation of more than {MAX_MESSAGES} items."
            )
        return items

    def keep(self, body: ResponsesRequest, response: Response, events: bytes = b"") -> None:
        """Keep the answer to a request, with the events of its stream if clients may ask for them.
        References stay references: items are kept once."""
        kept = StoredResponse(
            response.id,
            body.previous_response_id,
            tuple(encode(item) for item, _ in _own(body)),
            # As items of the input, which have no logprobs.
            tuple(encode(_decode_item(encode(item))) for item in response.output),
            encode(response),
            response.background,
            events,
        )
        self._store.keep(self._client, kept)

    def response(self, id: str) -> StoredResponse:
        """The response with this id; raises NotStoredError."""
        return self._found(id, "response_id", "response", "response_not_found")

    def remove(self, id: str) -> None:
        """Forget a response; raises NotStoredError."""
        if not self._store.remove(self._client, id):
            raise NotStoredError("response_id", id, "response", "response_not_found")

    def _before(self, id: str | None) -> list[InputItem]:
        """The items of a response and of all that it goes on from."""
        chain: list[StoredResponse] = []
        while id is not None:
            found = self._found(id, PREVIOUS, "previous response", "previous_response_not_found")
            chain.append(found)
            id = found.previous_id
        texts = [text for each in reversed(chain) for text in (*each.input, *each.output)]
        return [self._resolved(self._taken(text, PREVIOUS), PREVIOUS) for text in texts]

    def _resolved(self, item: InputItem, path: str) -> InputItem:
        """The item itself where it is a reference to one."""
        if not item.is_reference:
            return item
        if not self._store.is_on:
            raise InvalidRequestError(
                path.removesuffix("id") + "type",
                f"cannot be {REFERENCE}, because answers are not stored; send the item itself.",
            )
        id = item.id or ""
        text = self._output(response_of(id)).get(id)
        if text is None:
            raise NotStoredError(path, id, "item", "item_not_found")
        return self._taken(text, path)

    def _output(self, response_id: str) -> dict[str | None, bytes]:
        """The items of a response, by their ids."""
        if response_id not in self._outputs:
            found = self._store.find(self._client, response_id)
            texts = found.output if found else ()
            self._outputs[response_id] = {_decode_item(text).id: text for text in texts}
        return self._outputs[response_id]

    def _taken(self, text: bytes, path: str) -> InputItem:
        """An item of the store. A small request must not become a conversation of any size."""
        self._num_bytes += len(text)
        if self._num_bytes > MAX_BODY_BYTES:
            limit = f"leads to a conversation of more than {MAX_BODY_BYTES >> 20} MiB."
            raise InvalidRequestError(path, limit)
        return _decode_item(text)

    def _found(self, id: str, param: str, kind: str, code: str) -> StoredResponse:
        found = self._store.find(self._client, id)
        if found is None:
            raise NotStoredError(param, id, kind, code)
        return found


def _own(body: ResponsesRequest) -> Iterator[PlacedItem]:
    """The items of the request itself, each with its path."""
    if isinstance(body.input, str):
        yield InputItem(role="user", content=body.input), "input"
        return
    for index, item in enumerate(body.input):
        yield item, f"input.{index}"
