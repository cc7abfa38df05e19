"""The handlers of the routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from minisgl.engine.conversation import AnswerPlan
from minisgl.errors import InvalidRequestError
from minisgl.request import check_token_ids
from minisgl.server.answers.delivery import StreamedResponse, WholeResponse
from minisgl.server.answers.jobs import GenerationJob, fitted_prompts, jobs_of
from minisgl.server.answers.plan import conversation_of, plan_chat, plan_completion, style_of
from minisgl.server.answers.reply import Reply
from minisgl.server.apis.messages.answer_types import TokenCount
from minisgl.server.apis.messages.reply import MessageReply
from minisgl.server.apis.messages.request_types import CountTokensRequest, MessagesRequest, Prompt
from minisgl.server.apis.messages.translation import NAMES as MESSAGES_NAMES
from minisgl.server.apis.messages.translation import translated
from minisgl.server.apis.openai import answer_types
from minisgl.server.apis.openai.chat_reply import ChatReply, ParsedReply
from minisgl.server.apis.openai.chunked_reply import ChunkedReply
from minisgl.server.apis.openai.completion_reply import CompletionReply
from minisgl.server.apis.responses.answer_types import DeletedResponse
from minisgl.server.apis.responses.conversation import NAMES as RESPONSES_NAMES
from minisgl.server.apis.responses.conversation import chat_of, shortened
from minisgl.server.apis.responses.history import History
from minisgl.server.apis.responses.ids import new_response_id
from minisgl.server.apis.responses.reply import ResponsesReply
from minisgl.server.apis.responses.request_types import HOSTED, ResponsesRequest
from minisgl.server.apis.responses.store import ResponseStore
from minisgl.server.apis.responses.tool_box import ToolBox
from minisgl.server.asked import Asked, read_asked
from minisgl.server.engine_state import EngineState, NotReadyError
from minisgl.server.history import SECONDS, MetricsHistory
from minisgl.server.http.auth import client_of
from minisgl.server.http.encoding import json_response
from minisgl.server.http.leaving import while_waited_for
from minisgl.server.http.paths import OPEN_PATHS
from minisgl.server.http.request_ids import reply_id
from minisgl.server.metrics import CONTENT_TYPE, Metrics
from minisgl.server.openapi import describe
from minisgl.server.requests.chat_messages import Images
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.requests.templating import Reading
from minisgl.server.requests.translation import TranslatedChat

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
        self._store = ResponseStore(state.config.response_store * MEGABYTE)
        self._since = int(time.time())
        self._clamps = state.config.clamp_max_tokens

    @property
    def _reading(self) -> Reading:
        config = self._state.config
        return Reading(
            control_tokens_in_text=config.control_tokens_in_text,
            images=cast("Images", config.images),  # which checks it
            form=self._state.answer_format().messages,
        )

    @while_waited_for
    async def chat_completions(self, request: Request) -> ASGIApp:
        asked = await read_asked(self._state, request, ChatRequest)
        plan, jobs = await self._chat_jobs(asked, asked.body)
        kind = ChatReply if plan.form is None else ParsedReply
        return self._answer(asked, kind, jobs, plan)

    @while_waited_for
    async def completions(self, request: Request) -> ASGIApp:
        asked = await read_asked(self._state, request, CompletionRequest)
        engine, body = asked.engine, asked.body
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
        fitting = fitted_prompts(engine, body, token_ids, clamp=self._clamps)
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
        jobs = jobs_of(body, fitting, echoes, body.tenant(asked.client), plan)
        return self._answer(asked, CompletionReply, jobs, plan)

    @while_waited_for
    async def responses(self, request: Request) -> ASGIApp:
        with RESPONSES_NAMES.used():
            asked = await read_asked(self._state, request, ResponsesRequest)
            engine, body = asked.engine, asked.body
            history = self._history(request)
            items = history.conversation(body)
            tools = ToolBox(body.tools or ())
            chat = chat_of(
                body,
                items,
                tools,
                images=body.images or self._reading.images,
            )
        if left_out := chat.left_out:
            kinds = {kind if kind in HOSTED else "others" for kind in left_out}
            logger.info(
                "request %s: left out tools that this server does not run: %s",
                asked.id,
                ", ".join(sorted(kinds)),
            )
        with chat.fields_named():
            if body.truncation == "auto":
                chat = await shortened(chat, engine, self._reading)
            plan, (job,) = await self._chat_jobs(asked, chat.body)
        keeps = self._store.is_on and body.store is not False
        reply = ResponsesReply(
            job,
            body,
            model=asked.model,
            tokenizer=engine.tokenizer,
            spaced=tools.spaced,
            id=reply_id(request.scope),
            response_id=new_response_id(self._state.replica),
            keep=partial(history.keep, body) if keeps else None,
        )
        return self._response(asked, reply, plan, RESPONSES_NAMES.limit_field)

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
        asked = await read_asked(self._state, request, MessagesRequest)
        body = asked.body
        chat = await self._translated(asked, body)
        with chat.fields_named():
            plan, (job,) = await self._chat_jobs(asked, chat.body, clamp=True)
        id = reply_id(request.scope)
        reply = MessageReply(job, body, model=asked.model, id=id, request_id=asked.id)
        return self._response(asked, reply, plan, MESSAGES_NAMES.limit_field)

    @while_waited_for
    async def count_tokens(self, request: Request) -> Response:
        asked = await read_asked(self._state, request, CountTokensRequest)
        chat = await self._translated(asked, asked.body)
        with chat.fields_named():
            chat.body.sampling(asked.engine.defaults)  # refuses what the request itself would be
            conversation = await conversation_of(
                asked.engine, chat.body, self._reading, any_length=True
            )
        return json_response(TokenCount(len(conversation.prompt_token_ids)))

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._state.model_names()]
        return json_response(answer_types.ModelList(object="list", data=data))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        # As Starlette redirects paths with a trailing slash. It treats "\n" as an empty name too.
        if not name and request.scope["path"].endswith("/"):
            path = request.url.path.removesuffix("/")
            return RedirectResponse(str(request.url.replace(path=path)))
        return json_response(self._model(self._state.model_name(name)))

    @while_waited_for
    async def tokenize(self, request: Request) -> Response:
        asked = await read_asked(self._state, request, TokenizeRequest)
        engine, body = asked.engine, asked.body
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            token_ids = await engine.encode(
                body.prompt, add_special_tokens=special, any_length=True
            )
        else:
            conversation = await conversation_of(engine, body, self._reading, any_length=True)
            token_ids = conversation.prompt_token_ids
        answer = answer_types.Tokens(token_ids, len(token_ids), engine.capacity.max_seq_len)
        if body.return_token_strs and (tokenizer := engine.tokenizer) is not None:
            answer.token_strs = await _put_together(
                lambda ids: [*map(tokenizer.token_text, ids)], token_ids
            )
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        asked = await read_asked(self._state, request, DetokenizeRequest)
        engine, body = asked.engine, asked.body
        if engine.tokenizer is None:
            raise InvalidRequestError("tokens", "the model has no tokenizer.")
        check_token_ids("tokens", body.tokens, engine.vocab_size)
        full_text = partial(engine.tokenizer.decode, skip_special_tokens=False)
        text = await _put_together(full_text, body.tokens)
        return json_response(answer_types.Text(text))

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
        return json_response(answer_types.Health(status="ready"))

    async def version(self, request: Request) -> Response:
        return json_response(answer_types.Version(metadata.version("minisgl")))

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def metrics_history(self, request: Request) -> Response:
        samples = self._state.history.samples()
        return json_response(MetricsHistory(SECONDS, {"": samples}))

    async def openapi(self, request: Request) -> Response:
        with_key = bool(self._state.config.api_key)
        routes = request.app.routes
        root_path = self._state.config.root_path
        return json_response(
            describe(routes, open_paths=OPEN_PATHS, with_key=with_key, root_path=root_path)
        )

    def _model(self, name: str) -> answer_types.Model:
        engine = self._state.engine()
        return answer_types.Model(
            id=name,
            object="model",
            created=self._since,
            owned_by="minisgl",
            max_model_len=engine.capacity.max_seq_len,
            vocab_size=engine.vocab_size,
            task=engine.vectors.task,
        )

    def _history(self, request: Request) -> History:
        return History(self._store, client_of(request.scope))

    async def _translated(self, asked: Asked[Any], body: Prompt) -> TranslatedChat:
        """The chat request that one to the Messages API stands for."""
        chat = translated(
            body,
            system_anywhere=body.has_late_system
            and (await asked.engine.template_facts()).system_anywhere,
            can_think=self._state.answer_format().reasoning is not None,
            images=body.images or self._reading.images,
        )
        if chat.left_out:
            logger.info(
                "request %s: %d tools that this server does not run are left out",
                asked.id,
                len(chat.left_out),
            )
        return chat

    async def _chat_jobs(
        self, asked: Asked[Any], body: ChatRequest, *, clamp: bool = False
    ) -> tuple[AnswerPlan, list[GenerationJob]]:
        """What the answers to a conversation have in common, and the job of each.

        clamp: shorten max_tokens to the room left, whatever the option says.
        """
        engine = asked.engine
        conversation = await conversation_of(
            engine,
            body,
            self._reading,
            parallel=body.parallel_tool_calls,
            any_length=body.truncate_prompt_tokens is not None,
        )
        plan = await plan_chat(
            engine,
            body,
            conversation,
            partial(engine.compile, client=asked.client),
            self._state.config.tool_parser,
            self._state.answer_format(),
        )
        config, count_call = self._state.config, self._metrics.count_tool_call
        style = style_of(plan, body, conversation, config, count_call)
        prompts = [conversation.prompt_token_ids]
        fitting = fitted_prompts(engine, body, prompts, clamp=clamp or self._clamps)
        return plan, jobs_of(body, fitting, [body.echoed], body.tenant(asked.client), plan, style)

    def _answer(
        self,
        asked: Asked[ChatRequest] | Asked[CompletionRequest],
        kind: type[ChunkedReply[Any]],
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
            fingerprint=self._state.fingerprint,
            id=reply_id(asked.scope),
        )
        return self._response(asked, reply, plan, body.limit_field)

    def _response(
        self, asked: Asked[Any], reply: Reply, plan: AnswerPlan, limit_field: str
    ) -> ASGIApp:
        """The response that generates `reply`."""
        answer = StreamedResponse if asked.body.stream else WholeResponse
        headers = []
        if ignored := plan.ignored_keywords:
            names = ", ".join(ignored)
            logger.info("request %s: not enforced in its schema: %s", asked.id, names)
            headers.append((IGNORED_HEADER.encode(), names.encode("ascii", "replace")))
        app = answer(asked.engine, reply, limit_field=limit_field, headers=headers)
        around = self._state.around
        return app if around is None else around(asked.scope, reply, app)


async def _put_together(texts: Callable[[Sequence[int]], Put], token_ids: Sequence[int]) -> Put:
    """`texts` of these tokens, from a thread if they are many."""
    if len(token_ids) <= MANY_TOKENS:
        return texts(token_ids)
    return await asyncio.to_thread(texts, token_ids)
