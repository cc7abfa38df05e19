"""Estimates how many tokens running requests will still generate, to reserve pages for them."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.request import Request

# Upper bound on the future tokens counted for one request: the default max_tokens is all of the
# remaining context, and would otherwise reserve the whole cache.
MAX_FUTURE_TOKENS = 4096

# SGLang's values: assume at first that requests use 70 % of their max_tokens, and decay to 14 % of
# that over 600 steps without a retraction.
INITIAL_RATIO = 0.7
LOWEST_FRACTION = 0.14
DECAY_STEPS = 600


class NewTokenRatio:
    """The fraction of max_tokens that requests are expected to use, adapted at retractions."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._lowest = self._initial * LOWEST_FRACTION
        self._decay = (self._initial - self._lowest) / DECAY_STEPS
        self.value = self._initial

    def step(self) -> None:
        self.value = max(self.value - self._decay, self._lowest)

    def retracted(self, requests: Iterable[Request]) -> None:
        """Raise the ratio to at least what the running `requests` show, because pages ran out."""
        generated = wanted = 0
        for request in requests:
            generated += request.num_output_tokens
            wanted += min(request.max_tokens, MAX_FUTURE_TOKENS)
        observed = generated / wanted if wanted else 0.0
        self.value = min(1.0, max(self._initial, observed))

    def expected(self, request: Request) -> float:
        """The expected number of tokens that `request` will still generate."""
        return self.value * min(request.max_len - len(request.token_ids), MAX_FUTURE_TOKENS)
