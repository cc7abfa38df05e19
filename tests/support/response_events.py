"""The events of a streamed response, checked as they are put together to the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx

# By the type of an item: its events of text, and the member that has the text.
TEXTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of each event, which must be of the type that its line `event` says."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def streamed_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at the end, whose items must be those of the events before it."""
    created, in_progress, *inner, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    begun = created["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    response: dict[str, Any] = last["response"]
    assert last["type"] in ENDS and last["type"] == f"response.{response['status']}"
    assert {**response, **changing(begun)} == begun
    inner.reverse()
    items: list[dict[str, Any]] = []
    while inner:
        items.append(read_item(inner, len(items)))
    if response["status"] != "failed":
        assert response["output"] == items
    return response


def changing(response: dict[str, Any]) -> dict[str, Any]:
    names = ("status", "output", "usage", "completed_at", "incomplete_details", "error")
    return {name: response[name] for name in names}


def read_item(inner: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Take the events of the next item off `inner`, which is in reverse, and return the item."""
    added = inner.pop()
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item: dict[str, Any] = added["item"]
    assert item["status"] == "in_progress"
    events, member = TEXTS[item["type"]]
    place = {"item_id": item["id"], "output_index": index}
    in_parts = item["type"] in ("message", "reasoning")
    if in_parts:
        place["content_index"] = 0
        part = inner.pop()
        assert part["type"] == "response.content_part.added" and place.items() <= part.items()
        assert item["content"] == [] and part["part"]["text"] == ""
    else:
        assert item[member] == ""
    text, logprobs = "", []
    while inner[-1]["type"] == f"{events}.delta":
        delta = inner.pop()
        assert delta["delta"] and place.items() <= delta.items()
        text += delta["delta"]
        logprobs += delta.get("logprobs", [])
    done = inner.pop()
    assert done["type"] == f"{events}.done" and place.items() <= done.items()
    assert done[member] == text
    if in_parts:
        part = inner.pop()
        assert part["type"] == "response.content_part.done" and place.items() <= part.items()
    ended = inner.pop()
    assert (ended["type"], ended["output_index"]) == ("response.output_item.done", index)
    whole: dict[str, Any] = ended["item"]
    assert whole["status"] in ("completed", "incomplete")
    if in_parts:
        assert whole["content"] == [part["part"]] and part["part"]["text"] == text
        assert item == {**whole, "content": [], "status": "in_progress"}
        assert part["part"].get("logprobs", []) == done.get("logprobs", []) == logprobs
    else:
        assert whole[member] == text
        assert item == {**whole, member: "", "status": "in_progress"}
    return whole
