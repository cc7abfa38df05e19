"""Everything between what a caller asks for and a request that the scheduler can queue."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from minisgl.engine.images import Images
from minisgl.engine.startup import Loaded
from minisgl.engine.stats import Meter
from minisgl.engine.texts import Texts
from minisgl.errors import ContextLengthError, InvalidRequestError, MinisglError
from minisgl.grammar.compiler import Compiled, Grammars
from minisgl.images.fetching import Fetcher
from minisgl.request import (
    MAX_EDITS,
    Extra,
    Request,
    SamplingParams,
    StructuredOutput,
    Tenant,
    check_token_ids,
)
from minisgl.scheduler.parts import Part


class Intake:
    """Tokenizes, compiles and checks, and makes requests. Used on the engine's loop."""

    def __init__(self, loaded: Loaded[Any], parts: Sequence[Part], meter: Meter) -> None:
        """parts: that requests may ask for."""
        self._config = loaded.config
        self._tokenizer = loaded.tokenizer
        self._vocab_size = loaded.model.vocab_size
        self._eos_token_ids = loaded.defaults.eos_token_ids
        self._max_seq_len = loaded.capacity.max_seq_len
        self._parts = parts
        self._meter = meter
        self._texts: Texts | None = None
        self._images: Images | None = None
        if self._tokenizer is not None:
            self._texts = Texts(
                self._tokenizer,
                max_seq_len=self._max_seq_len,
                num_places=self._config.max_running_requests + self._config.max_queued_requests,
            )
            fetcher = Fetcher(self._config.image_hosts)
            self._images = Images(self._texts, self._tokenizer, loaded.images, fetcher)
        self._grammars: Grammars | None = None  # made when first needed

    @property
    def texts(self) -> Texts:
        """What turns texts into token ids. Raises InvalidRequestError without a tokenizer."""
        if self._texts is None:
            raise InvalidRequestError("prompt", "the model has no tokenizer; send token ids.")
        return self._texts

    @property
    def images(self) -> Images:
        """What turns conversations into prompts. Raises as `texts` does."""
        if self._images is None:
            raise InvalidRequestError("messages", "the model has no tokenizer.")
        return self._images

    def warm(self) -> None:
        """Start what the first conversation would wait for: its processes."""
        if self._texts is not None and self._tokenizer and self._tokenizer.has_chat_template:
            self._texts.warm()
        if self._images is not None:
            self._images.warm()

    async def compile(self, structured: StructuredOutput | None, client: str) -> Compiled:
        """Compile a constraint; see `AsyncEngine.compile`."""
        if self._tokenizer is None:
            raise InvalidRequestError("structured", "the model has no tokenizer.")
        if self._grammars is None:
            self._grammars = Grammars(
                self._tokenizer,
                self._vocab_size,
                self._eos_token_ids,
                observe=self._meter.grammar_compiled,
            )
        if structured is None:
            return await self._grammars.unconstrained()
        return await self._grammars.compile(structured, client)

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the model cannot serve `params`."""
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop", "the model has no tokenizer to match strings with.")
        check_token_ids("stop_token_ids", params.stop_token_ids, self._vocab_size)
        check_token_ids("logit_bias", params.logit_bias.keys(), self._vocab_size)
        check_token_ids("allowed_token_ids", params.allowed_token_ids or (), self._vocab_size)
        if params.bad_words and self._tokenizer is None:
            raise InvalidRequestError("bad_words", "the model has no tokenizer to find them with.")

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        tenant: Tenant,
        cache_salt: str | None,
        extras: Sequence[Extra],
    ) -> Request:
        """Make a request. extras: what it asks of parts beside its parameters.

        Raises InvalidRequestError or ContextLengthError.
        """
        text = prompt
        for extra in extras:
            text = extra.as_text(text)
        check_token_ids("prompt", text, self._vocab_size)
        self.check(params)
        given = {type(extra): extra for extra in extras}
        kinds = {part.kind for part in self._parts}
        assert len(given) == len(extras) and given.keys() <= kinds, "no part knows one of extras"
        asked = [
            part.extra(params, prompt, given.get(part.kind)) for part in self._parts if part.kind
        ]
        extras = tuple(extra for extra in asked if extra is not None)
        max_tokens = params.max_tokens if all(extra.samples for extra in extras) else 0
        if max_tokens is None:
            max_tokens = self._max_seq_len - len(prompt)
            if max_tokens < 1:
                raise ContextLengthError(len(prompt), None, self._max_seq_len)
        request = Request(
            request_id,
            prompt,
            params,
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids,
            tenant=tenant,
            cache_salt=cache_salt,
            extras=extras,
        )
        if len(params.logit_bias) + len(request.stop_token_ids) > MAX_EDITS:
            raise InvalidRequestError(
                "logit_bias", f"with stop tokens and EOS at most {MAX_EDITS} entries are allowed."
            )
        return request

    async def drain(self, timeout_s: float, reason: MinisglError) -> None:
        """Wait for the callers whose texts are being tokenized, since they may still submit
        requests, and then fail all pending work with `reason`. Idempotent."""
        if self._texts is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._texts.settle(), timeout_s)
            self._texts.close(reason)
        if self._images is not None:
            self._images.close(reason)
        if self._grammars is not None:
            self._grammars.close()

    def abandon(self) -> None:
        """End the threads once the event loop has stopped. Any thread may call it."""
        if self._texts is not None:
            self._texts.end()
        if self._images is not None:
            self._images.end()
        if self._grammars is not None:
            self._grammars.close()

    def join(self) -> None:
        """Block until the threads have ended, for a few seconds at most. Call `drain` before."""
        for part in (self._texts, self._images, self._grammars):
            if part is not None:
                part.join()
