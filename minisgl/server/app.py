"""The routes, and what guards them. Everything that goes wrong is told in OpenAI's envelope."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CallerError, InvalidRequestError, MinisglError, foreseen
from minisgl.request import check_token_ids
from minisgl.server import schemas
from minisgl.server.access_log import Observe, log_failure, request_id
from minisgl.server.bodies import BodyBudget
from minisgl.server.engine_state import EngineState, NotReadyError
from minisgl.server.faults import AnswerFaults, HTTPError, raise_fault
from minisgl.server.hosts import CheckHost, Hosts
from minisgl.server.metrics import CONTENT_TYPE, Metrics
from minisgl.server.openapi import describe
from minisgl.server.protocol import (
    SCORES_LIMIT,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StrictChatRequest,
    StrictCompletionRequest,
    StrictDetokenizeRequest,
    StrictTokenizeRequest,
    TokenizeRequest,
    decode,
    fitted,
    for_choice,
    scored_room,
    truncated,
)
from minisgl.server.replies import (
    ChatChoice,
    Choice,
    CompletionChoice,
    Job,
    Reply,
    encode,
    error_body,
)
from minisgl.server.request_ids import HEADER, RequestIds, reply_id
from minisgl.server.responses import StreamedResponse, WholeResponse
from minisgl.server.root_path import RootPath, route_path
from minisgl.server.served_engine import ServedEngine, ServedTokenizer

MAX_BODY_BYTES = 16 << 20
# Numbers, texts, lists and objects in a body: decoding so many holds the loop for some 50 ms.
MAX_VALUES = 1 << 19
MANY_TOKENS = 4096  # whose texts are put together in a thread
CLIENT = "client"  # in the state of a scope
OPEN_PATHS = frozenset(("/health", "/metrics", "/version"))  # for probes, which carry no key

Put = TypeVar("Put")


def create_app(state: EngineState, hosts: Hosts | None = None) -> Starlette:
    """The application. With `hosts` it answers only requests that name one of them."""
    metrics = Metrics(state)
    routes = Routes(state, metrics)
    config = state.config
    middleware = [
        Middleware(Observe, metrics=metrics, error_response=_error_response),
        Middleware(AnswerFaults, error_response=_error_response),
    ]
    if hosts is not None:
        middleware.append(Middleware(CheckHost, hosts=hosts, error_response=_error_response))
    if config.api_key:
        middleware.append(Middleware(RequireKey, keys=config.api_key))
    if config.cors_origin:
        # Outside of all, because browsers send no key with their preflight, and show a page only
        # those errors that have the headers too.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", HEADER],
        )
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(RequestIds))
    if config.root_path:
        middleware.insert(0, Middleware(RootPath, prefix=config.root_path))
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
        ],
        middleware=middleware,
        exception_handlers={
            MinisglError: _answer_error,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_nobody,
        },
    )
    app.state.bodies = BodyBudget()
    return app


class Routes:
    """The handlers. They look at the state anew in each request, for it changes phase."""

    def __init__(self, state: EngineState, metrics: Metrics) -> None:
        self._state = state
        self._metrics = metrics
        strict = state.config.strict_fields
        self._chat_request = StrictChatRequest if strict else ChatRequest
        self._completion_request = StrictCompletionRequest if strict else CompletionRequest
        self._tokenize_request = StrictTokenizeRequest if strict else TokenizeRequest
        self._detokenize_request = StrictDetokenizeRequest if strict else DetokenizeRequest
        self._since = int(time.time())

    async def chat_completions(self, request: Request) -> ASGIApp:
        engine = self._state.engine()
        body = await _read(request, self._chat_request)
        model = self._state.model_name(body.model)
        cut = body.truncate_prompt_tokens is not None
        prompt = await engine.encode_chat(body.template_messages(), cut, **body.template_options())
        jobs = self._jobs(request, engine, body, [prompt])
        echo = body.echoed
        for job in jobs:
            job.echo = echo
        for job in jobs[1:]:  # the prompt is reported once
            job.params = replace(job.params, prompt_logprobs=None)
        return _answer(request, engine, body, model, ChatChoice, jobs)

    async def completions(self, request: Request) -> ASGIApp:
        engine = self._state.engine()
        body = await _read(request, self._completion_request)
        model = self._state.model_name(body.model)
        prompts = body.prompts()
        special = body.add_special_tokens is not False
        cut = body.truncate_prompt_tokens is not None
        token_ids = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                token_ids.append(
                    await engine.encode(prompt, add_special_tokens=special, any_length=cut)
                )
                await asyncio.sleep(0)  # short texts are encoded on the loop, and may be many
            else:
                if len(prompts) > 1:  # the engine checks too, and sees one prompt at a time
                    of = f" of prompt {index}"
                    check_token_ids("prompt", prompt, engine.vocab_size, of=of)
                token_ids.append(prompt)
        jobs = self._jobs(request, engine, body, token_ids)
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
        return _answer(request, engine, body, model, CompletionChoice, jobs)

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._state.model_names()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        # As Starlette does where a slash too many leads to no route. It takes "\n" for no name too.
        if not name and request.scope["path"].endswith("/"):
            path = request.url.path.removesuffix("/")
            return RedirectResponse(str(request.url.replace(path=path)))
        return _json(self._model(self._state.model_name(name)))

    async def tokenize(self, request: Request) -> Response:
        engine = self._state.engine()
        body = await _read(request, self._tokenize_request)
        self._state.model_name(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            token_ids = await engine.encode(
                body.prompt, add_special_tokens=special, any_length=True
            )
        else:
            token_ids = await engine.encode_chat(
                body.template_messages(), True, **body.template_options()
            )
        answer = schemas.Tokens(token_ids, len(token_ids), engine.capacity.max_seq_len)
        if body.return_token_strs and engine.tokenizer is not None:
            answer.token_strs = await _put_together(_token_texts, engine.tokenizer, token_ids)
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        engine = self._state.engine()
        body = await _read(request, self._detokenize_request)
        self._state.model_name(body.model)
        if engine.tokenizer is None:
            raise InvalidRequestError("tokens", "the model has no tokenizer.")
        check_token_ids("tokens", body.tokens, engine.vocab_size)
        return _json(schemas.Text(await _put_together(_full_text, engine.tokenizer, body.tokens)))

    async def health(self, request: Request) -> Response:
        stalled = self._state.engine().stalled
        if stalled is not None:
            raise NotReadyError("stalled", stalled)
        return _json({"status": "ready"})

    async def version(self, request: Request) -> Response:
        return _json({"version": metadata.version("minisgl")})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        with_key = bool(self._state.config.api_key)
        routes = request.app.routes
        root_path = self._state.config.root_path
        return _json(
            describe(routes, open_paths=OPEN_PATHS, with_key=with_key, root_path=root_path)
        )

    def _model(self, name: str) -> dict[str, object]:
        engine = self._state.engine()
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "minisgl",
            "max_model_len": engine.capacity.max_seq_len,
            "vocab_size": engine.vocab_size,
        }

    def _jobs(
        self,
        request: Request,
        engine: ServedEngine,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
    ) -> list[Job]:
        params = body.sampling(engine.defaults)
        tenant = body.tenant(client_of(request.scope))
        clamp = self._state.config.clamp_max_tokens or body.asked_max_tokens is None
        num_prompt_tokens = sum(map(len, prompts)) * body.num_choices
        num_choices = len(prompts) * body.num_choices
        scored = scored_room(params, num_prompt_tokens, num_choices)
        jobs = []
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise InvalidRequestError("prompt", "has no tokens.")
            most = engine.capacity.max_seq_len - (params.max_tokens or 1)
            prompt = truncated(prompt, body.truncate_prompt_tokens, most)
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
            for k in range(body.num_choices):
                jobs.append(
                    Job(
                        index=index * body.num_choices + k,
                        k=k,
                        prompt_token_ids=prompt,
                        params=for_choice(fitting, k),
                        cache_salt=body.cache_salt,
                        tenant=tenant,
                        return_token_ids=bool(body.return_token_ids),
                        prompt_logprobs=body.prompt_logprobs,
                    )
                )
        return jobs


class RequireKey:
    """Middleware that lets only requests with a key pass, and tells several keys apart."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [b"bearer " + key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, space, key = given.partition(b" ")
            # The case of a scheme's name does not matter (RFC 9110, 11.1).
            given = scheme.lower() + space + key
            # All are compared, so that the time does not tell which one it was.
            found = [hmac.compare_digest(given, expected) for expected in self._expected]
            if len(found) > 1 and True in found:
                scope["state"][CLIENT] = str(found.index(True))
            if True not in found:
                error = HTTPError(401, "The API key is missing or wrong.", "invalid_api_key")
                log_failure(request_id(scope), 401, error)
                app = _error_response(error, {"www-authenticate": "Bearer"})
        await app(scope, receive, send)


