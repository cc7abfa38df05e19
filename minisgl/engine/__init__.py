"""The engine: requests in, streams of tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.engine.engine import AsyncEngine
else:

    def __getattr__(name: str) -> Any:
        """Import AsyncEngine on first use: it needs torch, and the statistics do not."""
        if name == "AsyncEngine":
            from minisgl.engine.engine import AsyncEngine

            return AsyncEngine
        raise AttributeError(f"module 'minisgl.engine' has no attribute {name!r}")


__all__ = ["AsyncEngine"]
