"""minisgl: a very fast inference engine for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl.errors import MinisglError
from minisgl.request import RequestOutput, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from minisgl.engine import AsyncEngine
    from minisgl.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "MinisglError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is used, so that `minisgl --help` starts at once."""
    if name == "LLM":
        from minisgl.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from minisgl.engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
