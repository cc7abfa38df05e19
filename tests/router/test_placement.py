"""GPUs and cores of replicas, and the options that ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.kvcache.disk import STORE_S
from minisgl.router import replicas
from minisgl.router.config import RouterConfig
from minisgl.router.metrics import join_pages
from minisgl.router.placement import Share, shares, visible_gpus
from minisgl.router.process import RouterProcess
from minisgl.router.replicas import ReplicaSpec, Supervisor
from minisgl.server.config import ServerConfig


def test_each_replica_gets_gpus_of_its_own() -> None:
    found = shares(2, 2, "auto", ["0", "3", "5", "7", "8"], [0, 1])
    assert found == [Share(gpus=("0", "3")), Share(gpus=("5", "7"))]
    assert found[1].environment() == {"CUDA_VISIBLE_DEVICES": "5,7"}
    with pytest.raises(ConfigError, match="--replicas 2: needs 4 GPUs, and there are 3"):
        shares(2, 2, "auto", ["0", "1", "2"], [0])
    with pytest.raises(ConfigError, match="--device cuda: no GPU is visible here"):
        shares(2, 1, "cuda", [], [0])


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
def test_each_rank_of_a_replica_gets_a_gpu(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    engine, router = EngineConfig(device="cuda", **options), RouterConfig(replicas=2)
    process = RouterProcess(engine, ServerConfig(), router, replica=(), front=())
    assert process._shares == [Share(gpus=("0", "1")), Share(gpus=("2", "3"))]


def test_without_gpus_each_replica_gets_its_share_of_the_cores() -> None:
    assert shares(2, 1, "auto", [], [0, 1, 4, 5, 6]) == [Share(cores=(0, 1)), Share(cores=(4, 5))]
    assert [share.cores for share in shares(3, 1, "cpu", ["0"], [2, 3])] == [(2,), (3,), (2,)]


@pytest.mark.parametrize(
    ("given", "gpus"),
    [("1,0", ["1", "0"]), ("", []), ("-1", []), ("0, GPU-1,,2", ["0", "GPU-1"]), ("2,-1,3", ["2"])],
)
def test_the_gpus_are_those_that_cuda_shows(given: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == gpus


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "--replicas 0: allowed: 1 or more"),
        ({"replicas": 2, "router_processes": 0}, "--router-processes 0: allowed: 1 or more"),
        ({"router_policy": "least-loaded"}, "--router-policy least-loaded: requires --replicas 2"),
        ({"router_processes": 2}, "--router-processes 2: requires --replicas 2 or more"),
        ({"replicas": 2, "router_policy": "x"}, "allowed: cache, least-loaded or round-robin"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**options)  # type: ignore[arg-type]


def test_pages_of_metrics_are_joined_by_metric() -> None:
    first = b"# HELP a What a is.\n# TYPE a counter\na_total %d.0\n"
    pages = {
        "0": first % 1 + b'# TYPE b gauge\nb{x="1 2"} 2.0\n',
        "1": first % 3 + b'# TYPE c gauge\nc{y="}"} 4.0\n',
    }
    assert join_pages((pages, "replica")).decode() == (
        "# HELP a What a is.\n# TYPE a counter\n"
        'a_total{replica="0"} 1.0\na_total{replica="1"} 3.0\n'
        '# TYPE b gauge\nb{replica="0",x="1 2"} 2.0\n'
        '# TYPE c gauge\nc{replica="1",y="}"} 4.0\n'
    )


def test_a_replica_hears_all_options_exactly() -> None:
    spec = ReplicaSpec(
        index=1,
        engine=EngineConfig(model="m", step_timeout=math.inf, memory_ratio=0.1, num_pages=7, tp=2),
        server=ServerConfig(api_key=("#a,b", 'c"'), served_model_name=("ü",), drain_timeout=5),
        share=Share(gpus=("GPU-1", "3"), cores=(1, 2)),
    )
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ReplicaSpec)
    assert heard == spec and heard.server.api_key == spec.server.api_key


async def test_replicas_with_a_disk_have_the_time_to_write_to_it_when_their_requests_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    async def end(processes: Sequence[object], seconds: float) -> None:
        given.append(seconds)

    monkeypatch.setattr(replicas, "end_children", end)
    for folder in (None, "/disk"):
        engine = EngineConfig(model="m", device="cpu", host_cache=1, disk_cache=folder)
        spec = ReplicaSpec(index=0, engine=engine, server=ServerConfig(uds="s"), share=Share())
        await Supervisor([spec], (), lambda states: None).stop(5)
    without, with_disk = given
    assert with_disk == without + STORE_S > 5 + STORE_S
