"""`bench serve` against fake servers and our own: requests, reports, comparisons, errors."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.forked_programs import minisgl
from support.gated_runner import gated_server
from support.quick_server import PlainServer
from support.waiting import until
from typer.testing import CliRunner

from minisgl.bench.config import STANDARD, BenchConfig, ReportConfig, Sizes, Span
from minisgl.bench.environment import Environment, checkout_commit
from minisgl.bench.figures import Figures, spreads
from minisgl.bench.offline_run import RequestRecord, RunRecord, StepCounts
from minisgl.bench.online.client import RunProgress
from minisgl.bench.online.context_check import RoomError, check_room, describe_misfits, with_remedy
from minisgl.bench.online.load_config import LoadConfig, Point
from minisgl.bench.online.metrics_poller import Sample, poll_metrics
from minisgl.bench.online.run import OnlineRun, OnlineRunError, StreamedRequest, run_online
from minisgl.bench.online.server import StartedServer
from minisgl.bench.online.target import Endpoint, served_model
from minisgl.bench.peak import Peak
from minisgl.bench.report.compare import CompareError, compare
from minisgl.bench.report.output import flat, write_csv
from minisgl.bench.report.progress import live
from minisgl.bench.report.tables import PointResult, print_spreads, sweep_tables
from minisgl.bench.run_info import RunInfo
from minisgl.bench.serve import ServerUnderTest, bench_serve, share_of_limit
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.bench.workload.schedule import chat_text
from minisgl.bench.workload.trace import TraceEntry
from minisgl.client.address import api_base
from minisgl.client.errors import ServerError
from minisgl.client.models import ServedModel
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl_cli import main as cli

# -- a server of somebody else --------------------------------------------------------------------


@dataclass
class Fake:
    """Answers with so many words as are asked for."""

    usage: bool = True
    refuse: int = -1  # the request, by order, that gets a 500
    odd: bytes = b""  # an event that begins the answer to the first request
    most: int = 10**9  # requests beyond it get a 500
    vocab_size: int | None = None  # token ids beyond it get a 400
    key: str | None = None
    told: dict[str, Any] = field(default_factory=dict)  # of the model, besides its name
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    port: int = 0

    def target(self, **fields: Any) -> Endpoint:
        return Endpoint(url=f"http://127.0.0.1:{self.port}/v1", **fields)

    async def models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"data": [{"id": "fake-7b", **self.told}]})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        if self.vocab_size is not None and max(body["prompt"]) >= self.vocab_size:
            return JSONResponse({"error": {"message": "Token id is out of vocabulary."}}, 400)
        if len(self.bodies) - 1 == self.refuse or len(self.bodies) > self.most:
            return JSONResponse({"error": {"message": "out of luck"}}, 500)
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str | bytes]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        chat = "messages" in body
        if self.odd and body is self.bodies[0]:
            yield b"data: " + self.odd + b"\r\n\r\n"
        if chat:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            text = f" {index}"
            yield ": ping\r\n\r\n"
            yield event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        # Some servers send an empty piece with the reason.
        last = {"finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}
        yield event({"choices": [last]})
        if self.usage:
            counts = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
            yield event({"choices": [], "usage": counts | {"prompt_tokens_details": None}})
        self.num_open -= 1
        yield "data: [DONE]\r\n\r\n"


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\r\n\r\n"


@asynccontextmanager
async def fake_server(**options: Any) -> AsyncIterator[Fake]:
    fake = Fake(**options)
    routes = [Route("/v1/models", fake.models)]
    for path in ("/v1/completions", "/v1/chat/completions"):
        routes.append(Route(path, fake.answer, methods=["POST"]))
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
    listener = config.bind_socket()
    listener.listen()  # or who asks before the server does so is refused
    fake.port = listener.getsockname()[1]
    server = PlainServer(config)
    with without_signals(server):
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield fake
        finally:
            server.should_exit = True
            await serving


@contextmanager
def without_signals(server: uvicorn.Server) -> Iterator[None]:
    @contextmanager
    def none() -> Iterator[None]:
        yield

    server.capture_signals = none  # type: ignore[method-assign]
    yield


def asking(count: int, **fields: Any) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(prompt=[index, 1, 2], max_tokens=3 + index, seed=index, **fields)
        for index in range(count)
    ]


async def test_other_servers_are_asked_for_exact_lengths() -> None:
    async with fake_server() as fake:
        target = fake.target(model="m", api_key="k", temperature=0.5)
        run = await run_online(target, asking(3))
    assert sorted(body["prompt"] for body in fake.bodies) == [[0, 1, 2], [1, 1, 2], [2, 1, 2]]
    for body in fake.bodies:
        assert (body["model"], body["temperature"], body["ignore_eos"]) == ("m", 0.5, True)
        assert body["max_tokens"] == 3 + body["seed"] and body["stream"]
    assert fake.keys == ["Bearer k"] * 3
    assert not run.failures
    for index, request in enumerate(run.requests):
        assert len(request.times_s) == request.record.num_output_tokens == 3 + index
        assert (request.record.num_prompt_tokens, request.tells_cached) == (11, False)
        assert request.counted and request.late_s >= 0
    figures = run.figures(None, {})
    assert figures.cache_hit_rate is figures.num_steps is figures.graph_share is None
    assert figures.itl_s is not None


async def test_tokens_are_counted_as_events_if_there_is_no_usage() -> None:
    async with fake_server(usage=False) as fake:
        run = await run_online(fake.target(ignore_eos=False), asking(1))
    assert "ignore_eos" not in fake.bodies[0] and "model" not in fake.bodies[0]
    [request] = run.requests
    record = request.record
    assert (record.num_output_tokens, record.num_prompt_tokens) == (3, 3)
    assert not request.counted


@pytest.mark.parametrize(
    "odd",
    [
        *(b"{no JSON", b"[]", b'{"choices": 5}', b'{"choices": [{"delta": {"content": ["a"]}}]}'),
        *(b'{"usage": {"completion_tokens": "many"}}', b'{"error": "\xff"}'),
        b'{"error": ' + b"[" * 10**5,
    ],
)
async def test_an_invalid_event_fails_its_request_alone(odd: bytes) -> None:
    async with fake_server(odd=odd) as fake:
        run = await run_online(fake.target(endpoint="chat"), [*conversation(), *asking(1)])
    assert len(run.requests) in (1, 3)  # alone, or with those that were to follow it
    assert any("is not as OpenAI's API has it" in reason for reason in run.failures)


async def test_null_fields_of_a_server_are_treated_as_absent() -> None:
    odd = {"choices": [{"delta": None, "text": None}], "usage": {"completion_tokens": None}}
    async with fake_server(odd=json.dumps(odd).encode(), usage=False) as fake:
        [request] = (await run_online(fake.target(), asking(1))).requests
    record = request.record
    assert (record.num_output_tokens, record.num_prompt_tokens) == (3, 3)
    assert not request.counted


def conversation() -> list[ScheduledRequest]:
    first = ScheduledRequest(prompt=[5, 6], max_tokens=2, seed=0)
    return [first] + [
        ScheduledRequest(prompt=[index], max_tokens=2, seed=0, parent=index, continues=True)
        for index in range(2)
    ]


async def test_a_question_is_sent_with_the_conversation_before_it() -> None:
    async with fake_server() as fake:
        run = await run_online(fake.target(endpoint="chat"), conversation())
    assert len(run.requests) == 3
    said = [(message["role"], message["content"]) for message in fake.bodies[2]["messages"]]
    assert said == [
        ("user", chat_text([5, 6])),
        ("assistant", " 0 1"),
        ("user", chat_text([0])),
        ("assistant", " 0 1"),
        ("user", chat_text([1])),
    ]
    for before, after in zip(run.requests, run.requests[1:], strict=False):
        assert after.record.submitted_s >= before.times_s[-1]


async def test_a_failed_question_ends_its_conversation() -> None:
    async with fake_server(refuse=1) as fake:
        run = await run_online(fake.target(endpoint="chat"), conversation())
    assert len(run.requests) == 1 and len(fake.bodies) == 2
    assert run.failures == {"500: out of luck": 1, "the question before it failed": 1}
    assert run.figures(None, {"ttft": 60}).num_failed == 2


async def test_concurrency_is_limited_as_requested() -> None:
    async with fake_server() as fake:
        await run_online(fake.target(), asking(9), max_concurrency=2)
        assert fake.most_open == 2


async def test_a_request_is_sent_when_due_and_after_its_parent_has_ended() -> None:
    schedule = asking(3)
    schedule[1] = replace(schedule[1], due_s=0.05)
    schedule[2] = replace(schedule[2], parent=1, pause_s=0.02)
    async with fake_server() as fake:
        run = await run_online(fake.target(), schedule)
    first, due, child = (request.record for request in run.requests)
    assert first.submitted_s < due.submitted_s >= 0.05
    assert child.submitted_s >= due.last_token_s + 0.02


async def test_a_request_that_exceeds_the_timeout_has_failed() -> None:
    async with fake_server() as fake:
        slow = ScheduledRequest(prompt=[1], max_tokens=10_000, seed=0)
        run = await run_online(fake.target(), [slow], timeout_s=0.2)
    assert (run.requests, run.failures) == ([], {"no whole answer in 0.2 s": 1})


def test_addresses_are_accepted_with_and_without_v1() -> None:
    assert api_base("http://host:8000") == api_base("http://host:8000/") == "http://host:8000/v1"
    assert api_base("https://host/api/v1/") == "https://host/api/v1"
    assert Endpoint(url="http://host/api/v1").root == "http://host/api"


# -- figures --------------------------------------------------------------------------------------


def streamed(sent_s: float, *times_s: float, cached: int | None = 4) -> StreamedRequest:
    record = RequestRecord(
        submitted_s=sent_s,
        first_token_s=times_s[0],
        last_token_s=times_s[-1],
        num_prompt_tokens=10,
        num_cached_tokens=cached or 0,
        num_output_tokens=len(times_s),
    )
    return StreamedRequest(record=record, times_s=list(times_s), tells_cached=cached is not None)


def test_figures_follow_from_the_records_of_a_run_over_http() -> None:
    run = OnlineRun([streamed(1.0, 2.0, 3.0, 5.0), streamed(2.0, 2.5)])
    run.failures["500"] = 2
    counts = StepCounts(num_steps=8, num_graph_steps=6, num_retractions=1)
    figures = run.figures(counts, {"ttft": 0.6, "tpot": 1.0})
    assert (figures.elapsed_s, figures.num_requests, figures.num_failed) == (4.0, 2, 2)
    assert (figures.input_tokens_per_s, figures.output_tokens_per_s) == (5.0, 1.0)
    assert figures.total_tokens_per_s == 6.0
    assert (figures.cache_hit_rate, figures.graph_share) == (0.4, 0.75)
    assert figures.num_retractions == 1
    assert figures.itl_s is not None and figures.itl_s.mean == 1.5
    assert figures.tpot_s is not None and figures.tpot_s.mean == 1.5
    assert figures.ttft_s.mean == 0.75 and figures.e2e_s.mean == 2.25
    assert figures.goodput is not None
    assert (figures.goodput.requests_per_s, figures.goodput.share) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("limits_s", "share"),
    [
        ({"ttft": 1.0}, 1.0),
        ({"ttft": 0.9}, 0.5),
        ({"itl": 1.9}, 0.5),
        ({"itl": 2.0, "e2e": 4.0}, 1.0),
        ({"itl": 2.0, "e2e": 3.9}, 0.5),
        ({"e2e": 0.1}, 0.0),
    ],
)
def test_goodput_counts_requests_that_meet_all_limits(
    limits_s: dict[str, float], share: float
) -> None:
    run = OnlineRun([streamed(1.0, 2.0, 3.0, 5.0), streamed(2.0, 2.5)])
    goodput = run.figures(None, limits_s).goodput
    assert goodput is not None and goodput.share == share


def figures(output_tokens_per_s: float) -> Figures:
    request = RequestRecord(
        submitted_s=0.0,
        first_token_s=1.0,
        last_token_s=2.0,
        num_prompt_tokens=10,
        num_cached_tokens=5,
        num_output_tokens=round(2 * output_tokens_per_s),
    )
    return Figures.of(RunRecord([request], num_steps=4, num_retractions=0, num_graph_steps=1))


def test_the_median_of_repetitions_excludes_the_first() -> None:
    repetitions = [figures(rate) for rate in (1, 40, 20, 30)]
    spread = spreads(repetitions)["output_tokens_per_s"]
    assert (spread.median, spread.low, spread.high) == (30, 20, 40)
    assert spreads(repetitions[:2]) == {}
    printed = io.StringIO()
    print_spreads(Console(file=printed, width=300), repetitions)
    assert "of repetitions 2 to 4: output tok/s 30.00 (20.00 to 40.00)" in printed.getvalue()


def test_figures_are_exported_as_csv(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    write_csv(file, [({"request_rate": 2.0}, figures(30)), ({"request_rate": None}, figures(40))])
    first, second = csv.DictReader(file.read_text().splitlines())
    assert (first["request_rate"], second["request_rate"]) == ("2.0", "")
    assert (first["output_tokens_per_s"], first["ttft_s_p90"]) == ("30.0", "1.0")
    assert (first["graph_share"], first["itl_s"]) == ("0.25", "")


# -- side by side ---------------------------------------------------------------------------------


def report(path: Path, rate: float, **fields: Any) -> Path:
    found = {"figures": asdict(figures(rate)), "model": "demo", "limit": {"share": rate / 100}}
    path.write_text(json.dumps(found | fields))
    return path


def test_compare_prints_the_figures_and_differing_options_of_two_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"json_file": "x", "seed": 0}
    first = report(tmp_path / "a.json", 20, bench_options=options)
    options = {"json_file": "y", "seed": 1}
    second = report(tmp_path / "b.json", 30, bench_options=options, model="other")
    assert compare(first, second) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model: demo, other" in lines and "seed: 0, 1" in lines
    assert not any("json_file" in line for line in lines)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert ["output tok/s", "20.000", "30.000", "1.500"] in rows
    assert ["TTFT p50 ms", "1,000.000", "1,000.000", "1.000"] in rows
    assert ["share of the hardware's limit", "0.200", "0.300", "1.500"] in rows


@pytest.mark.parametrize("verb", ["compare", "--compare"])
def test_bench_compare_compares_result_files(tmp_path: Path, verb: str) -> None:
    files = [str(report(tmp_path / name, 20)) for name in ("a.json", "b.json")]
    result = CliRunner().invoke(cli.app, ["bench", verb, *files])
    assert result.exit_code == 0 and "output tok/s" in result.output


def test_compare_matches_the_points_that_two_sweeps_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(name: str, *rates: float | None) -> Path:
        points = [
            {"request_rate": rate, "max_concurrency": None, "figures": asdict(figures(9))}
            for rate in rates
        ]
        path = tmp_path / name
        path.write_text(json.dumps({"points": points}))
        return path

    first, second = sweep("a.json", 1.0, 2.0), sweep("b.json", 2.0, None)
    assert compare(first, second) == 0
    printed = capsys.readouterr().out
    assert "2 requests/s" in printed
    assert "only in A: 1 requests/s" in printed and "only in B: as fast as possible" in printed
    with pytest.raises(CompareError, match="no measurement in common: 3 requests/s, 4 requests/s;"):
        compare(sweep("c.json", 3.0, 4.0), second)


def test_compare_refuses_files_that_are_no_results(tmp_path: Path) -> None:
    right = report(tmp_path / "a.json", 20)
    for text in ("", "[]", '{"figures": 3}', '{"points": [{}]}'):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(CompareError, match=r"b\.json: not a benchmark's result; allowed"):
            compare(right, tmp_path / "b.json")
    with pytest.raises(CompareError, match="No such file"):
        compare(tmp_path / "none.json", right)


@pytest.mark.parametrize(("width", "num_tables"), [(200, 1), (80, 3), (20, 12)])
def test_the_table_of_a_sweep_is_turned_and_split_rather_than_cut(
    width: int, num_tables: int
) -> None:
    found = [
        PointResult(
            point=Point(float(rate), None),
            limit=None,
            repetitions=[figures(rate * 1234)],
            requests=[],
        )
        for rate in range(1, 13)
    ]
    tables = sweep_tables(found, width)
    assert len(tables) == num_tables
    file = io.StringIO()
    console = Console(file=file, width=max(width, 40))  # a heading and a number need 40
    for table in tables:
        console.print(table)
    shown = file.getvalue()
    assert "…" not in shown and "TTFT ms p99" in shown
    assert all(f" {rate * 1234:,.1f} " in shown for rate in range(1, 13))
    assert width < 40 or max(map(len, shown.splitlines())) <= width


# -- pictures and progress ------------------------------------------------------------------------


class Canvas:
    """Stands in for matplotlib's figures and axes: it takes every call, and keeps them."""

    calls: list[tuple[str, tuple[Any, ...]]] = []  # noqa: RUF012
    options: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        pass

    @property
    def yaxis(self) -> Canvas:
        return self

    xaxis = yaxis

    def get_lines(self) -> list[Canvas]:
        return []

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **options: Any) -> Canvas:
            self.calls.append((name, values))
            self.options.append((name, options))
            return self

        return call

    def subplots(self, rows: int, columns: int, *, squeeze: bool) -> Any:
        class Grid:
            def __getitem__(self, index: object) -> list[Canvas]:
                return [Canvas() for _ in range(rows)]

        self.calls.append(("panels", (rows,)))
        return Grid()


