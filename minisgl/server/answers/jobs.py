"""The sequences that one request asks for, with the parameters of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minisgl.engine.answer_plan import AnswerPlan
from minisgl.errors import InvalidRequestError
from minisgl.parts.scores.host import check_num_top
from minisgl.request import EVERYONE, MAX_INTEGER, Extra, SamplingParams, Tenant
from minisgl.server.answers.plan import AnswerStyle
from minisgl.server.requests.request_types import (
    NUM_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from minisgl.text.parsing.answer import AnswerParser

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

MAX_SCORES = 1 << 19  # logprobs in an answer: one per token, and one per alternative
SCORES_LIMIT = f"an answer holds at most {MAX_SCORES} logprobs, alternatives included"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One sequence to generate: the input of the engine, and how the result is reported."""

    index: int
    k: int  # which of the n choices of its prompt
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    echo: str | None = None  # the text that the answer begins with
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # the tokens of logprobs are named by their ids
    prompt_logprobs: int | None = None  # to report; `params` may ask for more, to score an echo
    cache_salt: str | None = None
    tenant: Tenant = EVERYONE
    extras: Sequence[Extra] = ()  # of this answer alone, as is the parser
    prompt_extras: Sequence[Extra] = ()  # of its prompt, too: an adapter, images
    prompt_keys: Sequence[int] | None = None  # the prompt as the engine takes it, if it has images
    parser: AnswerParser | None = None
    style: AnswerStyle | None = None  # of an answer that is parsed

    @property
    def submitted(self) -> Sequence[int]:
        """The prompt as the engine takes it."""
        return self.prompt_token_ids if self.prompt_keys is None else self.prompt_keys


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt, cut if the request wants that, and what its answers are sampled with."""

    token_ids: Sequence[int]
    params: SamplingParams


def fitted_prompts(
    engine: AsyncEngine,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    *,
    clamp: bool,
) -> list[FittedPrompt]:
    """The prompts of `body` with the parameters that fit beside each.

    `clamp` shortens max_tokens to the room left. Raises InvalidRequestError.
    """
    params = body.sampling(engine.defaults)
    clamp = clamp or body.asked_max_tokens is None
    num_prompt_tokens = sum(map(len, prompts)) * body.num_choices
    num_choices = len(prompts) * body.num_choices
    scored = scored_room(params, num_prompt_tokens, num_choices)
    found = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("prompt", "has no tokens.")
        most = engine.capacity.max_seq_len - (params.max_tokens or 1)
        if (num_kept := body.truncate_prompt_tokens) is not None:
            prompt = prompt[-(max(most, 1) if num_kept == -1 else num_kept) :]
        room = engine.capacity.max_seq_len - len(prompt)
        fitting = fitted(params, min(room, scored)) if clamp else params
        if params.max_tokens is None and scored < room:
            least = min(params.min_tokens, scored)
            fitting = replace(params, max_tokens=scored, min_tokens=least)
        if fitting.max_tokens is not None and scored < fitting.max_tokens <= room:
            raise InvalidRequestError(
                "logprobs",
                f"{SCORES_LIMIT}: max_tokens of {num_choices} choices may be up to {scored}.",
            )
        found.append(FittedPrompt(prompt, fitting))
    return found


def check_num_logprobs(body: ChatRequest | CompletionRequest, most: int) -> None:
    """As the engine does, which does not know by which fields it was asked."""
    for name in NUM_LOGPROBS:
        asked = getattr(body, name, None)
        if not isinstance(asked, bool):  # as logprobs of a chat
            check_num_top(name, asked, most)


def refuse_with_images(body: ChatRequest | TokenizeRequest) -> None:
    """Raise InvalidRequestError for what a prompt with images cannot have."""
    for name in ("add_special_tokens", "truncate_prompt_tokens"):
        if getattr(body, name, None) not in (None, False):
            raise InvalidRequestError(name, "is not supported for messages with images.")


def jobs_of(
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[FittedPrompt],
    echoes: Sequence[str | None],
    tenant: Tenant,
    plan: AnswerPlan,
    prompt_extras: Sequence[Extra],
    style: AnswerStyle | None = None,
    keys: Sequence[int] | None = None,
) -> list[GenerationJob]:
    """The jobs of `body`: `n` of each prompt, in order. echoes: one for each prompt. prompt_extras:
    of all. keys: of the only prompt, where it has images."""

    def params_of(params: SamplingParams, k: int) -> SamplingParams:
        if k and not body.scores_each_prompt:
            params = replace(params, prompt_logprobs=None)
        return params.for_choice(k)

    return [
        GenerationJob(
            index=index * body.num_choices + k,
            k=k,
            prompt_token_ids=prompt.token_ids,
            prompt_keys=keys,
            params=params_of(prompt.params, k),
            echo=echo,
            cache_salt=body.salt,
            tenant=tenant,
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            prompt_logprobs=body.prompt_logprobs,
            extras=plan.extras(),
            prompt_extras=prompt_extras,
            parser=plan.parser(),
            style=style,
        )
        for index, (prompt, echo) in enumerate(zip(prompts, echoes, strict=True))
        for k in range(body.num_choices)
    ]


def scored_room(params: SamplingParams, num_prompt_tokens: int, num_choices: int) -> int:
    """The number of tokens that each choice may have within MAX_SCORES logprobs of the answer.

    `num_prompt_tokens` are those of all choices; raises InvalidRequestError if they are too many.
    """
    room = MAX_SCORES
    if params.prompt_logprobs is not None:
        room -= num_prompt_tokens * (1 + params.prompt_logprobs)
        if room < 0:
            raise InvalidRequestError(
                "logprobs",
                f"{SCORES_LIMIT}, and those of the prompts alone would be {MAX_SCORES - room}; "
                "send fewer prompts at once or ask for fewer logprobs.",
            )
    num_scores = params.num_scores
    return room // (num_choices * num_scores) if num_scores else MAX_INTEGER


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """`params` with max_tokens shortened to `room`; unchanged if there is no room at all."""
    if params.max_tokens is None or params.max_tokens <= room or room < 1:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
