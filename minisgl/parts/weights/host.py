"""Which weights have computed what: a version of each request, and of the KV of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from minisgl.request import Extra, Request, RequestStatus, SamplingParams
from minisgl.scheduler.parts import Part

MAX_VERSION_CHARS = 256


class VersionSpan(NamedTuple):
    """Output tokens that weights of one version have sampled: those from `first` on."""

    first: int
    version: str


@dataclass(slots=True, eq=False)
class OfWeights(Extra):
    """The versions of the weights that answer a request, oldest first."""

    spans: list[VersionSpan]
    kv_of: bytes = b""
    is_mixed: bool = False  # weights of several versions have computed its KV

    def num_shared(self, num_tokens: int) -> int:
        return 0 if self.is_mixed else num_tokens


class WeightVersions(Part):
    """Gives new requests the present version, so that they match no KV of older weights. Until the
    weights are changed or named for the first time, it says nothing."""

    kind = OfWeights

    def __init__(self) -> None:
        self.version = ""
        self.kv_of = b""  # drawn for each version; empty: of the weights that were loaded

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        if not (self.version or self.kv_of):
            return None
        return OfWeights([VersionSpan(0, self.version)], self.kv_of)

    def concerns(self, request: Request) -> bool:
        return False  # it does nothing in steps

    def change(self, version: str, kv_of: bytes, requests: Iterable[Request]) -> None:
        """Take a new version, whose KV has a key of its own. Requests that run go on with the KV
        that they have, and share no more of it, also with engines that are started later; those
        that wait match no older one. The key of before: only the name of the version is new."""
        for request in requests:
            of_weights = request.extra(OfWeights)
            if of_weights is None:
                of_weights = OfWeights([VersionSpan(0, self.version)])
                request.extras = (*request.extras, of_weights)
            spans, num_tokens = of_weights.spans, request.num_output_tokens
            if spans[-1].first == num_tokens:
                spans.pop()
            spans.append(VersionSpan(num_tokens, version))
            if kv_of == self.kv_of:
                continue
            of_weights.is_mixed = request.status is RequestStatus.RUNNING
            if not of_weights.is_mixed:
                request.namespace = blake2b(request.namespace + kv_of, digest_size=16).digest()
        self.version, self.kv_of = version, kv_of


def versions_of(request: Request) -> list[VersionSpan]:
    """The versions of the weights that have answered a request; none until they have a name."""
    of_weights = request.extra(OfWeights)
    return [] if of_weights is None else of_weights.spans
