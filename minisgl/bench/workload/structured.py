"""The structured requests of a benchmark: which they are, and the schema that they follow."""

from __future__ import annotations

from typing import Any

from minisgl.request import StructuredOutput

# More than any context has tokens: no output can be complete before its planned length.
MIN_ITEMS = 1 << 20


def _text(max_length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": max_length}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


# As an extraction pipeline may have it. What has no end of its own is bounded, so that a model of
# random weights goes through all of it, too.
SCHEMA = _object(
    records={
        "type": "array",
        "minItems": MIN_ITEMS,
        "items": _object(
            id={"type": "integer", "minimum": 0, "maximum": 99999},
            name=_text(40),
            kind={"enum": ["person", "company", "place", "event"]},
            address=_object(
                street=_text(40),
                city=_text(24),
                postcode={"type": "string", "pattern": "^[0-9]{5}$"},
            ),
            tags={"type": "array", "items": _text(16), "maxItems": 4},
            active={"type": "boolean"},
            note={"anyOf": [_text(80), {"type": "null"}]},
        ),
    }
)
STRUCTURED = StructuredOutput(json_schema=SCHEMA)
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "records", "schema": SCHEMA},
}


def describe_share(share: float) -> str:
    """The end of a line about the workload; "" without structured requests."""
    return f", {share:.0%} of the requests under a JSON schema" if share else ""


def is_structured(index: int, share: float) -> bool:
    """Whether the request at `index` is one of the `share`, which are spread evenly."""
    return int((index + 1) * share) > int(index * share)
