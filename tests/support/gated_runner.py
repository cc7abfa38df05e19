"""A fake runner whose steps end on request, and a server with an engine on it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp
from support.fake_runner import FakeDisk, FakeRunner, expected_output
from support.quick_server import QuickServer

from minisgl.config import Capacity, EngineConfig, resolve
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.kvcache.disk import Disk
from minisgl.matcher import MaskRows
from minisgl.models.generation import GenerationDefaults
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.process import Server, bind, http_settings
from minisgl.text.tokenizer import Tokenizer

# In the demo tokenizer these ids are single characters, but for the first three, which are special.
VOCAB = 80
EOS = 40


class GatedRunner(FakeRunner):
    """Steps end at once while the gate is open; while it is closed, `step()` ends one."""

    def __init__(self, page_size: int = 4) -> None:
        super().__init__(page_size=page_size, vocab_size=VOCAB)
        self.launched: list[StepPlan] = []
        self.num_collected = 0
        self._is_open = True
        self._permits = 0
        self._changed = threading.Condition()

    def open(self) -> None:
        self._set(is_open=True)

    def close_gate(self) -> None:
        self._set(is_open=False)

    def step(self) -> None:
        self._set(is_open=False, permits=1)

    def _set(self, *, is_open: bool, permits: int = 0) -> None:
        with self._changed:
            self._is_open = is_open
            self._permits += permits
            self._changed.notify_all()

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepResult:
        self.launched.append(plan)
        return super().launch(plan, masks)

    def collect(self, handle: StepResult) -> StepResult:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._permits)
            if not self._is_open:
                self._permits -= 1
        self.num_collected += 1
        return handle

    def close(self) -> None:
        self.open()


@dataclass(frozen=True)
class Gated:
    """A server on the test's own loop."""

    engine: AsyncEngine
    runner: GatedRunner
    server: Server
    port: int

    def text(self, prompt: list[int], max_tokens: int, *, seed: int = 0, eos: bool = False) -> str:
        """The expected answer to `prompt`."""
        tokens = expected_output(
            prompt,
            seed=seed,
            max_tokens=max_tokens,
            stop=frozenset({EOS} if eos else ()),
            vocab_size=VOCAB,
        )
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.decode(token for token in tokens if token != EOS or not eos)


@asynccontextmanager
async def gated_server(
    *,
    overlap: bool = True,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    api_key: tuple[str, ...] = (),
    disk: FakeDisk | None = None,
    server: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Gated]:
    """A server whose engine is audited at the end. disk: behind its host cache. server: options of
    the server, and the others are the engine's."""
    facts = read_model_config(DEMO_FOLDER).facts()
    runner = GatedRunner()
    runner.disk = disk or runner.disk
    options = {"device": "cpu", "num_pages": 4000, "page_size": runner.page_size, **options}
    given = EngineConfig(**options)
    config = resolve(given, facts, device_facts(facts), overlap=overlap)
    capacity = Capacity.of(config, config.num_pages)
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    defaults = GenerationDefaults(frozenset({EOS}))
    loaded = Loaded(runner, config, capacity, facts, tokenizer, defaults, "gated")
    if disk is not None:
        loaded = replace(loaded, disk=Disk(disk, b"model"))
    async with (
        AsyncEngine(loaded) as engine,
        served(engine, wrap, api_key, given, **(server or {})) as (serving, port),
    ):
        try:
            yield Gated(engine, runner, serving, port)
        finally:
            runner.open()  # also where a test has failed: the engine ends when its steps have


@asynccontextmanager
async def served(
    engine: AsyncEngine,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    api_key: tuple[str, ...] = (),
    options: EngineConfig | None = None,
    **others: Any,
) -> AsyncIterator[tuple[Server, int]]:
    """A server on the test's own loop, and its port. Audits the engine at the end. options: of the
    engine; others: of the server."""
    state = EngineState(ServerConfig(port=0, api_key=api_key, **others), engine, options)
    with bind(state.config) as listener:
        server = QuickServer(http_settings(wrap(create_app(state))), state)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        yield server, listener.getsockname()[1]
        server.should_exit = True
        await serving
    if engine.failure is None:
        engine.audit()
        stats = engine.stats()
        assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)


def asking(prompt: list[int], max_tokens: int, **fields: Any) -> bytes:
    """The body of a streamed request for exactly N tokens; `fields` override it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 0, "ignore_eos": True}
    return json.dumps(body | {"stream": True} | fields).encode()
