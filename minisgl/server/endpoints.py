"""All endpoints: what the routes, /openapi.json, the checks of requests and routers go by."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from minisgl.errors import CallerError
from minisgl.server.apis.decisions.answer_types import Decision
from minisgl.server.apis.decisions.request_types import DecisionRequest
from minisgl.server.apis.messages.answer_types import MessageAnswer, MessageEvent, TokenCount
from minisgl.server.apis.messages.request_types import CountTokensRequest, MessagesRequest
from minisgl.server.apis.openai import answer_types as openai
from minisgl.server.apis.responses import answer_types as responses
from minisgl.server.apis.responses.conversation import NAMES
from minisgl.server.apis.responses.request_types import ResponsesRequest
from minisgl.server.apis.vectors.answer_types import EmbeddingList, RankedList, ScoreList
from minisgl.server.apis.vectors.request_types import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl.server.config import ServerConfig
from minisgl.server.endpoint import Endpoint
from minisgl.server.handlers import (
    about,
    adapters,
    decisions,
    generation,
    training,
    vectors,
    weight_transfer,
)
from minisgl.server.history import MetricsHistory
from minisgl.server.http.encoding import json_response
from minisgl.server.http.error_bodies import MessagesError
from minisgl.server.openapi import describe
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.service import Service

HELLO = [{"role": "user", "content": "Hello!"}]
RANKED = {"query": "What purrs?", "documents": ["It rains.", "A cat does."]}


async def openapi(service: Service, request: Request) -> Response:
    config = service.state.config
    described = describe(
        endpoints_of(config),
        with_key=bool(config.api_key),
        root_path=config.root_path,
        max_logprobs=service.state.options.max_logprobs,
    )
    return json_response(described)


def endpoints_of(config: ServerConfig) -> tuple[Endpoint, ...]:
    """Those of a server with these options."""
    return (
        *ENDPOINTS,
        *(adapters.ENDPOINTS if config.lora_root else ()),
        *((*training.ENDPOINTS, *weight_transfer.ENDPOINTS) if config.trainer else ()),
    )


# What several endpoints have in common.
generates = partial(Endpoint, task="generate")
scores = partial(Endpoint, task="rerank")
shows = partial(Endpoint, method="GET")
tells = partial(shows, errors=(), is_open=True)
ENDPOINTS = (
    generates(
        "/v1/chat/completions",
        "Answer a conversation.",
        generation.chat_completions,
        ChatRequest,
        openai.ChatCompletion,
        openai.ChatCompletionChunk,
        example={"messages": HELLO, "max_tokens": 100},
    ),
    generates(
        "/v1/completions",
        "Continue one or more prompts.",
        generation.completions,
        CompletionRequest,
        openai.Completion,
        openai.CompletionChunk,
        example={"prompt": "Once upon a time", "max_tokens": 30},
    ),
    generates(
        "/v1/responses",
        "Answer a conversation, as the Responses API has it.",
        generation.responses,
        ResponsesRequest,
        responses.Response,
        responses.AnyEvent,
        example={"input": "Hello!", "max_output_tokens": 100},
        naming=NAMES.used,
    ),
    shows(
        "/v1/responses/{id}",
        "A response that is stored, or generated in the background.",
        generation.stored_response,
        answer=responses.Response,
        event=responses.AnyEvent,
        query={
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": 0},
        },
        errors=(400, 404),
    ),
    Endpoint(
        "/v1/responses/{id}/cancel",
        "End a response that is generated in the background.",
        generation.cancel_response,
        answer=responses.Response,
        errors=(400, 404),
    ),
    Endpoint(
        "/v1/responses/{id}",
        "Delete a response that is stored.",
        generation.delete_response,
        answer=responses.DeletedResponse,
        method="DELETE",
        errors=(404,),
    ),
    generates(
        "/v1/messages",
        "Answer a conversation, as Anthropic's API does.",
        generation.messages,
        MessagesRequest,
        MessageAnswer,
        MessageEvent,
        example={"messages": HELLO, "max_tokens": 100},
        error=MessagesError,
    ),
    generates(
        "/v1/messages/count_tokens",
        "The number of tokens of a conversation.",
        generation.count_tokens,
        CountTokensRequest,
        TokenCount,
        example={"messages": HELLO},
        error=MessagesError,
    ),
    generates(
        "/v1/decisions",
        "Probabilities of the answers to questions about a text.",
        decisions.decisions,
        DecisionRequest,
        Decision,
        example={
            "input": "It rains.",
            "questions": [{"type": "predicate", "instructions": "The weather is bad."}],
        },
        naming=NAMES.used,
    ),
    Endpoint(
        "/v1/embeddings",
        "Vectors of texts.",
        vectors.embeddings,
        EmbeddingRequest,
        EmbeddingList,
        example={"input": "Hello!", "dimensions": 8},
        task="embed",
    ),
    scores(
        "/v1/rerank",
        "Documents by how well they answer a query.",
        vectors.rerank,
        RerankRequest,
        RankedList,
        example=RANKED,
    ),
    scores(
        "/v2/rerank",
        "Documents by how well they answer a query, as Cohere's second version has it.",
        partial(vectors.rerank, version="2"),
        RerankRequest,
        RankedList,
        example=RANKED,
    ),
    scores(
        "/v1/score",
        "Scores of pairs of texts.",
        vectors.score,
        ScoreRequest,
        ScoreList,
        example={"text_1": "What purrs?", "text_2": ["It rains.", "A cat does."]},
    ),
    shows(
        "/v1/models",
        "The model under each of its names, and its adapters.",
        about.models,
        answer=openai.ModelList,
        errors=(503,),
    ),
    shows(
        "/v1/models/{name:path}",
        "The model, or an adapter.",
        about.model,
        answer=openai.Model,
        errors=(404, 503),
    ),
    Endpoint(
        "/tokenize",
        "The token ids of a text or of a conversation.",
        generation.tokenize,
        TokenizeRequest,
        openai.Tokens,
        example={"prompt": "Hello!", "return_token_strs": True},
    ),
    Endpoint(
        "/detokenize",
        "The text of token ids.",
        generation.detokenize,
        DetokenizeRequest,
        openai.Text,
        example={"tokens": [1, 2, 3]},
    ),
    shows(
        "/tokenizer_info",
        "What the model's tokenizer_config.json says.",
        generation.tokenizer_info,
        answer=openai.TokenizerInfo,
        errors=(400, 503),
    ),
    tells(
        "/health", "Whether requests are taken.", about.health, answer=openai.Health, errors=(503,)
    ),
    tells(
        "/ready",
        "Whether a request that comes now would be taken.",
        about.ready,
        answer=openai.Health,
        errors=(503,),
    ),
    tells("/version", "The version of the server.", about.version, answer=openai.Version),
    tells("/metrics", "Figures for Prometheus.", about.metrics),
    tells(
        "/metrics/history",
        "The last hour of the figures that the page draws.",
        about.metrics_history,
        answer=MetricsHistory,
    ),
    shows("/openapi.json", "This description.", openapi, errors=()),
)
# By the task of the engine (--task).
PURPOSES = {
    "generate": "to generate text",
    "embed": "to make vectors of texts",
    "rerank": "to score documents",
}


class WrongTaskError(CallerError):
    """A request to an endpoint that the model was not loaded for."""

    code = "wrong_task"

    def __init__(self, endpoint: Endpoint, loaded: str) -> None:
        path, needed = endpoint.path, endpoint.task
        *others, last = (each.path for each in ENDPOINTS if each.task == loaded)
        available = f"{', '.join(others)} and {last}" if others else last
        super().__init__(
            f"{path} is not available: this server's model was loaded {PURPOSES[loaded]} "
            f"(--task {loaded}), for {available}. A model for {path} is served by "
            f"`minisgl serve --task {needed}`."
        )