def client_of(scope: Scope) -> str:
    """Says which of several keys a request came with; empty where there is one or none."""
    client: str = scope["state"].get(CLIENT, "")
    return client


async def _read(request: Request, kind: type[Body]) -> Body:
    # A web page of any origin may post plain text without asking; JSON it may not.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise CallerError("The header Content-Type must be application/json.")
    limit = f"The body has more than {MAX_BODY_BYTES >> 20} MiB."
    too_large = HTTPError(413, limit, "request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    bodies: BodyBudget = request.app.state.bodies
    with bodies.share() as share:
        share.grow_to(int(announced) if announced.isdecimal() else 0)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise too_large
            share.grow_to(len(body))
        raise_fault(request.scope)  # then it is cut off
        if _num_values(body) > MAX_VALUES:
            limit = f"The body has more than {MAX_VALUES} numbers, texts, lists and objects."
            raise HTTPError(413, limit, "request_too_large")
        return decode(bytes(body), kind)


def _num_values(body: bytearray) -> int:
    """At most so many are in it: each but the outermost comes after a comma or a bracket.

    Those within a text count too; one with so many of them is longer than sequences are.
    """
    if len(body) <= MAX_VALUES:
        return len(body)
    return 1 + sum(map(body.count, (b",", b"[", b"{")))


def _answer(
    request: Request,
    engine: ServedEngine,
    body: ChatRequest | CompletionRequest,
    model: str,
    kind: type[Choice],
    jobs: Sequence[Job],
) -> ASGIApp:
    reply = Reply(
        kind,
        jobs,
        model=model,
        tokenizer=engine.tokenizer,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        id=reply_id(request.scope),
    )
    answer = StreamedResponse if body.stream else WholeResponse
    return answer(engine, reply, limit_field=body.limit_field)


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
    """Of a prompt; nothing where the model has no tokenizer."""
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


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def _error_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    return _json(error_body(error), foreseen(error).http_status, headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """What our own code raises. Observe answers what it did not mean to."""
    assert isinstance(error, MinisglError)
    # A probe that asks early gets its 503 and no line.
    if route_path(request.scope) not in OPEN_PATHS:
        log_failure(request_id(request.scope), error.http_status, error)
    return _error_response(error, {"retry-after": "1"} if error.http_status == 429 else None)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette raises itself: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    here = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        fault = HTTPError(404, f"There is nothing at {here}.", "unknown_url")
    elif error.status_code == 405:
        fault = HTTPError(405, f"{here} is not allowed.", "method_not_allowed")
    else:
        fault = HTTPError(error.status_code, error.detail, "http_error")
    log_failure(request_id(request.scope), error.status_code, fault)
    return _error_response(fault, error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client left before its body had arrived."""
    return Response(status_code=499)
