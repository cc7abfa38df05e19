"""Node 0 waits for the others, and refuses those that do not fit with a sentence at both ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.nodes import TOKEN
from support.ports import free_port
from support.resolving import CPU
from support.waiting import wait_until

from minisgl.config import EngineConfig, ResolvedConfig, resolve
from minisgl.distributed.interfaces import LOOPBACK, interface_of
from minisgl.distributed.layout import RankLayout
from minisgl.drafting.networks.loading import read_network
from minisgl.errors import CheckpointError, ConfigError, EngineStoppedError
from minisgl.models.config import ModelConfig
from minisgl.models.hub import DEMO_FOLDER, locate_model
from minisgl.models.registry import read_model_config
from minisgl.ranks.nodes import gathering, worker_node
from minisgl.ranks.nodes.agreement import difference, facts_of
from minisgl.ranks.nodes.gathering import Nodes, gather_nodes
from minisgl.ranks.nodes.link import Beat, Join, NodeLink
from minisgl.ranks.nodes.main_node import NodesChannel
from minisgl.ranks.nodes.worker_node import connect, work
from minisgl.ranks.processes.channel import Failed, Ready
from minisgl.ranks.processes.mask_ring import MaskRing
from minisgl.runner.setup import Setup

FOLDER = locate_model("", load_format="auto")
MODEL: ModelConfig = read_model_config(FOLDER)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)


def config_of(node: int, port: int, nnodes: int = 2, **options: Any) -> ResolvedConfig:
    """Also for numbers of nodes by which the model cannot be divided: nothing is loaded here."""
    config = EngineConfig(device="cpu", master_port=port, **options)
    resolved = resolve(config, MODEL.facts(), CPU, overlap=True)
    return dataclasses.replace(resolved, tp=nnodes, nnodes=nnodes, node_rank=node)


class Main:
    """Node 0, which gathers in a thread."""

    def __init__(self, nnodes: int = 2) -> None:
        self._reserved = contextlib.ExitStack()
        self.port = self._reserved.enter_context(free_port())
        self.nnodes = nnodes
        self.fraction = 0.0
        self._over = False
        self._links: list[NodeLink] = []
        self._threads = ThreadPoolExecutor(1)
        config = config_of(0, self.port, nnodes)
        facts = facts_of(Setup(config, MODEL, FOLDER))
        self.nodes: Future[Nodes] = self._threads.submit(gather_nodes, config, facts, self._report)

    def _report(self, fraction: float) -> None:
        self.fraction = fraction
        if self._over:
            raise InterruptedError

    def close(self) -> None:
        self._over = True
        if self.nodes.exception(10) is None:
            self.nodes.result().close()
        self._threads.shutdown()
        for link in self._links:
            link.close()
        self._reserved.close()

    def joined(self, node: int, facts: Mapping[str, str] | None = None) -> NodeLink:
        """A node that introduces itself, with its own facts."""
        config = config_of(node, self.port, self.nnodes)
        link = NodeLink(connect(config), "Node 0", lambda: Beat(8.0))
        self._links.append(link)
        link.send(Join(node, facts or facts_of(Setup(config, MODEL, FOLDER))))
        return link


@pytest.fixture
def main() -> Iterator[Callable[..., Main]]:
    started: list[Main] = []

    def start(nnodes: int = 2) -> Main:
        started.append(Main(nnodes))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_node_0_starts_when_all_have_joined_and_tells_them_where_to_meet(
    main: Callable[..., Main],
) -> None:
    zero = main(3)
    links = [zero.joined(2), zero.joined(1)]
    nodes = zero.nodes.result()
    assert sorted(nodes.links) == [1, 2]
    assert nodes.interface == LOOPBACK
    nodes.rendezvous.store().set("greeting", "from a rank")
    assert nodes.store.get("greeting") == b"from a rank"
    with pytest.raises(ConnectionRefusedError):  # nobody else can knock
        socket.create_connection(("127.0.0.1", zero.port))

    layout = RankLayout(tp=6, num_nodes=3)
    channel = channel_of(nodes, layout)
    channel.end_of(1).beat()
    for link in links:
        link.beat = lambda: Beat(8.0, (3.0, 4.0))
        link.send(Ready())
    ready: set[Any] = set()
    wait_until(lambda: bool(ready.update(channel.receive(0.1)) or len(ready) == 4))
    assert ready == {(rank, Ready()) for rank in (2, 3, 4, 5)}
    wait_until(lambda: not channel.receive(0.1) and 0.0 not in channel.heartbeats().values())
    beats = dict(channel.heartbeats())
    assert 0.0 < beats.pop(1) <= time.monotonic()
    assert beats == {2: 3.0, 3: 4.0, 4: 3.0, 5: 4.0}

    links[0].send(Failed("CheckpointError", "Rank 4 failed: no weights"))
    wait_until(lambda: not channel.receive(0.1) and channel.broken() is not None)
    assert isinstance(channel.broken(), CheckpointError)
    assert str(channel.broken()) == "Node 2 (127.0.0.1): Rank 4 failed: no weights"
    links[1].close()  # the first reason counts
    channel.receive(0.1)
    assert "Rank 4 failed" in str(channel.broken())


def test_a_node_that_ends_without_a_word_is_named(main: Callable[..., Main]) -> None:
    zero = main()
    link = zero.joined(1)
    nodes = zero.nodes.result()
    channel = channel_of(nodes, RankLayout(tp=2, num_nodes=2))
    link.close()
    wait_until(lambda: not channel.receive(0.1) and channel.broken() is not None)
    assert isinstance(channel.broken(), EngineStoppedError)
    assert str(channel.broken()).startswith("Node 1 (127.0.0.1) has closed the connection")


def channel_of(nodes: Nodes, layout: RankLayout) -> NodesChannel:
    """The channel of rank 0, with one more rank on its machine."""
    context = multiprocessing.get_context("spawn")
    masks = MaskRing.allocate(context, 1, 8, 1)
    return NodesChannel([1], context, masks, nodes, layout)


def test_strangers_and_unfit_nodes_are_refused_and_the_right_one_still_joins(
    main: Callable[..., Main], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    zero = main(3)
    first = zero.joined(1)
    wait_until(lambda: "Node 1 (127.0.0.1) has joined" in caplog.text)
    with socket.create_connection(("127.0.0.1", zero.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: anything at all\r\n\r\n")
        wait_until(lambda: "it is no node of minisgl" in caplog.text)

    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", "another secret, as long")
    config = config_of(2, zero.port, 3)
    with pytest.raises(ConfigError, match=r"^--master-addr 127.0.0.1:\d+: node 0 cannot be joined: "
                       "it does not accept the cluster token of this node$"):  # fmt: skip
        work(Setup(config, MODEL, FOLDER))
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)

    twice = config_of(1, zero.port, 3)
    half = config_of(2, zero.port, 3, dtype="bfloat16", page_size=32)
    wide = dataclasses.replace(MODEL, hidden_size=4096)
    monkeypatch.setattr(worker_node, "facts_of", with_version("0.0.1"))
    for its, model, reason in (
        (config, MODEL, r"the version of minisgl \(0\.0\.1, on node 0 [\d.a-z]+\)"),
        (twice, MODEL, r"there is a node 1 already \(--node-rank\)"),
        (half, MODEL, r"dtype \(bfloat16, on node 0 float32\), .*page_size \(32, on node 0 16\)"),
        (config, wide, r"the model's hidden_size \(4096, on node 0 \d+\)"),
    ):
        with pytest.raises(
            ConfigError, match="^--node-rank .: node 0 refuses this node: .*" + reason
        ):
            work(Setup(its, model, FOLDER))
        assert "Refused node" in caplog.text
        monkeypatch.setattr(worker_node, "facts_of", facts_of)

    assert not zero.nodes.done()
    first.close()  # before all are there
    wait_until(lambda: "it may join again" in caplog.text)
    zero.joined(2)
    zero.joined(1)
    assert sorted(zero.nodes.result().links) == [1, 2]
    assert TOKEN not in caplog.text


def with_version(version: str) -> Callable[..., dict[str, str]]:
    def facts(setup: Setup) -> dict[str, str]:
        return facts_of(setup) | {"the version of minisgl": version}

    return facts


def test_a_node_that_does_not_come_is_named_after_a_while(
    main: Callable[..., Main], monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(gathering, "JOIN_LIMIT_S", 0.3)
    with pytest.raises(EngineStoppedError, match=r"Node 1 has not joined within .*--node-rank 1"):
        main(3).nodes.result()
    monkeypatch.setattr(worker_node, "JOIN_LIMIT_S", 0.3)
    with pytest.raises(EngineStoppedError, match=r"Node 0 was not found at 127\.0\.0\.1:\d+ with"):
        work(Setup(config_of(1, port), MODEL, FOLDER))


def test_a_node_hears_why_node_0_has_failed_and_that_it_has_gone(
    main: Callable[..., Main],
) -> None:
    for last_words, reason in ((True, "Rank 0 failed: no memory"), (False, "Node 0 has closed")):
        zero = main()
        with ThreadPoolExecutor(1) as threads:
            worked = threads.submit(work, Setup(config_of(1, zero.port), MODEL, FOLDER))
            nodes = zero.nodes.result()
            if last_words:
                nodes.links[1].send_last(Failed("DeviceMemoryError", reason))
            nodes.close()
            with pytest.raises(EngineStoppedError, match=reason):
                worked.result()


def test_without_a_secret_node_0_opens_no_port_beyond_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINISGL_CLUSTER_TOKEN")
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("it binds"))
    with pytest.raises(
        ConfigError, match=r"--master-addr 192\.0\.2\.1: beyond this machine .* secret"
    ):
        gather_nodes(config_of(0, 29500, master_addr="192.0.2.1"), {}, lambda _: None)


def test_an_address_that_node_0_cannot_have_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=r"--master-addr 0\.0\.0\.0: allowed: the address at whi"):
        gather_nodes(config_of(0, port, master_addr="0.0.0.0"), {}, lambda _: None)
    with pytest.raises(ConfigError, match=r"--master-addr 192\.0\.2\.1: not an address of this ma"):
        gather_nodes(config_of(0, port, master_addr="192.0.2.1"), {}, lambda _: None)
    with pytest.raises(ConfigError, match=r"--master-addr no\.invalid: not an address \("):
        gather_nodes(config_of(0, port, master_addr="no.invalid"), {}, lambda _: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"--master-port .*: Address already in use"),
    ):
        gather_nodes(config_of(0, taken.getsockname()[1]), {}, lambda _: None)


# -- what must agree -------------------------------------------------------------------------------


def test_nodes_of_one_command_line_agree_also_with_models_in_different_places(
    tmp_path: Path,
) -> None:
    ours = facts_of(Setup(config_of(0, 1000, model="here"), MODEL, FOLDER))
    theirs = facts_of(Setup(config_of(1, 2000, model="there", num_pages=70), MODEL, FOLDER))
    assert difference(theirs, ours) is None


def test_weights_are_compared_by_their_files_and_by_their_ends(tmp_path: Path) -> None:
    config = config_of(0, 1000)
    file = tmp_path / "model.safetensors"
    content = bytes(10_000)
    file.write_bytes(content)
    ours = facts_of(Setup(config, MODEL, tmp_path))
    for other in (content[:-1] + b"x", content + b"\0"):
        file.write_bytes(other)
        found = difference(facts_of(Setup(config, MODEL, tmp_path)), ours)
        assert found is not None and found.startswith("the weights (sha256:")
    dummy = dataclasses.replace(config, load_format="dummy")
    found = difference(facts_of(Setup(dummy, MODEL, tmp_path)), ours)
    assert found is not None and "load_format (dummy, on node 0 safetensors)" in found
    assert "the weights (none, on node 0 sha256:" in found


def test_drafters_are_compared_by_what_they_are_and_not_by_their_place(tmp_path: Path) -> None:
    def found(node: int, change: Callable[[Path], object] = lambda folder: None) -> dict[str, str]:
        folder = tmp_path / f"drafter-{node}"
        shutil.copytree(DEMO_FOLDER, folder, dirs_exist_ok=True)
        change(folder)
        network = read_network(folder, MODEL)
        config = dataclasses.replace(config_of(node, 1000), speculative=str(folder))
        return facts_of(Setup(config, MODEL, FOLDER, network))

    def write_other_weights(folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")

    def write_other_config(folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))

    ours = found(0)
    assert difference(found(1), ours) is None
    for change in (write_other_weights, write_other_config):
        said = difference(found(1, change), ours)
        assert said is not None and said.startswith("the drafter (sha256:")


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == LOOPBACK
    assert interface_of("::1") == interface_of("::ffff:127.0.0.1") == LOOPBACK
    assert interface_of("192.0.2.1") is None
    assert interface_of("fe80::1%nowhere") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return  # this machine has no network
        own = probe.getsockname()[0]
    assert interface_of(own) in [name for _, name in socket.if_nameindex()]


def test_no_thread_is_left(main: Callable[..., Main]) -> None:
    zero = main()
    zero.joined(1).close()
    zero.close()
    names = {"minisgl-admit", "minisgl-node-beat"}
    wait_until(lambda: not names & {thread.name for thread in threading.enumerate()})