@pytest.mark.parametrize(("num_points", "num_panels"), [(1, 2), (3, 3)])
def test_a_plot_has_a_panel_for_each_metric_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_points: int, num_panels: int
) -> None:
    class Stub:
        Figure = LogLocator = NullFormatter = Canvas

        @staticmethod
        def FuncFormatter(form: Any) -> Any:  # noqa: N802
            return form

    monkeypatch.setitem(sys.modules, "matplotlib", Stub)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", Stub)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.ticker", Stub)  # type: ignore[arg-type]
    monkeypatch.setattr(Canvas, "calls", [])
    monkeypatch.setattr(Canvas, "options", [])
    from minisgl.bench.report.plot import plot_points

    run = RequestRecord(
        submitted_s=0.0,
        first_token_s=1.0,
        last_token_s=2.0,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=2,
    )
    found = [
        PointResult(
            point=Point(float(rate), None),
            limit=None,
            repetitions=[figures(rate)],
            requests=[run],
            itls_s=[0.5],
            timeline=[Sample(at_s, 3, 1, 0.25) for at_s in (0.5, 1.0, 1.5)],
        )
        for rate in range(1, num_points + 1)
    ]
    plot_points(tmp_path / "a.png", found, "demo · CPU")
    calls = dict(Canvas.calls)
    assert calls["panels"] == (num_panels,)
    assert calls["savefig"] == (tmp_path / "a.png",)
    assert calls["suptitle"] == ("demo · CPU",)
    plotted = [values for name, values in Canvas.calls if name == "plot"]
    legends = [options for name, options in Canvas.options if name == "legend"]
    assert len(legends) == num_panels  # each beside its lines, not on them
    assert all(options["bbox_to_anchor"][0] > 1 for options in legends)
    assert ([0.5, 1.0, 1.5], [3] * 3) in [values[:2] for values in plotted]
    assert ([0.5, 1.0, 1.5], [25.0] * 3) in [values[:2] for values in plotted]
    [form, *_] = [values[0] for name, values in Canvas.calls if name == "set_major_formatter"]
    assert [form(value, 0) for value in (0.5, 200.0, 20_000.0)] == ["0.5", "200", "20,000"]
    short = [replace(found[0], timeline=found[0].timeline[:2])]
    plot_points(tmp_path / "b.png", short, "")
    panels = [values for name, values in Canvas.calls if name == "panels"]
    assert panels[-1] == (1,)  # two samples are no timeline
    swept = [
        values[1] for values in plotted if "o" in values[2] and len(values[0]) == num_points > 1
    ]
    assert ([1000.0] * num_points in swept) is (num_points > 1)  # TTFT in milliseconds


