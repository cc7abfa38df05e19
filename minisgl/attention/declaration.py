"""Defines how the file of an attention backend declares it, and finds the packages of backends."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Set
from dataclasses import dataclass

from minisgl.attention.base import AttentionBackend, AttentionShape
from minisgl.config import AttentionSpec, BackendFacts
from minisgl.kernels.hardware import ComputeCapability


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A declared attention backend, whose packages are imported only when they are needed."""

    facts: BackendFacts
    # Raises ImportError if a package is missing, ValueError without a shape that it plans for.
    make: Callable[[AttentionShape | None], AttentionBackend]
    # The reason, as one short sentence, why it cannot run such layers on a GPU of compute
    # capability 8.0 or newer; None if it can.
    why_missing: Callable[[ComputeCapability, Set[AttentionSpec]], str | None]
    # The facts where it is installed, with such layers; called only where it can run.
    facts_with: Callable[[BackendFacts, Set[AttentionSpec]], BackendFacts] = lambda facts, _: facts


def why_not_importable(module: str, package: str) -> str | None:
    """The reason why `module` of `package` cannot be imported; None if it can."""
    if not is_installed(module):
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken optional package must not stop the engine
        return f"{package} does not import: {error}"
    return None


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
