"""Spans of requests, by the semantic conventions of OpenTelemetry for HTTP and generative AI.

A request has a span, below that of its client if its headers name one, and each of its answers has
three below it: queue, prefill and decode. They have names, counts and times, never prompts, answers
or keys, nor paths, which clients may write anything into. Spans are sent by a thread of the SDK.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from minisgl.request import Request, SamplingParams
from minisgl.server.http.paths import is_open, route_path
from minisgl.server.http.request_ids import request_id

PROVIDER = "minisgl"
MAX_TOLD = 16  # answers of a request that have spans of their own
# By the route. What has no name in the conventions has its own.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/score": "score",
}
# Of sampling, by the fields of SamplingParams.
SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens")
# Of the record in the log, by its fields.
NOTED = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "first_token_s": "gen_ai.response.time_to_first_chunk",
    "key": "minisgl.key",
    "replica": "minisgl.replica",
}

Headers = list[tuple[bytes, bytes]]


class Tracing:
    """Makes the spans of requests, and sends them where the variables of the SDK say."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        resource = Resource.create({} if named else {"service.name": PROVIDER})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("minisgl")

    def begin(self, scope: Scope) -> RequestSpan | None:
        """The span of a request; None for one of a probe."""
        return None if is_open(scope) else RequestSpan(self._tracer, scope)

    def end(self) -> None:
        """Send what has not been sent yet. Blocks for as long as the SDK's variables allow."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request."""

    def __init__(self, tracer: Tracer, scope: Scope) -> None:
        self._tracer = tracer
        self._route: str = scope["app"].state.patterns.match(route_path(scope))
        given = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._span = tracer.start_span(
            f"{scope['method']} {self._route}",
            propagate.extract(given),
            SpanKind.SERVER,
            {
                "http.request.method": scope["method"],
                "http.route": self._route,
                "url.scheme": scope["scheme"],
                "minisgl.request_id": request_id(scope),
            },
        )
        self._context = set_span_in_context(self._span)

    def asked(self, model: str, params: SamplingParams | None = None, num_choices: int = 1) -> None:
        """Tell what is asked for. model: its name, which the server knows."""
        if not self._span.is_recording():
            return
        operation = OPERATIONS.get(self._route, self._route)
        self._span.update_name(f"{operation} {model}")
        told: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        if params is not None:
            given = {name: getattr(params, name) for name in SAMPLING}
            told |= {f"gen_ai.request.{name}": v for name, v in given.items() if v is not None}
        if num_choices > 1:
            told["gen_ai.request.choice.count"] = num_choices
        self._span.set_attributes(told)

    def worked(self, id: str, requests: Sequence[Request]) -> None:
        """Tell what the engine has done. id: of the answer; requests: have ended."""
        if not self._span.is_recording():
            return
        reasons = [each.finish_reason.value for each in requests if each.finish_reason]
        self._span.set_attributes(
            {"gen_ai.response.id": id, "gen_ai.response.finish_reasons": reasons}
        )
        for request in requests[:MAX_TOLD]:
            self._phases(request)

    def _phases(self, request: Request) -> None:
        """Spans of what a request did, as far as it came."""
        since = time.time_ns() - time.monotonic_ns()  # the epoch, by the monotonic clock
        began: float | None = request.submitted_s
        now = time.monotonic()
        for name, ended in (
            ("queue", request.admitted_s),
            ("prefill", request.first_token_s),
            ("decode", request.last_token_s),
        ):
            if began is None:
                return
            start, end = (since + round(seconds * 1e9) for seconds in (began, ended or now))
            span = self._tracer.start_span(
                name,
                self._context,
                SpanKind.INTERNAL,
                {"minisgl.engine_id": request.id},
                start_time=start,
            )
            span.end(end)
            began = ended

    def passed_on(self, headers: Headers) -> Headers:
        """`headers` of a request that is passed on, and whose span is to be below this one."""
        below: dict[str, str] = {}
        propagate.inject(below, self._context)
        replaced = {name.encode() for name in propagate.get_global_textmap().fields}
        kept = [pair for pair in headers if pair[0] not in replaced]
        return [*kept, *((name.encode(), value.encode()) for name, value in below.items())]

    def end(self, status: int, noted: Mapping[str, str | int | float], reason: str) -> None:
        """End the span of a request that was answered with `status`.

        noted: the fields of its record in the log. reason: why it failed; empty if it has not.
        """
        span = self._span
        span.set_attribute("http.response.status_code", status)
        for name, attribute in NOTED.items():
            if name in noted:
                span.set_attribute(attribute, noted[name])
        if status >= 400 or reason:
            span.set_attribute("error.type", str(status))
        if status >= 500 or (status < 400 and reason):
            span.set_status(Status(StatusCode.ERROR, reason))
        span.end()
