"""Energy by NVML's counter, of a library that the tests write."""

from __future__ import annotations

import ctypes
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.gated_runner import gated_server

from minisgl.bench import energy
from minisgl.bench.config import BenchConfig, LatencyConfig, ReportConfig
from minisgl.bench.energy import Energy, Spent, energy_counter, engine_gpus, metered, nvml_counter
from minisgl.bench.figures import Figures
from minisgl.bench.latency import bench_latency
from minisgl.bench.offline import bench_offline
from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.bench.online.load_config import LoadConfig, Point
from minisgl.bench.report.tables import PointResult, print_figures, sweep_tables
from minisgl.bench.serve import bench_serve
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.config import EngineConfig


class Library:
    """NVML of some GPUs, by their UUIDs: millijoules, each time 2,000 more. None: no counter."""

    def __init__(self, gpus: dict[str, int | None], fails: str = "") -> None:
        self.gpus = gpus
        self.uuids = [*gpus]
        self.fails = fails

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 9 if self.fails == "init" else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        if uuid.decode() not in self.gpus:
            return 6
        handle._obj.value = 1 + self.uuids.index(uuid.decode())
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, used: Any) -> int:  # noqa: N802
        uuid = self.uuids[handle.value - 1]
        found = self.gpus[uuid]
        if found is None:
            return 3
        used._obj.value = found
        self.gpus[uuid] = found + 2000
        return 0


def counter_of(library: Library, gpus: list[str]) -> energy.Counter:
    found: Any = library
    return nvml_counter(found, gpus)


def test_the_energy_of_several_gpus_adds_up_in_joules() -> None:
    big = 1 << 40  # more than an int of 32 bits has room for
    joules = counter_of(Library({"GPU-a": big, "GPU-b": 500, "GPU-c": 1}), ["GPU-a", "GPU-b"])
    first, second = joules(), joules()
    assert first == (big + 500) / 1e3
    assert second is not None and second - first == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("library", "gpus"),
    [
        (Library({"GPU-a": 1}, fails="init"), ["GPU-a"]),
        (Library({"GPU-a": 1}), ["GPU-a", "GPU-x"]),
        (Library({"GPU-a": 1, "GPU-b": None}), ["GPU-a", "GPU-b"]),
    ],
)
def test_energy_is_unknown_where_nvml_does_not_tell_it(library: Library, gpus: list[str]) -> None:
    assert counter_of(library, gpus)() is None


def test_energy_is_unknown_without_gpus_or_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert energy_counter([])() is None
    for library in (missing, lambda name: object()):  # an old one lacks the functions
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert energy_counter(["GPU-a"])() is None


def test_gpus_are_named_as_nvml_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        def __init__(self, rank: int) -> None:
            self.uuid = f"{'GPU-' * rank}{rank}1-2"

    class Config:
        device, num_ranks, nnodes = "cuda", 2, 1

    monkeypatch.setattr(torch.cuda, "get_device_properties", Gpu)
    assert engine_gpus(Config) == ["GPU-01-2", "GPU-11-2"]  # type: ignore[arg-type]
    Config.nnodes = 2  # one of them is out of reach
    assert engine_gpus(Config) == []  # type: ignore[arg-type]


def test_a_meter_takes_the_difference() -> None:
    readings = iter([10.0, 73.0])
    with metered(lambda: next(readings)) as spent:
        pass
    assert spent.joules == 63.0
    assert spent.seconds > 0
    with metered(lambda: None) as unknown:
        pass
    assert unknown.joules is None
    assert unknown.energy(9) is None


def test_watts_and_joules_per_token_follow() -> None:
    found = Spent(seconds=2.0, joules=1300.0).energy(num_output_tokens=1000)
    assert found == Energy(joules=1300.0, mean_watts=650.0, joules_per_output_token=1.3)


def figures(joules: float | None) -> Figures:
    one = RequestRecord(
        submitted_s=0.0,
        first_token_s=1.0,
        last_token_s=2.0,
        num_prompt_tokens=4,
        num_cached_tokens=0,
        num_output_tokens=4,
    )
    run = RunRecord([one], num_steps=4, num_retractions=0)
    return Figures.of(run).with_energy(Spent(seconds=2.0, joules=joules))


def printed(*shown: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=200)
    for one in shown:
        console.print(one)
    return file.getvalue()


def test_the_table_of_a_run_has_energy_where_it_is_known() -> None:
    for joules, is_shown in ((1300.0, True), (None, False)):
        file = io.StringIO()
        print_figures(Console(file=file, width=200), figures(joules), None)
        assert ("mean watts" in file.getvalue()) == is_shown
        assert ("325.000" in file.getvalue()) == is_shown


def test_the_table_of_a_sweep_has_energy_where_it_is_known() -> None:
    def point(joules: float | None) -> PointResult:
        return PointResult(
            point=Point(None, None),
            limit=None,
            repetitions=[figures(joules)],
            requests=[],
        )

    assert "joules/token" not in printed(*sweep_tables([point(None)], 160))
    shown = printed(*sweep_tables([point(1300.0), point(None)], 160))
    assert "joules/token" in shown
    assert "325.000" in shown


@pytest.fixture
def gpu_counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the engine of a CPU run on a GPU that uses 2 joules between any two readings."""

    def counter(gpus: object) -> energy.Counter:
        assert not gpus
        return counter_of(Library({"GPU-a": 0}), ["GPU-a"])

    for name in ("offline", "latency", "serve"):
        monkeypatch.setattr(f"minisgl.bench.{name}.energy_counter", counter)
    yield


@pytest.mark.usefixtures("gpu_counter")
async def test_offline_and_latency_report_energy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report, engine = tmp_path / "a.json", ReportConfig(), EngineConfig(device="cpu")
    sizes = BenchConfig(
        num_requests=2, max_prompt_length=8, max_output_length=4, json_file=str(file), repeat=1
    )
    await bench_offline(engine, sizes, WorkloadConfig(), report)
    found = json.loads(file.read_text())["figures"]
    assert found["energy"]["joules"] == 2.0
    assert found["energy"]["joules_per_output_token"] == 2.0 / found["num_output_tokens"]
    assert "mean watts of the GPUs" in capsys.readouterr().out

    batches = LatencyConfig(
        batch_size=("1", "2"), input_len=4, output_len=4, json_file=str(file), repeat=1
    )
    await bench_latency(engine, batches, report)
    told = [batch["figures"]["energy"] for batch in json.loads(file.read_text())["batches"]]
    assert [one["joules_per_output_token"] for one in told] == [0.5, 0.25]
    assert "joules/token" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu_counter")
async def test_a_run_over_http_reports_energy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    async with gated_server() as served:
        await bench_serve(
            EngineConfig(),
            BenchConfig(num_requests=2, repeat=1, json_file=str(file)),
            WorkloadConfig(input_len=5, output_len=6),
            LoadConfig(url=f"http://127.0.0.1:{served.port}", vocab_size=100),
            ReportConfig(),
        )
    [point] = json.loads(file.read_text())["points"]
    assert point["figures"]["energy"]["joules_per_output_token"] == 2.0 / 12
    assert "joules per output token" in capsys.readouterr().out


async def test_on_a_cpu_there_is_no_energy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    batches = LatencyConfig(
        batch_size=("1",), input_len=4, output_len=4, json_file=str(file), repeat=1
    )
    await bench_latency(EngineConfig(device="cpu"), batches, ReportConfig())
    assert json.loads(file.read_text())["batches"][0]["figures"]["energy"] is None
    out = capsys.readouterr().out
    assert "joules" not in out
    assert "watts" not in out
