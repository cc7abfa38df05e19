"""The handlers that generate text, or that turn texts into tokens and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from minisgl.engine.answer_plan import AnswerPlan
from minisgl.engine.conversation import Conversation
from minisgl.errors import CallerError, InvalidRequestError
from minisgl.request import check_token_ids
from minisgl.server.answers.delivery import (
    BackgroundEvents,
    ReplyResponse,
    StreamedResponse,
    WholeResponse,
)
from minisgl.server.answers.jobs import (
    GenerationJob,
    check_num_logprobs,
    fitted_prompts,
    jobs_of,
    refuse_with_images,
)
from minisgl.server.answers.plan import conversation_of, plan_chat, plan_completion, style_of
from minisgl.server.answers.reply import Reply
from minisgl.server.apis.messages.answer_types import TokenCount
from minisgl.server.apis.messages.reply import MessageReply
from minisgl.server.apis.messages.request_types import CountTokensRequest, MessagesRequest, Prompt
from minisgl.server.apis.messages.translation import translated
from minisgl.server.apis.openai import answer_types
from minisgl.server.apis.openai.chat_reply import ChatReply
from minisgl.server.apis.openai.chunked_reply import ChunkedReply
from minisgl.server.apis.openai.completion_reply import CompletionReply
from minisgl.server.apis.responses.answer_types import DeletedResponse
from minisgl.server.apis.responses.background import (
    BackgroundAnswer,
    EventStream,
    RunningResponse,
    at_once,
    events_after,
    starting_after,
)
from minisgl.server.apis.responses.conversation import chat_of, shortened
from minisgl.server.apis.responses.history import History
from minisgl.server.apis.responses.ids import new_response_id
from minisgl.server.apis.responses.reply import ResponsesReply
from minisgl.server.apis.responses.request_types import HOSTED, STREAM_INSTEAD, ResponsesRequest
from minisgl.server.apis.responses.tool_box import ToolBox
from minisgl.server.http.auth import client_of
from minisgl.server.http.encoding import json_response
from minisgl.server.http.request_ids import reply_id
from minisgl.server.http.tracing import span_of
from minisgl.server.requests.constraints import constraint_of
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.requests.translation import TranslatedChat
from minisgl.server.service import Asked, Service

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-minisgl-ignored-keywords"
MANY_TOKENS = 4096  # from which on texts are assembled in a thread

Put = TypeVar("Put")


async def chat_completions(service: Service, asked: Asked[ChatRequest]) -> ASGIApp:
    plan, jobs = await _chat_jobs(service, asked, asked.body)
    return _answer(service, asked, ChatReply, jobs, plan)


async def completions(service: Service, asked: Asked[CompletionRequest]) -> ASGIApp:
    engine, body = asked.engine, asked.body
    check_num_logprobs(body, service.state.options.max_logprobs)
    prompts = body.prompts()
    plan = await plan_completion(body, partial(engine.compile, client=asked.client))
    special = body.add_special_tokens is not False
    cut = body.truncate_prompt_tokens is not None
    token_ids = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            token_ids.append(
                await engine.encode(prompt, add_special_tokens=special, any_length=cut)
            )
            await asyncio.sleep(0)  # short texts are encoded on the loop, and there may be many
        else:
            if len(prompts) > 1:  # the engine checks each, too, but does not know its index
                of = f" of prompt {index}"
                check_token_ids("prompt", prompt, engine.vocab_size, of=of)
            token_ids.append(prompt)
    fitting = fitted_prompts(engine, body, token_ids, clamp=service.state.config.clamp_max_tokens)
    echoes: list[str | None] = [None] * len(prompts)
    if body.echo:
        skip = body.skip_special_tokens is not False
        for index, (prompt, fitted) in enumerate(zip(prompts, fitting, strict=True)):
            is_cut = len(fitted.token_ids) < len(token_ids[index])
            if isinstance(prompt, str) and not is_cut:
                echoes[index] = prompt
            elif engine.tokenizer is None:
                echoes[index] = ""
            else:
                shown = partial(engine.tokenizer.decode, skip_special_tokens=skip)
                echoes[index] = await _put_together(shown, fitted.token_ids)
    tenant = body.tenant(asked.client)
    jobs = jobs_of(body, fitting, echoes, tenant, plan, asked.adapter)
    return _answer(service, asked, CompletionReply, jobs, plan)


async def responses(service: Service, asked: Asked[ResponsesRequest]) -> ASGIApp:
    engine, body = asked.engine, asked.body
    if body.background and not service.store.is_on:
        raise InvalidRequestError("background", STREAM_INSTEAD)
    history = History(service.store, asked.client)
    items = history.conversation(body)
    tools = ToolBox(body.tools or ())
    chat = chat_of(body, items, tools)
    if left_out := chat.left_out:
        kinds = {kind if kind in HOSTED else "others" for kind in left_out}
        logger.info(
            "request %s: left out tools that this server does not run: %s",
            asked.id,
            ", ".join(sorted(kinds)),
        )
    conversation = None
    if body.truncation == "auto":
        chat, conversation = await shortened(chat, engine, service.reading, asked.client)
    with chat.fields_named():
        plan, (job,) = await _chat_jobs(service, asked, chat.body, conversation)
    keeps, keep = service.store.is_on and body.store is not False, partial(history.keep, body)
    reply = ResponsesReply(
        job,
        body,
        model=asked.model,
        tokenizer=engine.tokenizer,
        spaced=tools.spaced,
        id=reply_id(asked.scope),
        response_id=new_response_id(service.state.replica),
        keep=keep if keeps else None,
    )
    if not body.background:
        return _response(service, asked, reply, plan)
    service.running.check_room()
    running = RunningResponse(reply, keep, has_events=bool(body.stream))
    return _response(service, asked, reply, plan, running)


async def stored_response(service: Service, request: Request) -> ASGIApp:
    id, running = request.path_params["id"], _running_for(service, request)
    number = starting_after(request.query_params)
    if number is None:
        body = running.body if running else _history_for(service, request).response(id).body
        return Response(body, media_type="application/json")
    if running is not None and running.has_events:
        return EventStream(running.events_after(number))
    events = b"" if running else _history_for(service, request).response(id).events
    if not events:
        raise InvalidRequestError(
            "stream", "is only allowed for responses made with background: true and stream: true."
        )
    return EventStream(at_once(events_after(events, number)))


async def cancel_response(service: Service, request: Request) -> Response:
    if (running := _running_for(service, request)) is not None:
        await running.cancel()
        body = running.body
    else:
        stored = _history_for(service, request).response(request.path_params["id"])
        if not stored.is_background:
            reason = "is that of a response without background: true, which cannot be cancelled."
            raise InvalidRequestError("response_id", reason)
        body = stored.body
    return Response(body, media_type="application/json")


async def delete_response(service: Service, request: Request) -> Response:
    id = request.path_params["id"]
    if (running := _running_for(service, request)) is not None:
        await running.cancel()
    _history_for(service, request).remove(id)
    return json_response(DeletedResponse(id))


async def messages(service: Service, asked: Asked[MessagesRequest]) -> ASGIApp:
    body = asked.body
    chat = await _translated(service, asked, body)
    with chat.fields_named():
        plan, (job,) = await _chat_jobs(service, asked, chat.body, clamp=True)
    id = reply_id(asked.scope)
    reply = MessageReply(job, body, model=asked.model, id=id, request_id=asked.id)
    return _response(service, asked, reply, plan)


async def count_tokens(service: Service, asked: Asked[CountTokensRequest]) -> Response:
    chat = await _translated(service, asked, asked.body)
    with chat.fields_named():
        chat.body.sampling(asked.engine.defaults)  # refuses what the request itself would be,
        constraint_of(chat.body)  # and so does this
        conversation = await conversation_of(
            asked.engine, chat.body, service.reading, asked.client, any_length=True
        )
    return json_response(TokenCount(len(conversation.prompt_token_ids)))


async def tokenize(service: Service, asked: Asked[TokenizeRequest]) -> Response:
    engine, body = asked.engine, asked.body
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        token_ids = await engine.encode(body.prompt, add_special_tokens=special, any_length=True)
    else:
        conversation = await conversation_of(
            engine, body, service.reading, asked.client, any_length=True
        )
        if conversation.prompt.spans:
            refuse_with_images(body)
        token_ids = _with_special(engine, body, conversation.prompt_token_ids)
    answer = answer_types.Tokens(token_ids, len(token_ids), engine.capacity.max_seq_len)
    if body.return_token_strs and (tokenizer := engine.tokenizer) is not None:
        answer.token_strs = await _put_together(
            lambda ids: [*map(tokenizer.token_text, ids)], token_ids
        )
    return json_response(answer)


async def detokenize(service: Service, asked: Asked[DetokenizeRequest]) -> Response:
    engine, body = asked.engine, asked.body
    if engine.tokenizer is None:
        raise InvalidRequestError("tokens", "the model has no tokenizer.")
    check_token_ids("tokens", body.tokens, engine.vocab_size)
    full_text = partial(engine.tokenizer.decode, skip_special_tokens=False)
    text = await _put_together(full_text, body.tokens)
    return json_response(answer_types.Text(text))


async def tokenizer_info(service: Service, request: Request) -> Response:
    tokenizer = service.state.engine().tokenizer
    if tokenizer is None:
        raise CallerError("The model has no tokenizer.")
    return json_response(answer_types.TokenizerInfo(**tokenizer.described()))


def _running_for(service: Service, request: Request) -> RunningResponse | None:
    """The response in the background that a request is about, unless it has ended."""
    return service.running.find(client_of(request.scope), request.path_params["id"])


def _history_for(service: Service, request: Request) -> History:
    return History(service.store, client_of(request.scope))


async def _translated(service: Service, asked: Asked[Any], body: Prompt) -> TranslatedChat:
    """The chat request that one to the Messages API stands for."""
    chat = translated(
        body,
        system_anywhere=body.has_late_system
        and (await asked.engine.template_facts()).system_anywhere,
        can_think=service.state.answer_format.reasoning is not None,
    )
    if chat.left_out:
        logger.info(
            "request %s: %d tools that this server does not run are left out",
            asked.id,
            len(chat.left_out),
        )
    return chat


async def _chat_jobs(
    service: Service,
    asked: Asked[Any],
    body: ChatRequest,
    conversation: Conversation | None = None,
    *,
    clamp: bool = False,
) -> tuple[AnswerPlan, list[GenerationJob]]:
    """What the answers to a conversation have in common, and the job of each.

    conversation: as it was read already. clamp: shorten max_tokens to the room left, whatever the
    option says.
    """
    engine, config = asked.engine, service.state.config
    check_num_logprobs(body, service.state.options.max_logprobs)
    if conversation is None:
        conversation = await conversation_of(
            engine,
            body,
            service.reading,
            asked.client,
            parallel=body.parallel_tool_calls,
            any_length=body.truncate_prompt_tokens is not None,
        )
    plan = await plan_chat(
        engine,
        body,
        conversation,
        partial(engine.compile, client=asked.client),
        config.tool_parser,
        service.state.answer_format,
    )
    style = style_of(plan, body, conversation, config, service.metrics.count_tool_call)
    prompt, keys = conversation.prompt, None
    if prompt.spans:
        keys = prompt.token_ids
        refuse_with_images(body)
    prompts = [_with_special(engine, body, prompt.shown_token_ids)]
    fitting = fitted_prompts(engine, body, prompts, clamp=clamp or config.clamp_max_tokens)
    tenant, extras = body.tenant(asked.client), (*asked.adapter, *prompt.extras)
    return plan, jobs_of(body, fitting, [body.echoed], tenant, plan, extras, style, keys)


def _with_special(
    engine: AsyncEngine, body: ChatRequest | TokenizeRequest, token_ids: list[int]
) -> list[int]:
    """A conversation, between the special tokens of each text if the request wants these."""
    if not body.add_special_tokens or engine.tokenizer is None:
        return token_ids
    before, after = engine.tokenizer.special_around()
    return [*before, *token_ids, *after]


def _answer(
    service: Service,
    asked: Asked[ChatRequest] | Asked[CompletionRequest],
    kind: type[ChunkedReply],
    jobs: Sequence[GenerationJob],
    plan: AnswerPlan,
) -> ASGIApp:
    body = asked.body
    reply = kind(
        jobs,
        model=asked.model,
        tokenizer=asked.engine.tokenizer,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        fingerprint=service.state.fingerprint,
        id=reply_id(asked.scope),
        limit_field=body.limit_field,
    )
    return _response(service, asked, reply, plan)


def _response(
    service: Service,
    asked: Asked[Any],
    reply: Reply,
    plan: AnswerPlan,
    background: RunningResponse | None = None,
) -> ASGIApp:
    """The response that generates `reply`, if need be in the background."""
    answer: type[ReplyResponse] = StreamedResponse if asked.body.stream else WholeResponse
    if background is not None:
        answer = BackgroundEvents
    headers = []
    if (span := span_of(asked.scope)) is not None:
        span.asked(asked.model, reply.choices[0].job.params, len(reply.choices))
    if ignored := plan.ignored_keywords:
        names = ", ".join(ignored)
        logger.info("request %s: not enforced in its schema: %s", asked.id, names)
        headers.append((IGNORED_HEADER.encode(), names.encode("ascii", "replace")))
    app: ASGIApp = answer(asked.engine, reply, headers)
    if background is not None:
        app = BackgroundAnswer(service.running, asked.client, background, app, headers)
    around = service.state.around
    return app if around is None else around(asked.scope, reply, app)


async def _put_together(texts: Callable[[Sequence[int]], Put], token_ids: Sequence[int]) -> Put:
    """`texts` of these tokens, from a thread if they are many."""
    if len(token_ids) <= MANY_TOKENS:
        return texts(token_ids)
    return await asyncio.to_thread(texts, token_ids)