@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_is_shown_only_on_terminals(terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120)
    async with live(console, "Repetition 1", 8, "events", lambda: RunProgress(3, 2, 40), 0.01):
        await asyncio.sleep(0.05)
    assert ("Repetition 1" in shown.getvalue()) is terminal
    assert ("3/8" in shown.getvalue() and "2 running" in shown.getvalue()) is terminal


# -- the environment ------------------------------------------------------------------------------


def test_the_environment_record_has_versions_and_machine() -> None:
    found = Environment.found()
    assert {"python", "torch", "transformers"} <= set(found.versions)
    assert found.cpu and found.num_cpus > 0 and found.measured_at.endswith("+00:00")
    assert found.cpu in found.describe() or found.gpus


def test_the_recorded_commit_is_that_of_the_source_folder(tmp_path: Path) -> None:
    def git(*command: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=b")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    assert checkout_commit(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    commit = checkout_commit(tmp_path)
    assert commit is not None and len(commit) == 12
    (tmp_path / "a").write_text("2")
    assert checkout_commit(tmp_path) == f"{commit}+changes"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    assert checkout_commit(installed) is None


# -- the whole ------------------------------------------------------------------------------------


async def test_the_step_count_and_samples_of_our_server_are_recorded() -> None:
    async with gated_server() as served:
        target = Endpoint(url=f"http://127.0.0.1:{served.port}/v1")
        async with poll_metrics(target, interval_s=0.001) as polled:
            await run_online(target, asking(6))
            await until(lambda: polled.samples)
        assert polled.counts is not None
        assert polled.counts.num_steps == served.engine.stats().counters.num_steps
        assert polled.samples and all(sample.at_s > 0 for sample in polled.samples)
    async with fake_server() as fake, poll_metrics(fake.target()) as polled:
        await run_online(fake.target(), asking(1))
    assert (polled.counts, polled.samples) == (None, [])


async def test_a_sweep_over_an_existing_server_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, csv_file = tmp_path / "a.json", tmp_path / "a.csv"
    async with gated_server() as served:
        code = await bench_serve(
            EngineConfig(),
            BenchConfig(num_requests=4, repeat=2, json_file=str(json_file)),
            WorkloadConfig(input_len=5, output_len=6),
            LoadConfig(
                url=f"http://127.0.0.1:{served.port}",
                api_key="secret",
                vocab_size=100,
                request_rate=("200", "inf"),
                goodput=("e2e:60000",),
            ),
            ReportConfig(csv_file=str(csv_file)),
        )
    assert code == 0
    printed = capsys.readouterr().out
    assert "4 requests, 5 tokens in, 6 out" in printed
    assert "200 requests/s:" in printed and "as fast as possible:" in printed
    text = json_file.read_text()
    assert "secret" not in text
    found = json.loads(text)
    assert found["model"] == "gated" and found["bench_options"]["num_requests"] == 4
    assert [point["request_rate"] for point in found["points"]] == [200.0, None]
    lines = csv.DictReader(csv_file.read_text().splitlines())
    for point, line in zip(found["points"], lines, strict=True):
        assert point["figures"]["num_output_tokens"] == 24 == int(line["num_output_tokens"])
        assert point["figures"]["goodput"]["share"] == 1.0
        assert point["figures"]["num_cached_tokens"] == 0  # no run repeats another one's prompts
        assert flat(point["figures"])["ttft_s_p50"] == float(line["ttft_s_p50"])
        assert (len(point["repetitions"]), len(point["requests"])) == (2, 4)
        assert point["failures"] == {}


def test_the_roofline_percentage_is_computed_from_the_servers_counters() -> None:
    facts = read_model_config(DEMO_FOLDER).facts()
    nothing: dict[str, Any] = {"bench_options": {}, "engine_options": {}, "capacity": {}}
    options: Any = SimpleNamespace(dtype="bfloat16", kv_dtype="bfloat16", max_running_requests=256)
    setting = RunInfo(
        environment=Environment.found(), versions={}, device="", model="", backends={}, **nothing
    )
    peak = Peak(bytes_per_s=1e9, operations_per_s=1e12)
    started = StartedServer(
        description=[],
        run_info=setting,
        model=facts,
        config=options,
        gpus=[],
        peak=peak,
    )
    site = ServerUnderTest(
        target=Endpoint(url=""), run_info=setting, sizes=STANDARD, vocab_size=9, started=started
    )
    run = OnlineRun([streamed(1.0, 2.0, 3.0, 5.0)])
    counts = StepCounts(num_steps=3, num_graph_steps=0, num_retractions=0)
    found = run.figures(counts, {})
    point = Point(None, None)
    limit = share_of_limit(site, point, run, found)
    assert limit is not None
    weights = 2 * (facts.num_layer_weights + facts.num_head_weights)
    assert limit.work.weight_bytes == 3 * weights
    assert limit.share == pytest.approx(limit.work.seconds / 4.0)
    # What may run at once at a point decides which requests share a step.
    two = OnlineRun([streamed(1.0, 2.0, 3.0, 5.0), streamed(1.0, 2.0, 3.0, 5.0)])
    counted = two.figures(replace(counts, num_steps=60), {})
    limits = [share_of_limit(site, Point(None, most), two, counted) for most in (1, 2)]
    works = [found.work for found in limits if found is not None]
    assert works[0].decode_operations < works[1].decode_operations
    for other in (replace(site, started=None), replace(site, started=replace(started, peak=None))):
        assert share_of_limit(other, point, run, found) is None
    assert share_of_limit(site, point, run, run.figures(None, {})) is None


async def measure(fake: Fake, *rates: str, repeat: int = 1, **load: Any) -> int:
    """Two requests at each rate."""
    return await bench_serve(
        EngineConfig(),
        BenchConfig(num_requests=2, repeat=repeat),
        WorkloadConfig(input_len=3, output_len=2),
        LoadConfig(url=f"http://127.0.0.1:{fake.port}", request_rate=rates or ("inf",), **load),
        ReportConfig(),
    )


async def test_token_ids_stay_within_the_vocabulary_that_a_server_reports() -> None:
    async with gated_server() as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        told = await served_model(Endpoint(url=url))
        assert told == ServedModel("gated", 2048, served.engine.vocab_size, "generate", ["text"])
        assert await served_model(Endpoint(url=url), "other") == ServedModel("other")
    async with fake_server(vocab_size=50, told={"vocab_size": 50}) as fake:
        assert await measure(fake) == 0
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("vocab_size", [None, 200])
async def test_a_refused_token_id_error_names_the_vocabulary_option(vocab_size: int | None) -> None:
    async with fake_server(vocab_size=50) as fake:
        with pytest.raises(OnlineRunError, match=r"vocabulary; .*--vocab-size N.*--endpoint chat"):
            await measure(fake, vocab_size=vocab_size)
        assert await measure(fake, vocab_size=50) == 0


@pytest.mark.parametrize(
    ("reason", "workload", "endpoint", "options"),
    [
        ("400: prompt is a list", {}, "completions", ["--vocab-size", "--endpoint chat"]),
        ("400: prompt is a list", {}, "chat", []),
        ("500: prompt is a list", {}, "completions", []),
        ("400: no such field", {}, "completions", []),
        (
            "400: prompt: maximum context length is 9",
            {"input_len": 9},
            "completions",
            ["--input-len or --max-output-length"],
        ),
        (
            "400: too long",
            {"workload": "multi-turn"},
            "chat",
            ["--num-turns, --max-prompt-length or --max-output-length"],
        ),
        ("400: too long", {"trace": __file__}, "completions", []),
    ],
)
def test_refusals_are_reported_with_the_option_that_helps(
    reason: str, workload: dict[str, Any], endpoint: str, options: list[str]
) -> None:
    told = with_remedy(reason, WorkloadConfig(**workload), endpoint)
    assert told.startswith(reason) and (told == reason) is not bool(options)
    assert all(option in told for option in options)


@pytest.mark.parametrize(
    ("workload", "length", "options"),
    [
        ({}, 30, "--max-prompt-length or --max-output-length"),
        ({"input_len": 5}, 25, "--input-len or --max-output-length"),
        ({"workload": "shared-prefix", "prefix_len": 7}, 37, "--prefix-len, --max-prompt-length"),
        ({"workload": "multi-turn"}, 120, "--num-turns, --max-prompt-length"),
    ],
)
def test_requests_that_cannot_fit_are_refused_before_the_run(
    workload: dict[str, Any], length: int, options: str
) -> None:
    config = WorkloadConfig(**workload)
    sizes = config.fix(Sizes(8, Span(1, 10), Span(1, 20)))
    check_room(config, sizes, length)
    with pytest.raises(RoomError, match=rf"context of {length - 1} tokens; lower {options}"):
        check_room(config, sizes, length - 1)
    if config.kind == "multi-turn":  # answers that end by themselves may be short
        check_room(config, sizes, 60, stop_at_eos=True)


def test_a_trace_skips_requests_that_do_not_fit() -> None:
    rows = [TraceEntry(timestamp=0.0, input_length=n, output_length=2) for n in (3, 9)]
    assert describe_misfits(rows, 11) == ""
    assert describe_misfits(rows, 10).startswith("1 of the trace's 2 requests do not fit")
    with pytest.raises(RoomError, match="No request of the trace fits"):
        describe_misfits(rows, 4)


async def test_requests_stay_within_the_context_that_a_server_reports() -> None:
    async with fake_server(told={"max_model_len": 4}) as fake:
        with pytest.raises(RoomError, match="context of 4 tokens; lower --input-len or --output"):
            await measure(fake)
    assert not fake.bodies


@pytest.mark.parametrize(
    ("key", "said"), [("", "Give it a key with --api-key"), ("wrong", "It does not take the key")]
)
async def test_a_missing_key_is_reported_before_the_run(
    key: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fake_server(key="right") as fake:
        with pytest.raises(ServerError, match=rf"/v1 answers 401: no key\. {said}"):
            await measure(fake, api_key=key)
        assert await measure(fake, api_key="right") == 0
    assert "without a name" not in capsys.readouterr().out


async def test_an_unreachable_server_is_reported_as_in_the_chat() -> None:
    said = r"^http://127\.0\.0\.1:9/v1/models cannot be reached: no server answers there\.$"
    with pytest.raises(ServerError, match=said):
        await measure(Fake(port=9))


async def test_an_address_that_does_not_serve_http_is_reported() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServerError, match=r"does not answer in HTTP\.$"):
            await measure(Fake(port=port))


async def test_an_interrupted_sweep_reports_the_missing_points(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fake_server(most=2) as fake:
        with pytest.raises(OnlineRunError, match="500: out of luck"):
            await measure(fake, "100", "200", "inf")
    printed = capsys.readouterr().out
    missing = "not measured: 200 requests/s; as fast as possible"
    assert printed.splitlines()[-1] == f"the sweep was interrupted; {missing}"
    async with fake_server() as fake:
        assert await measure(fake) == 0
    assert "interrupted" not in capsys.readouterr().out


async def test_some_failures_leave_the_exit_code_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fake_server(refuse=0) as fake:
        assert await measure(fake) == 0
    assert "1 failed: 500: out of luck" in capsys.readouterr().out


async def test_a_server_that_refuses_everything_is_an_error(tmp_path: Path) -> None:
    async with fake_server() as fake:
        load = LoadConfig(url=f"http://127.0.0.1:{fake.port}/v2")
        small = BenchConfig(num_requests=2)
        with pytest.raises(OnlineRunError, match="404: Not Found"):
            await bench_serve(EngineConfig(), small, WorkloadConfig(), load, ReportConfig())
    with pytest.raises(ConfigError, match="--tp 2: is for an engine of its own"):
        await bench_serve(EngineConfig(tp=2), small, WorkloadConfig(), load, ReportConfig())


def test_bench_serve_starts_and_stops_its_own_server(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    trace = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": at, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, index]}
        for index, at in enumerate((5.0, 5.0, 6.0))
    ]
    lines[0] |= {"chat_id": 7, "parent_chat_id": -1}
    lines[2] |= {"chat_id": 8, "parent_chat_id": 7}
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--trace", trace, "--trace-scale", "0.1", "--repeat", "1", "--json", file)
    with_key = {**os.environ, "MINISGL_API_KEY": "of-another-server"}
    result = minisgl("bench", "serve", "--device", "cpu", *options, environment=with_key)
    assert (result.returncode, result.stderr) == (0, "")
    assert "demo with its own weights in float32, on CPU" in result.stdout
    assert "3 requests in 1.0 s of the trace" in result.stdout
    found = json.loads(file.read_text())
    assert found["engine_options"]["device"] == "cpu"
    assert found["backends"] == {"prefill": "torch", "decode": "torch"}
    [point] = found["points"]
    assert point["figures"]["num_output_tokens"] == 9
    assert point["figures"]["num_cached_tokens"] >= 32  # the last one finds its parent's blocks
    assert point["figures"]["num_steps"] > 0 and point["limit"] is None
    assert point["requests"][2]["submitted_s"] >= 0.1


def test_a_server_that_fails_to_start_is_reported_with_the_reason() -> None:
    result = minisgl("bench", "serve", "--model", "/no/such/folder")
    assert result.returncode == 2
    assert result.stderr == "minisgl: There is no folder /no/such/folder.\n"
