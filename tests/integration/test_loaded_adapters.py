"""Adapters that come and go while requests run: each request has its own until its end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.adapted_requests import (
    Asked,
    asked_of,
    check_coming_and_going,
    check_one,
    folder_of,
    loaded_of,
    numbers_on,
    of_name,
)
from support.parity import load_engine
from support.waiting import until

from minisgl.engine import AsyncEngine
from minisgl.errors import (
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    MinisglError,
    ModelNotFoundError,
)
from minisgl.lora.files import TENSORS_FILE, AdapterError, AdapterFacts


@pytest.mark.parametrize("options", [{}, {"tp": 2, "dp_attention": True}, {"pp": 2}], ids=str)
def test_adapters_come_and_go_beside_requests(options: dict[str, Any]) -> None:
    check_coming_and_going("qwen3", **options)


def test_the_same_again_is_fine_and_another_of_that_name_is_refused() -> None:
    asked = asked_of("qwen3")

    async def run() -> None:
        lora = (f"a0={folder_of(asked, 'a0')}",)
        loaded = loaded_of(asked, lora=lora)
        async with AsyncEngine(loaded) as engine:
            await engine.adapters.load("a0", folder_of(asked, "a0"))
            with pytest.raises(InvalidRequestError) as refused:
                await engine.adapters.load("a0", folder_of(asked, "a1"))
            assert refused.value.http_status == 409
            assert "a0 is another adapter; unload that first" in str(refused.value)
            assert str(refused.value).endswith("; loaded: a0.")
            await check_one(engine, asked, of_name(asked, "a0"), "a0")
            await until(lambda: numbers_on(loaded) == [0])  # no copy is kept
            await engine.adapters.unload("a0")
            await until(lambda: not numbers_on(loaded))
            with pytest.raises(ModelNotFoundError, match=r"no adapter 'a0'; loaded: none\."):
                await engine.adapters.unload("a0")

    asyncio.run(run())


def broken_folders(asked: Asked, folder: Path) -> Sequence[tuple[str, str]]:
    """Folders, and what is said of each."""
    whole = Path(folder_of(asked, "a0"))
    cut, high = folder / "cut", folder / "absent"
    cut.mkdir()
    for path in whole.iterdir():
        (cut / path.name).write_bytes(path.read_bytes())
    (cut / TENSORS_FILE).write_bytes((whole / TENSORS_FILE).read_bytes()[:-9])
    return (
        (str(cut), "cannot be read"),
        (str(high), "has no file adapter_config.json"),
        ("\0", "cannot be read"),
        ("x" * 5000, "cannot be read"),
    )


def test_what_one_rank_refuses_is_loaded_on_none(tmp_path: Path) -> None:
    asked = asked_of("qwen3")

    async def run() -> None:
        loaded = loaded_of(asked, tp=2)
        async with AsyncEngine(loaded) as engine:
            await engine.adapters.load("a1", folder_of(asked, "a1"))
            for folder, said in broken_folders(asked, tmp_path):
                with pytest.raises(AdapterError, match=rf"{said}.*; loaded: a1\.$"):
                    await engine.adapters.load("new", folder)
            opened = os.open(folder_of(asked, "a0"), os.O_RDONLY | os.O_DIRECTORY)
            try:  # which only this process has
                with pytest.raises(AdapterError, match=r"has no file .*; loaded: a1\.$"):
                    await engine.adapters.load("new", f"/proc/self/fd/{opened}")
            finally:
                os.close(opened)
            assert [*engine.adapters] == ["a1"]
            await until(lambda: numbers_on(loaded) == [0])
            await engine.adapters.load("new", folder_of(asked, "a0"))
            await asyncio.gather(
                check_one(engine, asked, of_name(asked, "a0"), "new"),
                check_one(engine, asked, of_name(asked, "a1"), "a1"),
            )

    asyncio.run(run())


def test_files_that_change_between_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of("qwen3")

    async def run() -> None:
        loaded = loaded_of(asked, tp=2)
        async with AsyncEngine(loaded) as engine:
            reader: Any = loaded.adapters
            monkeypatch.setattr(reader._own, "read", lambda *_: AdapterFacts(b"another", None))
            with pytest.raises(AdapterError, match="Rank 1 has read another adapter"):
                await engine.adapters.load("a1", folder_of(asked, "a1"))
            assert not engine.adapters

    asyncio.run(run())


def test_steps_go_on_while_an_adapter_is_read_and_its_loading_outlives_who_has_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, gate, began = asked_of("qwen3"), threading.Event(), threading.Event()

    async def run() -> None:
        loaded = loaded_of(asked)
        async with AsyncEngine(loaded) as engine:
            reader: Any = loaded.adapters
            read = reader.read

            def reading(*given: Any) -> Any:
                began.set()
                gate.wait()
                return read(*given)

            monkeypatch.setattr(reader, "read", reading)
            loading = asyncio.ensure_future(engine.adapters.load("a0", folder_of(asked, "a0")))
            await asyncio.to_thread(began.wait)
            await check_one(engine, asked, of_name(asked, None), None)
            others = [
                asyncio.ensure_future(work)
                for work in (
                    engine.adapters.load("a0", folder_of(asked, "a1")),  # each after the other
                    engine.adapters.unload("a0"),
                    engine.adapters.load("a0", folder_of(asked, "a1")),
                )
            ]
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert not engine.adapters
            gate.set()
            refused, *done = await asyncio.gather(*others, return_exceptions=True)
            assert isinstance(refused, InvalidRequestError) and done == [None, None]
            await check_one(engine, asked, of_name(asked, "a1"), "a0")
            await until(lambda: numbers_on(loaded) == [2])
        with pytest.raises(EngineStoppedError):
            await engine.adapters.load("a1", folder_of(asked, "a1"))
        with pytest.raises(EngineStoppedError):
            await engine.adapters.unload("a0")

    asyncio.run(run())


@pytest.mark.parametrize(
    "given",
    [("", "x"), ("a" * 257, "x"), ("a\nb", "x"), ("a", ""), (None, "x"), (["a"], "x"), ("a", 5)],
    ids=str,
)
def test_names_that_no_request_could_have_are_refused(given: tuple[Any, Any]) -> None:
    async def run() -> None:
        async with AsyncEngine(loaded_of(asked_of("qwen3"))) as engine:
            with pytest.raises(InvalidRequestError, match=r"lora: allowed: a name of 1 to 256"):
                await engine.adapters.load(*given)
            for name in (None, 5, ["a"], b"a"):
                with pytest.raises(InvalidRequestError, match="lora: must be the name"):
                    engine.adapter(name)  # type: ignore[arg-type]
                with pytest.raises(ModelNotFoundError):
                    await engine.adapters.unload(name)  # type: ignore[arg-type]

    asyncio.run(run())


def test_without_room_none_is_loaded() -> None:
    asked = asked_of("qwen3")

    async def run() -> None:
        async with AsyncEngine(load_engine(asked.case.folder)) as engine:
            with pytest.raises(ConfigError, match="--max-loras 0: there is no room"):
                await engine.adapters.load("a0", folder_of(asked, "a0"))
            with pytest.raises(MinisglError, match="no adapter 'a0'; loaded: none"):
                await engine.adapters.unload("a0")

    asyncio.run(run())


@pytest.mark.parametrize("how", ["lora", "lora_experts", "neither"])
def test_adapters_of_experts_need_room_that_the_options_make(how: str) -> None:
    """By one of `lora` that adapts some, or by itself."""
    asked = asked_of("moe")
    first = (f"a1={folder_of(asked, 'a1')}",) if how == "lora" else ()

    async def run() -> None:
        loaded = loaded_of(asked, lora=first, lora_experts=how == "lora_experts")
        async with AsyncEngine(loaded) as engine:
            if how == "neither":
                with pytest.raises(AdapterError, match=r"experts have no room .*--lora-exp"):
                    await engine.adapters.load("a0", folder_of(asked, "a0"))
            else:
                await engine.adapters.load("a0", folder_of(asked, "a0"))
                await check_one(engine, asked, of_name(asked, "a0"), "a0")

    asyncio.run(run())
