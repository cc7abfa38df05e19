"""The ids of responses and of their items.

An item's id contains that of its response, and both end with the name of the replica that has them,
if there are several. Whoever knows an id may read the response, so it has 128 random bits.
"""

from __future__ import annotations

import re
import secrets

PREFIX = "resp_"
ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})([0-9]{2,})?(?:-([0-9A-Za-z]+))?")


def new_response_id(replica: str) -> str:
    """replica: the name of the replica that keeps the response; empty if there is only one."""
    return f"{PREFIX}{secrets.token_hex(16)}{replica and f'-{replica}'}"


def item_id(kind: str, response_id: str, index: int) -> str:
    """The id of the item at `index` in the output of a response."""
    random, dash, replica = response_id.removeprefix(PREFIX).partition("-")
    return f"{kind}_{random}{index:02}{dash}{replica}"


def response_of(item_id: str) -> str:
    """The id of the response that has an item; empty if no response can have it."""
    found = ID.fullmatch(item_id)
    if found is None:
        return ""
    return f"{PREFIX}{found[1]}-{found[3]}" if found[3] else f"{PREFIX}{found[1]}"


def replica_of(id: str) -> str:
    """The name of the replica in the id of a response or of an item; empty if it has none."""
    found = ID.fullmatch(id)
    return found[3] or "" if found else ""
