"""The handlers of the routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from minisgl.errors import InvalidRequestError
from minisgl.request import check_token_ids
from minisgl.server import schemas
from minisgl.server.access_log import request_id
from minisgl.server.answer_plan import (
    AnswerPlan,
    ChatPlanner,
    plan_completion,
    read_conversation,
)
from minisgl.server.auth import OPEN_PATHS, client_of
from minisgl.server.bodies import read_body
from minisgl.server.chat_reply import ChatReply
from minisgl.server.chunked_replies import ChunkedReply
from minisgl.server.completion_reply import CompletionReply
from minisgl.server.engine_state import EngineState, NotReadyError
from minisgl.server.error_responses import json_response
from minisgl.server.jobs import GenerationJob, jobs_of
from minisgl.server.leaving import while_waited_for
from minisgl.server.messages import Images, Reading
from minisgl.server.messages_api.protocol import (
    CountTokensRequest,
    MessagesRequest,
    Prompt,
    StrictCountTokensRequest,
    StrictMessagesRequest,
)
from minisgl.server.messages_api.reply import MessageReply, MessageStyle
from minisgl.server.messages_api.schemas import TokenCount
from minisgl.server.messages_api.translation import Translation, translated
from minisgl.server.metrics import CONTENT_TYPE, Metrics
from minisgl.server.openapi import describe
from minisgl.server.parsed_reply import ParsedReply
from minisgl.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StrictChatRequest,
    StrictCompletionRequest,
    StrictDetokenizeRequest,
    StrictTokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.replies import Reply
from minisgl.server.request_ids import reply_id
from minisgl.server.responses import StreamedResponse, WholeResponse
from minisgl.server.responses_api import conversation as responses_conversation
from minisgl.server.responses_api.conversation import LIMIT_FIELD, chat_of
from minisgl.server.responses_api.history import History, has_late_system
from minisgl.server.responses_api.ids import new_response_id
from minisgl.server.responses_api.protocol import (
    HOSTED,
    ResponsesRequest,
    StrictResponsesRequest,
)
from minisgl.server.responses_api.reply import ResponsesReply
from minisgl.server.responses_api.schemas import DeletedResponse
from minisgl.server.responses_api.store import ResponseStore
from minisgl.server.responses_api.truncation import shortened
from minisgl.server.served_engine import ServedEngine, ServedTokenizer

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-minisgl-ignored-keywords"
MEGABYTE = 1_000_000
MANY_TOKENS = 4096  # from which on texts are assembled in a thread

Put = TypeVar("Put")


class Routes:
    """The handlers. Each request reads the engine state again, because its phase changes."""

    def __init__(self, state: EngineState, metrics: Metrics) -> None:
        self._state = state
        self._metrics = metrics
        strict = state.config.strict_fields
        self._chat_request = StrictChatRequest if strict else ChatRequest
        self._completion_request = StrictCompletionRequest if strict else CompletionRequest
        self._responses_request = StrictResponsesRequest if strict else ResponsesRequest
        self._tokenize_request = StrictTokenizeRequest if strict else TokenizeRequest
        self._detokenize_request = StrictDetokenizeRequest if strict else DetokenizeRequest
        self._messages_request = StrictMessagesRequest if strict else MessagesRequest
        self._count_request = StrictCountTokensRequest if strict else CountTokensRequest
        self._store = ResponseStore(state.config.response_store * MEGABYTE)
        self._reading = Reading(
            control_tokens_in_text=state.config.control_tokens_in_text,
            images=cast("Images", state.config.images),  # which checks it
        )
        self._since = int(time.time())

    @while_waited_for
    async def chat_completions(self, request: Request) -> ASGIApp:
        engine = self._state.engine()
        body = await read_body(request, self._chat_request)
        model = self._state.model_name(body.model)
        plan, jobs = await self._chat_jobs(request, engine, body)
        echo = body.echoed
        for job in jobs:
            job.echo = echo
        for job in jobs[1:]:  # the prompt is reported once
            job.params = replace(job.params, prompt_logprobs=None)
        kind = ChatReply if plan.style is None else ParsedReply
        return self._answer(request, engine, body, model, kind, jobs, plan)

    @while_waited_for
    async def completions(self, request: Request) -> ASGIApp:
        engine = self._state.engine()
        body = await read_body(request, self._completion_request)
        model = self._state.model_name(body.model)
        prompts = body.prompts()
        plan = await plan_completion(body, partial(engine.compile, client=client_of(request.scope)))
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
                if (
                    len(prompts) > 1
                ):  # the engine checks each prompt too, but does not know its index
                    of = f" of prompt {index}"
                    check_token_ids("prompt", prompt, engine.vocab_size, of=of)
                token_ids.append(prompt)
        jobs = self._jobs(request, engine, body, token_ids, plan)
        if body.echo:
            shown = _visible_text if body.skip_special_tokens is not False else _full_text
            for start, prompt in enumerate(prompts):
                first, *others = jobs[start * body.num_choices :][: body.num_choices]
                ids = first.prompt_token_ids
                if isinstance(prompt, str) and len(ids) == len(token_ids[start]):
                    first.echo = prompt
                else:
                    first.echo = await _text(engine, shown, ids)
                for job in others:
                    job.echo = first.echo
        return self._answer(request, engine, body, model, CompletionReply, jobs, plan)

    @while_waited_for
    async def responses(self, request: Request) -> ASGIApp:
        engine = self._state.engine()
        with responses_conversation.fields_named():
            body = await read_body(request, self._responses_request)
            model = self._state.model_name(body.model)
            history = self._history(request)
            items = history.conversation(body)
            anywhere = False
            if has_late_system(items):
                anywhere = (await engine.template_facts()).system_anywhere
            images = body.images or self._reading.images
            chat = chat_of(body, items, system_anywhere=anywhere, images=images)
        if left_out := chat.tools.left_out:
            kinds = {kind if kind in HOSTED else "others" for kind in left_out}
            logger.info(
                "request %s: left out tools that this server does not run: %s",
                *(request_id(request.scope), ", ".join(sorted(kinds))),
            )
        with chat.fields_named():
            if body.truncation == "auto":
                chat = await shortened(chat, engine, self._reading)
            plan, (job,) = await self._chat_jobs(request, engine, chat.body)
        keeps = self._store.is_on and body.store is not False
        reply = ResponsesReply(
            job,
            body,
            model=model,
            tokenizer=engine.tokenizer,
            spaced=chat.tools.spaced,
            id=reply_id(request.scope),
            response_id=new_response_id(self._state.replica),
            keep=partial(history.keep, body) if keeps else None,
        )
        return self._response(
            request, engine, reply, plan, stream=body.stream, limit_field=LIMIT_FIELD
        )

    async def stored_response(self, request: Request) -> Response:
        """Show a response that is kept, or delete it."""
        id, history = request.path_params["id"], self._history(request)
        if request.method == "DELETE":
            history.remove(id)
            return json_response(DeletedResponse(id))
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError("stream", "is not supported for an answer that has ended.")
        return Response(history.body_of(id), media_type="application/json")

    @while_waited_for
    async def messages(self, request: Request) -> ASGIApp:
        engine = self._state.engine()
        body = await read_body(request, self._messages_request)
        model = self._state.model_name(body.model)
        chat = await self._translated(request, engine, body)
        with chat.fields_named():
            plan, (job,) = await self._chat_jobs(request, engine, chat.request, clamp=True)
        style = MessageStyle(
            id=f"msg_{reply_id(request.scope)}",
            model=model,
            max_tokens=body.max_tokens,
            thinking=body.shown_thinking,
        )
        reply = MessageReply(job, style, request_id(request.scope))
        return self._response(
            request, engine, reply, plan, stream=body.stream, limit_field="max_tokens"
        )

    @while_waited_for
    async def count_tokens(self, request: Request) -> Response:
        engine = self._state.engine()
        body = await read_body(request, self._count_request)
        self._state.model_name(body.model)
        chat = await self._translated(request, engine, body)
        with chat.fields_named():
            conversation = await read_conversation(
                engine, chat.request, self._reading, any_length=True
            )
        return json_response(TokenCount(len(conversation.prompt_token_ids)))

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._state.model_names()]
        return json_response(schemas.ModelList(object="list", data=data))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        # As Starlette redirects paths with a trailing slash. It treats "\n" as an empty name too.
        if not name and request.scope["path"].endswith("/"):
            path = request.url.path.removesuffix("/")
            return RedirectResponse(str(request.url.replace(path=path)))
        return json_response(self._model(self._state.model_name(name)))

    @while_waited_for
    async def tokenize(self, request: Request) -> Response:
        engine = self._state.engine()
        body = await read_body(request, self._tokenize_request)
        self._state.model_name(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            token_ids = await engine.encode(
                body.prompt, add_special_tokens=special, any_length=True
            )
        else:
            conversation = await read_conversation(engine, body, self._reading, any_length=True)
            token_ids = conversation.prompt_token_ids
        answer = schemas.Tokens(token_ids, len(token_ids), engine.capacity.max_seq_len)
        if body.return_token_strs and engine.tokenizer is not None:
            answer.token_strs = await _put_together(_token_texts, engine.tokenizer, token_ids)
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        engine = self._state.engine()
        body = await read_body(request, self._detokenize_request)
        self._state.model_name(body.model)
        if engine.tokenizer is None:
            raise InvalidRequestError("tokens", "the model has no tokenizer.")
        check_token_ids("tokens", body.tokens, engine.vocab_size)
        text = await _put_together(_full_text, engine.tokenizer, body.tokens)
        return json_response(schemas.Text(text))

    async def hint(self, request: Request) -> Response:
        """Answers at / where there is no page, for people and for probes."""
        return PlainTextResponse(
            "This is minisgl. Its API is at /v1 (base URL of OpenAI clients), and described at "
            "/openapi.json.\n"
        )

    async def health(self, request: Request) -> Response:
        stalled = self._state.engine().stalled
        if stalled is not None:
            raise NotReadyError("stalled", stalled)
        return json_response(schemas.Health(status="ready"))

    async def version(self, request: Request) -> Response:
        return json_response(schemas.Version(metadata.version("minisgl")))

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        with_key = bool(self._state.config.api_key)
        routes = request.app.routes
        root_path = self._state.config.root_path
        return json_response(
            describe(routes, open_paths=OPEN_PATHS, with_key=with_key, root_path=root_path)
        )

    def _model(self, name: str) -> schemas.Model:
        engine = self._state.engine()
        return schemas.Model(
            id=name,
            object="model",
            created=self._since,
            owned_by="minisgl",
            max_model_len=engine.capacity.max_seq_len,
            vocab_size=engine.vocab_size,
        )

    def _history(self, request: Request) -> History:
        return History(self._store, client_of(request.scope))

    def _planner(self) -> ChatPlanner:
        config = self._state.config
        return ChatPlanner(
            form=self._state.answer_format(),
            tool_parser=config.tool_parser,
            reasoning_fields=config.reasoning_fields,
            count_call=self._metrics.count_tool_call,
        )

    async def _translated(
        self, request: Request, engine: ServedEngine, body: Prompt
    ) -> Translation:
        """The chat request that one to the Messages API stands for."""
        anywhere = False
        if body.has_late_system:
            anywhere = (await engine.template_facts()).system_anywhere
        can_think = self._state.answer_format().reasoning is not None
        chat = translated(
            body,
            system_anywhere=anywhere,
            can_think=can_think,
            images=body.images or self._reading.images,
        )
        if chat.num_server_tools:
            logger.info(
                "request %s: %d tools that this server does not run are left out",
                request_id(request.scope),
                chat.num_server_tools,
            )
        return chat

    async def _chat_jobs(
        self, request: Request, engine: ServedEngine, body: ChatRequest, *, clamp: bool = False
    ) -> tuple[AnswerPlan, list[GenerationJob]]:
        """What the answers to a conversation have in common, and the job of each.

        clamp: shorten max_tokens to the room left, whatever the option says.
        """
        conversation = await read_conversation(
            engine,
            body,
            self._reading,
            parallel=body.parallel_tool_calls,
            any_length=body.truncate_prompt_tokens is not None,
        )
        plan = await self._planner().plan(
            engine, body, conversation, partial(engine.compile, client=client_of(request.scope))
        )
        prompt = conversation.prompt_token_ids
        return plan, self._jobs(request, engine, body, [prompt], plan, clamp=clamp)

    def _jobs(
        self,
        request: Request,
        engine: ServedEngine,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        plan: AnswerPlan,
        *,
        clamp: bool = False,
    ) -> list[GenerationJob]:
        tenant = body.tenant(client_of(request.scope))
        clamp = clamp or self._state.config.clamp_max_tokens
        return jobs_of(engine, body, prompts, tenant=tenant, clamp=clamp, plan=plan)

    def _answer(
        self,
        request: Request,
        engine: ServedEngine,
        body: ChatRequest | CompletionRequest,
        model: str,
        kind: type[ChunkedReply[Any]],
        jobs: Sequence[GenerationJob],
        plan: AnswerPlan,
    ) -> ASGIApp:
        reply = kind(
            jobs,
            model=model,
            tokenizer=engine.tokenizer,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            fingerprint=self._state.fingerprint,
            id=reply_id(request.scope),
        )
        return self._response(
            request, engine, reply, plan, stream=body.stream, limit_field=body.limit_field
        )

    def _response(
        self,
        request: Request,
        engine: ServedEngine,
        reply: Reply,
        plan: AnswerPlan,
        *,
        stream: bool | None,
        limit_field: str,
    ) -> ASGIApp:
        """The response that generates `reply`."""
        answer = StreamedResponse if stream else WholeResponse
        headers = []
        if ignored := plan.ignored_keywords:
            names = ", ".join(ignored)
            logger.info(
                "request %s: not enforced in its schema: %s", request_id(request.scope), names
            )
            headers.append((IGNORED_HEADER.encode(), names.encode("ascii", "replace")))
        app = answer(engine, reply, limit_field=limit_field, headers=headers)
        around = self._state.around
        return app if around is None else around(request.scope, reply, app)


def _visible_text(tokenizer: ServedTokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids)


def _full_text(tokenizer: ServedTokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def _token_texts(tokenizer: ServedTokenizer, token_ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in token_ids]


async def _text(
    engine: ServedEngine,
    shown: Callable[[ServedTokenizer, Sequence[int]], str],
    token_ids: Sequence[int],
) -> str:
    """The text of a prompt; empty if the model has no tokenizer."""
    if engine.tokenizer is None:
        return ""
    return await _put_together(shown, engine.tokenizer, token_ids)


async def _put_together(
    texts: Callable[[ServedTokenizer, Sequence[int]], Put],
    tokenizer: ServedTokenizer,
    token_ids: Sequence[int],
) -> Put:
    if len(token_ids) <= MANY_TOKENS:
        return texts(tokenizer, token_ids)
    return await asyncio.to_thread(texts, tokenizer, token_ids)
