"""Spans of requests, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from support.collector import Collector, attributes, collecting
from support.fake_engine import FakeEngine
from support.forked_programs import forked_session
from support.gated_runner import asking, gated_server
from support.http_server import HELLO, http_client, serve, wait_for_health
from support.routing import routing
from support.waiting import LIMIT_S, until

from minisgl.server.http.tracing import tracing_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Gets the spans of the servers that are made in the test, soon after they end."""
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield found


def named(found: Collector, name: str) -> list[Span]:
    return [span for span in found.spans if span.name == name]


async def test_a_request_has_a_span_with_its_phases_below_that_of_its_client(
    collector: Collector,
) -> None:
    async with (
        gated_server() as gated,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}") as client,
    ):
        body = asking([1, 2, 3, 4, 5], 3, n=2, temperature=0.5, top_k=7)
        headers = JSON | CONTEXT | {"x-request-id": "mine"}
        answer = await client.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 200
        await until(lambda: named(collector, "text_completion gated"))
    assert collector.services == {"minisgl"}
    [span] = named(collector, "text_completion gated")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.kind == Span.SPAN_KIND_SERVER and span.trace_state == "vendor=x"
    told = attributes(span)
    assert told.pop("gen_ai.response.id").startswith("cmpl-mine-")
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "url.scheme": "http",
        "minisgl.request_id": "mine",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": "gated",
        "gen_ai.response.model": "gated",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    below = collector.below(span)
    ids = {attributes(each)["minisgl.engine_id"] for each in below}
    assert len(ids) == 2
    for id in ids:
        phases = [each for each in below if attributes(each)["minisgl.engine_id"] == id]
        assert [each.name for each in phases] == ["queue", "prefill", "decode"]
        times = [
            time for each in phases for time in (each.start_time_unix_nano, each.end_time_unix_nano)
        ]
        assert times == sorted(times)
        # The clocks are read one after the other.
        assert span.start_time_unix_nano - 10**6 <= times[0]
        assert times[-1] <= span.end_time_unix_nano + 10**6


async def test_a_router_stands_between_the_client_and_its_replica(
    tmp_path: Path, collector: Collector
) -> None:
    async with (
        routing(tmp_path, FakeEngine(answer_length=2)) as (url, *_),
        httpx.AsyncClient(base_url=url) as client,
    ):
        for stream in (False, True):
            asked = {"messages": HELLO, "stream": stream}
            await client.post(CHAT, json=asked, headers=CONTEXT)
        await until(lambda: len(collector.spans) >= 4)
    routed = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    assert [span.name for span in routed] == [f"POST {CHAT}"] * 2
    for span in routed:
        assert attributes(span)["minisgl.replica"] == 0
        [of_replica] = collector.below(span)
        assert of_replica.name == "chat fake"
        assert {span.trace_id.hex(), of_replica.trace_id.hex()} == {TRACE}
        assert of_replica.trace_state == "vendor=x"


async def test_failures_are_told_without_words_of_the_client_and_probes_have_no_span(
    collector: Collector,
) -> None:
    engine = FakeEngine(dies_at=1)
    async with http_client(engine, api_key=("s3cret",)) as client:
        await client.get("/health")
        await client.get("/metrics")
        await client.get("/v1/models/s3cret")  # without the key
        client.headers["authorization"] = "Bearer s3cret"
        await client.get("/s3cret?key=s3cret")
        await client.post(CHAT, json={"messages": HELLO, "temperature": "s3cret"})
        await client.post(CHAT, json={"messages": HELLO, "model": "s3cret"})
        await client.post(CHAT, json={"messages": HELLO, "stream": True})
        await until(lambda: len(collector.spans) == 5)
    assert not any("s3cret" in str(span) for span in collector.spans)
    told = {
        span.name: (attributes(span)["http.response.status_code"], span.status.code)
        for span in collector.spans
    }
    unset, error = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR
    assert told == {
        "GET /v1/models/{name:path}": (401, unset),
        "GET other": (404, unset),
        f"POST {CHAT}": (404, unset),
        "chat fake": (200, error),  # a stream that has begun
    }
    assert attributes(named(collector, "chat fake")[0])["error.type"] == "200"


async def test_vectors_have_a_span_with_their_tokens(collector: Collector) -> None:
    async with http_client(FakeEngine(task="embed")) as client:
        await client.post("/v1/embeddings", json={"input": ["a", "bcd"]})
        await until(lambda: collector.spans)
    [span] = named(collector, "embeddings fake")
    assert attributes(span)["gen_ai.operation.name"] == "embeddings"
    assert attributes(span)["gen_ai.usage.input_tokens"] == 4


def test_a_server_that_ends_sends_what_it_has_left(tiny_model: Path, port: int) -> None:
    with collecting() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_BSP_SCHEDULE_DELAY": "1000000",
            "OTEL_SERVICE_NAME": "mine",
        }
        command = serve(tiny_model, port, "--served-model-name", "tiny")
        url = f"http://127.0.0.1:{port}"
        with forked_session(*command, **environment) as process:
            wait_for_health(process, url, 200)
            httpx.post(url + CHAT, json={"messages": HELLO, "max_tokens": 2}).raise_for_status()
            assert not collector.spans
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)
    assert collector.services == {"mine"}
    assert sorted({span.name for span in collector.spans}) == [
        "chat tiny",
        "decode",
        "prefill",
        "queue",
    ]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_without_a_place_for_them_there_are_no_spans(environment: dict[str, str]) -> None:
    assert tracing_of(environment) is None


@pytest.mark.parametrize("exporter", ["", "otlp", "console,otlp"])
def test_an_endpoint_is_enough_for_spans(exporter: str) -> None:
    """An empty variable is one that is not set, as OpenTelemetry says."""
    tracing = tracing_of(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": exporter}
    )
    assert tracing is not None
    tracing.end()


def test_without_the_package_a_variable_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "minisgl.server.http.spans", None)
    assert tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is None
    assert "pip install opentelemetry-exporter-otlp-proto-http" in caplog.text


def test_nothing_of_opentelemetry_is_imported_where_it_is_off() -> None:
    program = """
import json, sys
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
import minisgl.router.app
create_app(EngineState(ServerConfig()))
print(json.dumps([name for name in sys.modules if "opentelemetry" in name]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
