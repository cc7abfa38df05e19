"""Traces of real servers: a request a line, as JSON.

The form is that of the public Qwen traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon).
"""

from __future__ import annotations

from codecs import BOM_UTF8
from itertools import islice
from pathlib import Path

import msgspec

from minisgl.errors import ConfigError


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Other fields of a line, such as `type` and `turn`, change nothing."""

    timestamp: float  # in seconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None  # -1 for none, as in the public traces
    parent_id: int | str | None = msgspec.field(name="parent", default=None)

    @property
    def parent(self) -> int | str | None:
        found = self.parent_id if self.parent_chat_id is None else self.parent_chat_id
        return None if found in (-1, "-1", "") else found


_decode = msgspec.json.Decoder(TraceEntry).decode


def read_trace(path: Path, limit: int | None) -> list[TraceEntry]:
    """The first `limit` requests of the file, by time. Raises ConfigError that names the line."""
    rows: list[TraceEntry] = []
    try:
        with path.open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in islice(lines, limit):
                bare = line.removeprefix(BOM_UTF8) if number == 1 else line
                rows.append(_read(path, number, bare))
    except OSError as error:
        raise ConfigError("--trace", path, f"cannot be read ({error.strerror})") from error
    if not rows:
        raise ConfigError("--trace", path, "it is empty; allowed: a JSON object a line")
    return sorted(rows, key=lambda row: row.timestamp)


def _read(path: Path, number: int, line: bytes) -> TraceEntry:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        allowed = (
            f"{error}; allowed: an object with timestamp, input_length and output_length, and if "
            "wanted hash_ids, chat_id and parent_chat_id"
        )
        raise ConfigError("--trace", f"{path}, line {number}", allowed) from error
    if row.input_length < 1 or row.output_length < 0:
        allowed = "allowed: an input_length of 1 or more and an output_length of 0 or more"
        raise ConfigError("--trace", f"{path}, line {number}", allowed)
    return row
