"""Failure of one rank ends all: no client waits for a dead rank, and no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, spec_named
from support.fake_matcher import FakeMatcher, held_to, tokens_after
from support.forked_programs import forked_session
from support.forked_ranks import forked_ranks
from support.http_server import HELLO, session, wait_for_health
from support.parity import load_engine
from support.ports import free_port
from support.processes import check_running, pids_of
from support.serving import demo_engine
from support.waiting import LIMIT_S

from minisgl import LLM
from minisgl.engine import AsyncEngine
from minisgl.errors import CheckpointError, ConfigError, EngineStoppedError
from minisgl.ranks.processes.launcher import Launcher
from minisgl.request import SamplingParams

SHARED_MEMORY = Path("/dev/shm")
TCP_LISTEN = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def wait_until_left(before: set[str]) -> None:
    """Until no segment is left that was not there before and that no process uses. Those of other
    programs are not in use for an instant only."""
    while segments() - before - segments_in_use():
        time.sleep(0.01)


def segments_in_use() -> set[str]:
    """The segments that any process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            for line in maps.read_text().splitlines():
                found.add(line.partition(f"{SHARED_MEMORY}/")[2])
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for this process's temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def modes_in(folder: Path) -> list[int]:
    """The permissions of the folders."""
    return [path.stat().st_mode & 0o777 for path in folder.iterdir()]


@contextmanager
def watched_sockets(folder: Path) -> Iterator[tuple[list[set[Address]], set[int]]]:
    """The addresses on which this process and its children listen, looked at again and again, and
    the modes of what comes and goes in the folder."""
    seen: list[set[Address]] = []
    modes: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            pids = [os.getpid(), *children_of(os.getpid())]
            seen.append({address for pid in pids for address in listening(pid)})
            with contextlib.suppress(FileNotFoundError):
                modes.update(modes_in(folder))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen, modes
    finally:
        over.set()
        watching.join()


def listening(pid: int) -> Iterator[Address]:
    """The addresses of a process's open TCP sockets."""
    inodes: set[str] = set()
    for open_file in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(open_file).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTEN and fields[9] in inodes:
                yield address_of(fields[1].partition(":")[0])


def address_of(text: str) -> Address:
    """From the words of /proc/net/tcp, each in the order of the machine."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    while any(map(is_alive, pids)):
        time.sleep(0.05)


async def fail_two_answers(engine: AsyncEngine, how: signal.Signals) -> str:
    """Send the signal to rank 1 while two answers are written; returns why they end."""
    streams = [engine.submit([1, 2, 3], ENDLESS) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    os.kill(pids_of(engine._runner.others)[1], how)
    reasons: set[str] = set()
    for stream in streams:
        with pytest.raises(EngineStoppedError) as caught:
            async for _ in stream:
                pass
        reasons.add(str(caught.value))
    [reason] = reasons
    with pytest.raises(EngineStoppedError, match="has failed"):
        engine.submit([1], ENDLESS)
    return reason


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
async def test_a_killed_rank_ends_every_answer_and_is_named(options: dict[str, int]) -> None:
    """For other phases and layouts see test_killed_ranks.py."""
    hook = sys.excepthook
    with forked_ranks():
        # Nothing but the end of the process tells: no step is ever late.
        starting = await demo_engine(step_timeout=math.inf, **options)
    async with starting as engine:
        pids = [pid for pid in pids_of(engine._runner.others).values() if pid]
        reason = await fail_two_answers(engine, signal.SIGKILL)
        assert reason == f"Rank 1 (process {pids[0]}) was killed by SIGKILL."
        wait_until_gone(pids)
    assert not multiprocessing.active_children()
    assert engine._steps._collector.ended.done()
    assert sys.excepthook is hook  # torch's would put a rank before every line of a traceback


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no rank is killed because it ends too late."""
    monkeypatch.setattr("minisgl.ranks.processes.remote_ranks.CLOSE_LIMIT_S", 3600.0)


@pytest.mark.usefixtures("patient")
async def test_ranks_that_are_asked_to_exit_are_not_killed(temporary: Path) -> None:
    async with await demo_engine(tp=2) as engine:
        [process] = multiprocessing.active_children()
        assert modes_in(temporary) == []
        with pytest.raises(ConfigError, match="this process has ranks already"):
            await demo_engine(tp=2)
        async for _ in engine.submit([1, 2, 3], SamplingParams(max_tokens=2)):
            pass
    assert process.exitcode == 0
    assert modes_in(temporary) == []


