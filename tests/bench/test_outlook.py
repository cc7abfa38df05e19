"""The early warning of `bench serve` that a measurement will take long."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.waiting import until

from minisgl.bench.config import BenchConfig, ReportConfig
from minisgl.bench.online import outlook as outlook_module
from minisgl.bench.online.client import RunProgress
from minisgl.bench.online.load_config import LoadConfig
from minisgl.bench.online.outlook import Outlook
from minisgl.bench.serve import bench_serve
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.config import EngineConfig


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def requests(count: int, max_tokens: int = 500, every_s: float = 0.0) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(prompt=[1], max_tokens=max_tokens, due_s=index * every_s)
        for index in range(count)
    ]


def outlook_after(
    elapsed_s: float, schedule: list[ScheduledRequest], repeat: int = 2, **progress: Any
) -> str | None:
    clock = Clock()
    workload = progress.pop("workload", WorkloadConfig())
    outlook = Outlook(schedule, RunProgress(**progress), workload, repeat, clock)
    clock.now += elapsed_s
    return outlook.look()


def answered(count: int, tokens: int = 500, events: int = 500) -> dict[str, int]:
    return {
        "num_answered": count,
        "num_answered_tokens": count * tokens,
        "num_answered_events": count * events,
    }


def test_a_slow_server_is_told_by_its_first_answers_with_options_that_do_less() -> None:
    # 1,280 of 128,000 tokens in 20 s: 2,000 s for each of two repetitions.
    said = outlook_after(20, requests(256), num_received=1280, **answered(1))
    assert said == (
        "At the speed of the first answers this measurement takes about 67 min, 2 repetitions of "
        "33 min; to measure less, press Ctrl-C and give --num-requests 16, --output-len 32 or "
        "--repeat 1"
    )


def test_a_fast_server_is_told_nothing() -> None:
    assert outlook_after(20, requests(256), num_received=64_000, **answered(99)) == ""


def test_nothing_is_told_before_the_first_answer_or_a_long_wait() -> None:
    schedule = requests(256)
    assert outlook_after(4, schedule, num_received=9, **answered(1)) is None
    assert outlook_after(60, schedule, num_received=9) is None
    assert outlook_after(600, schedule) is None  # without one event there is no speed
    assert "takes about 474.1 h" in (outlook_after(120, schedule, num_received=18) or "")


def test_events_of_several_tokens_count_as_those_of_ended_answers() -> None:
    # A quarter of the events means a quarter of the time.
    done = {"num_received": 1280, **answered(1, events=125)}
    said = outlook_after(20, requests(256), repeat=1, **done)
    assert said == ""
    said = outlook_after(40, requests(256), repeat=1, **done)
    assert said is not None and "takes about 17 min; to" in said
    assert said.endswith("give --num-requests 64 or --output-len 128")


def test_a_server_that_keeps_up_with_slow_requests_is_not_called_slow() -> None:
    # One request a second, and after 20 s the tokens of 15 of 256: the rest takes as long as it is.
    early = {"num_received": 7500, **answered(10)}
    assert outlook_after(20, requests(256, every_s=1.0), **early) == ""
    said = outlook_after(60, requests(256, every_s=3.0), **early)
    assert said is not None and said.startswith("At these times of the requests")
    assert "about 26 min" in said and said.endswith("give --num-requests 32 or --repeat 1")


@pytest.mark.parametrize("kind", ["embed", "trace"])
def test_options_that_a_workload_does_not_take_are_not_offered(kind: str, tmp_path: Any) -> None:
    (file := tmp_path / "trace").touch()
    workload = WorkloadConfig(trace=str(file)) if kind == "trace" else WorkloadConfig(workload=kind)
    received = {"trace": 1280, "embed": 0}[kind]
    said = outlook_after(
        20, requests(256), workload=workload, num_received=received, **answered(1, events=1280)
    )
    assert said is not None and "--output-len" not in said and "--num-requests" in said


# -- in a run -------------------------------------------------------------------------------------


class HeldServer:
    """Answers the first request, and every other one once `released` is set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.num_asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            status, body = b"404 Not Found", b"{}"
        else:
            self.num_asked += 1
            if self.num_asked > 1:
                await self.released.wait()
            chunk = {"choices": [{"text": "a", "finish_reason": "length"}]}
            status, body = b"200 OK", b"data: " + json.dumps(chunk).encode() + b"\n\n"
            body += b"data: [DONE]\n\n"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()


@pytest.mark.parametrize("long_s", [0.0, 1e9])
async def test_the_warning_comes_while_answers_are_missing_and_only_once(
    long_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outlook_module, "LONG_S", long_s)
    monkeypatch.setattr(outlook_module, "ANSWERED_S", 0.0)
    monkeypatch.setattr(outlook_module, "INTERVAL_S", 0.001)
    held = HeldServer()
    printed = ""

    def warnings() -> int:
        nonlocal printed
        printed += capsys.readouterr().out
        return printed.count("this measurement takes about")

    async with await asyncio.start_server(held.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        measuring = asyncio.ensure_future(
            bench_serve(
                EngineConfig(),
                BenchConfig(num_requests=8),
                WorkloadConfig(),
                LoadConfig(url=f"http://127.0.0.1:{port}"),
                ReportConfig(),
            )
        )
        try:
            if not long_s:
                await until(lambda: warnings() or measuring.done())
                assert not measuring.done()
            held.released.set()
            assert await measuring == 0
        finally:
            measuring.cancel()
    assert warnings() == (0 if long_s else 1)
    assert printed.count("repetition 2 of 2") == 1


def test_the_offers_never_go_below_what_can_be_measured() -> None:
    few = [replace(request, max_tokens=20) for request in requests(5)]
    said = outlook_after(500, few, num_received=1, **answered(1, tokens=20, events=20))
    assert said is not None and "--num-requests 4, --output-len 16 or --repeat 1" in said
    said = outlook_after(5000, few[:1], repeat=1, num_received=1, **answered(1, 20, 20))
    assert said is not None and said.endswith("give --output-len 16")
