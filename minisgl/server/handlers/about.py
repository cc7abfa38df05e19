"""The handlers of what the server says of itself and of its model."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from minisgl import __version__
from minisgl.server.apis.openai import answer_types
from minisgl.server.engine_state import NotReadyError
from minisgl.server.history import SECONDS, MetricsHistory
from minisgl.server.http.encoding import json_response
from minisgl.server.metrics_format import format_for
from minisgl.server.service import Service


async def hint(request: Request) -> Response:
    """Answer at / where there is no page, for people and for probes."""
    return PlainTextResponse(
        "This is minisgl. Its API is at /v1 (base URL of OpenAI clients), and described at "
        "/openapi.json.\n"
    )


async def models(service: Service, request: Request) -> Response:
    names = (*service.state.model_names(), *service.state.engine().adapters)
    data = [_model(service, name) for name in names]
    return json_response(answer_types.ModelList(data=data))


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    # As Starlette redirects paths with a trailing slash. It treats "\n" as an empty name too.
    if not name and request.scope["path"].endswith("/"):
        path = request.url.path.removesuffix("/")
        return RedirectResponse(str(request.url.replace(path=path)))
    return json_response(_model(service, service.state.model_name(name)))


async def health(service: Service, request: Request) -> Response:
    stalled = service.state.engine().stalled
    if stalled is not None:
        raise NotReadyError("stalled", stalled)
    return json_response(answer_types.Health(status="ready"))


async def ready(service: Service, request: Request) -> Response:
    """Whether a request that comes now would be taken."""
    answer = await health(service, request)
    if (refusal := service.state.engine().weights.refusal) is not None:
        raise refusal
    num_queued = service.state.engine().stats().num_queued
    if num_queued >= service.state.options.max_queued_requests:
        raise NotReadyError("queue_full", f"The queue is full: {num_queued} requests wait.")
    return answer


async def version(service: Service, request: Request) -> Response:
    return json_response(answer_types.Version(__version__))


async def metrics(service: Service, request: Request) -> Response:
    format = format_for(request.headers.get("accept", ""))
    return format.response(service.metrics.render(format))


async def metrics_history(service: Service, request: Request) -> Response:
    return json_response(MetricsHistory(SECONDS, {"": service.state.history.samples()}))


def _sees(service: Service) -> bool:
    """Whether images in messages are looked at."""
    config, engine = service.state.config, service.state.engine()
    return not engine.image_refusal and config.images == "see" and engine.vectors.task == "generate"


def _model(service: Service, name: str) -> answer_types.Model:
    engine, base = service.state.engine(), service.state.model_names()[0]
    return answer_types.Model(
        id=name,
        created=service.since,
        owned_by="minisgl",
        max_model_len=engine.capacity.max_seq_len,
        vocab_size=engine.vocab_size,
        task=engine.vectors.task,
        input_modalities=["text", "image"] if _sees(service) else ["text"],
        root=base,
        parent=base if name in engine.adapters else None,
    )