@pytest.mark.usefixtures("patient")
async def test_stages_exit_in_order_while_a_plan_waits_for_its_masks() -> None:
    """The first stage must not wait for tokens that are never sampled."""
    with forked_ranks():
        starting = await demo_engine(pp=2)
    async with starting as engine:
        [process] = multiprocessing.active_children()
        rule = tokens_after(engine.vocab_size)
        stream = engine.submit([1, 2, 3], ENDLESS, extras=held_to(FakeMatcher(rule)))
        plain = engine.submit([1, 2, 4], ENDLESS)
        for _ in range(5):
            await anext(stream)
        while engine._steps._deferred is None:
            assert not stream.request.finished
            await asyncio.sleep(0)
        plain.abort()
    assert process.exitcode == 0


def test_the_end_of_a_rank_is_known_to_whoever_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells it once: here to a thread that is slow to write it down."""
    launcher = Launcher(multiprocessing.get_context("spawn"))
    process = launcher._processes[1] = launcher._context.Process(target=print)
    process.start()
    is_told, may_write, waitpid = threading.Event(), threading.Event(), os.waitpid

    def tell_slowly(pid: int, options: int) -> tuple[int, int]:
        told = waitpid(pid, options)
        if told[0]:
            is_told.set()
            may_write.wait()
        return told

    def ask() -> None:
        while launcher.states()[1].exit_code is None:
            time.sleep(0.001)

    monkeypatch.setattr(os, "waitpid", tell_slowly)
    asking = threading.Thread(target=ask)
    asking.start()
    is_told.wait()
    threading.Timer(0.2, may_write.set).start()  # at once, whoever joins would wait in vain
    launcher.join(LIMIT_S)
    assert process.exitcode == 0
    asking.join()


async def test_a_new_engine_can_start_after_a_rank_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the ranks have met, and at rest, where nothing but its end tells."""
    with forked_ranks(), monkeypatch.context() as patch:
        patch.setattr("minisgl.ranks.processes.launcher.run_spawned_rank", print)
        with pytest.raises(EngineStoppedError, match=r"Rank 1 \(process"):
            await demo_engine(tp=2)
    with forked_ranks():
        engine = await demo_engine(tp=2)
    os.kill(pids_of(engine._runner.others)[1] or 0, signal.SIGKILL)
    await engine.close()
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()


def test_ctrl_c_while_loading_ends_every_rank() -> None:
    over = threading.Event()

    def interrupt() -> None:
        while not ranks_among(children_of(os.getpid())):
            if over.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            LLM(tp=2, device="cpu")
    finally:
        over.set()
        interrupting.join()
    while "minisgl-ranks" in [thread.name for thread in threading.enumerate()]:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()


def test_a_script_from_standard_input_gets_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others could not read it again."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(ConfigError, match="put it into a file"):
        LLM(tp=2, device="cpu")


async def test_a_stopped_rank_is_detected_by_the_step_that_it_blocks() -> None:
    with forked_ranks():
        starting = await demo_engine(tp=2, step_timeout=4.0)
    async with starting as engine:
        pids = [pid for pid in pids_of(engine._runner.others).values() if pid]
        reason = await fail_two_answers(engine, signal.SIGSTOP)
        assert re.search("rank 1 is silent|Rank 1 .* has given no sign of life", reason)
        wait_until_gone(pids)


