"""The KV pages that engines give each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.engine.page_moves import PageMoves
from minisgl.engine.stream import OutputStream
from minisgl.request import EVERYONE, Extra, SamplingParams, Tenant, cache_namespace


class SharedPages:
    """What an engine gives to others, and has from them. Used on the engine's loop."""

    def __init__(
        self,
        moves: PageMoves,
        submit: Callable[..., OutputStream],
        check_open: Callable[[], object],
    ) -> None:
        """submit: `AsyncEngine.submit`. check_open: raises EngineStoppedError."""
        self._moves, self._submit, self._check_open = moves, submit, check_open

    async def share(self, address: str, *, always_load: bool) -> str:
        """Exchange KV pages with other engines, which find this one at `address`.

        Called once, or again after a ConfigError.

        address: the path of a Unix socket, with a slash, or HOST:PORT; port 0 is any free one.
        Beyond this machine the engines need the same cluster token. always_load: load what they
        send even where this engine computes it faster.

        Returns the address, with the port. Raises ConfigError, also for an engine without a host
        cache or on several nodes; CheckpointError; EngineStoppedError.
        """
        return await self._moves.share(
            address, always_load=always_load, check_open=self._check_open
        )

    async def offer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        extras: Sequence[Extra] = (),
    ) -> bool:
        """Compute a prompt, and offer its pages to the other engines; False if there are none.

        Raises as `AsyncEngine.submit` does, and the errors of the request.
        """
        stream = self._submit(
            prompt_token_ids,
            SamplingParams(max_tokens=1),
            request_id=request_id,
            cache_salt=cache_salt,
            tenant=tenant,
            extras=extras,
        )
        try:
            await stream.wait_finished()
        finally:
            stream.abort()
        return await self._moves.exchange.offer(prompt_token_ids, stream.request.namespace)

    async def fetch(
        self,
        address: str,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        extras: Sequence[Extra] = (),
    ) -> bool:
        """Have the engine at `address` send the pages of a prompt that this one lacks.

        Returns whether the cache has any page of the prompt afterwards. Raises InvalidRequestError
        for the salt.
        """
        namespace = cache_namespace(tenant, cache_salt, extras)
        return await self._moves.exchange.fetch(address, prompt_token_ids, namespace)
