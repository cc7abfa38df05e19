"""A certificate for localhost with its key, and keys that do not match it."""

from __future__ import annotations

from pathlib import Path

CERTIFICATES = Path(__file__).with_name("certificates")
CERTIFICATE, KEY, OTHER_KEY, LOCKED_KEY = (
    str(CERTIFICATES / name)
    for name in ("localhost.pem", "localhost.key", "other.key", "locked.key")
)