async def test_ranks_listen_on_loopback_only_and_are_killed_if_they_do_not_exit(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.ranks.processes.remote_ranks.CLOSE_LIMIT_S", 1.0)
    with watched_sockets(temporary) as (seen, modes):
        engine = await demo_engine(tp=2)
        async for _ in engine.submit([1, 2, 3], SamplingParams(max_tokens=2)):
            pass
    listening = set().union(*seen)
    assert not modes  # processes that are killed leave nothing
    assert listening  # gloo's, on which a rank waits for others
    assert all(address.is_loopback for address in listening), listening
    [pid] = [pid for pid in pids_of(engine._runner.others).values() if pid]
    os.kill(pid, signal.SIGSTOP)
    await engine.close()
    wait_until_gone([pid])
    assert modes_in(temporary) == []


def test_a_broken_checkpoint_leaves_no_process(tmp_path: Path) -> None:
    folder = make_checkpoint(spec_named("llama"), tmp_path)
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights: norm\.weight"):
        load_engine(folder, tp=2)
    assert not multiprocessing.active_children()


def test_a_rank_count_that_does_not_divide_the_model_is_refused_with_those_that_do() -> None:
    refusal = r"^tp=3: cannot shard this model over 3 ranks: .* not divisible; allowed: 1, 2 or 4"
    with pytest.raises(ConfigError, match=refusal):
        LLM(tp=3, device="cpu")
    assert not multiprocessing.active_children()


def test_a_script_without_a_main_guard_gets_an_explanation(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('from minisgl import LLM\nLLM(tp=2, device="cpu")\n')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert 'put what the script does under `if __name__ == "__main__":`' in done.stderr
    assert "Rank 1" in done.stderr
    assert done.stderr.count("Traceback") == 1 and done.stderr.count("__name__") == 1


# -- the server -----------------------------------------------------------------------------------


@contextmanager
def tp_server(
    *options: str, loaded: bool = True, start: Callable[..., Any] = forked_session
) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """A real one on two ranks, its address, and the processes that it has started. loaded: it
    answers; else its rank has just been started. start: the server; its rank is spawned anyway."""
    command = ("-m", "minisgl", "serve", "--device", "cpu", "--tp", "2")
    pids: list[int] = []
    with free_port() as port, start(*command, "--port", str(port), *options) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            if loaded:
                wait_for_health(server, url, 200)
            while not ranks_among(pids):
                check_running(server)
                pids = children_of(server.pid)
            yield server, url, pids
        finally:
            for pid in filter(is_alive, [server.pid, *pids]):
                os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError, ValueError):
            continue
        if int(fields["PPid"]) == pid:
            found.append(int(fields["Pid"]))
    return found


def rank_among(pids: list[int]) -> int:
    [rank] = ranks_among(pids)
    return rank


def ranks_among(pids: list[int]) -> list[int]:
    """Those of the processes that are ranks."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_server_exits_when_one_of_its_ranks_dies() -> None:
    before = segments()
    body = {"messages": HELLO, "ignore_eos": True, "stream": True, "max_tokens": 1500}
    patient = ("--step-timeout", "inf")  # so that nothing but the end of the process tells
    with (
        tp_server(*patient) as (server, url, pids),
        httpx.Client(base_url=url) as client,
    ):
        events: list[str] = []
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in filter(None, answer.iter_lines()):
                events.append(line)
                if len(events) == 5:
                    os.kill(rank_among(pids), signal.SIGKILL)
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert "Rank 1" in error["message"] and "SIGKILL" in error["message"]
        assert events[-1] == "data: [DONE]"
        assert server.wait() == 1
        assert server.stderr and "was killed by SIGKILL" in server.stderr.read()
        wait_until_gone(pids)
    wait_until_left(before)


def test_a_server_that_starts_exits_when_one_of_its_ranks_dies() -> None:
    """At rest it is the engine that notices: see test_killed_ranks.py."""
    with tp_server("--dp-attention", loaded=False) as (server, _, pids):
        rank = rank_among(pids)
        os.kill(rank, signal.SIGKILL)
        assert server.wait() == 1
        assert server.stderr
        assert f"Rank 1 (process {rank}) was killed by SIGKILL." in server.stderr.read()
        wait_until_gone(pids)


def test_a_stopped_rank_is_reported_and_does_not_delay_the_shutdown() -> None:
    body = {"prompt": [5, 6], "ignore_eos": True, "stream": True, "max_tokens": 1500}
    options = ("--step-timeout", "18", "--drain-timeout", "1")
    with tp_server(*options) as (server, url, pids), httpx.Client(base_url=url) as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = filter(None, answer.iter_lines())
            for _ in range(5):
                next(lines)
            os.kill(rank_among(pids), signal.SIGSTOP)
            wait_for_health(server, url, 503)
            error = client.get("/health").json()["error"]
            assert error["code"] == "stalled" and "rank 1 is silent" in error["message"]
            os.kill(server.pid, signal.SIGTERM)
            rest = list(lines)
        assert "shutting down" in rest[-2] and rest[-1] == "data: [DONE]"
        assert server.wait() == 1
        # Long before the step would have failed.
        assert server.stderr and "Rank 1 is silent, and does not" in server.stderr.read()
        wait_until_gone(pids)


def test_ranks_do_not_outlive_a_server_that_is_killed() -> None:
    before = segments()
    with tp_server() as (server, _, pids):
        os.kill(server.pid, signal.SIGKILL)
        wait_until_gone(pids)
    wait_until_left(before)


def test_ctrl_c_shuts_down_the_server_and_its_ranks_in_order() -> None:
    """A terminal sends it to every process of the group, also before a rank can ignore it."""
    with tp_server(start=session) as (server, url, pids):
        status = Path(f"/proc/{rank_among(pids)}/status").read_text()
        blocked = int(status.split("SigBlk:\t")[1].split("\n")[0], 16)
        assert blocked >> (signal.SIGINT - 1) & 1
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 3})
        assert answer.status_code == 200
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait() == 0
        wait_until_gone(pids)
        assert server.stderr and "Traceback" not in server.stderr.read()
