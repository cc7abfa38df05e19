"""The runner's half: loads adapters beside the steps, and keeps which slots have which."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from minisgl.config import ResolvedConfig
from minisgl.device.copy_lanes import CopyMark, copy_lane
from minisgl.device.lanes import Lanes
from minisgl.errors import CheckpointError
from minisgl.lora.files import AdapterError, AdapterFacts, read_adapter
from minisgl.lora.pool import AdapterPool, HostAdapter
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.parts.adapters.host import AdapterPlan
from minisgl.parts.device_part import StepPart

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel
    from minisgl.models.transformer import CausalLM


class DeviceAdapters:
    """The adapters of a rank, in host memory, and the places for some of them on the device."""

    def __init__(self, pool: AdapterPool, num_places: int, lanes: Lanes) -> None:
        self.pool = pool
        self.first: dict[str, AdapterFacts] = {}
        self.lanes = lanes
        self._adapters: dict[int, HostAdapter] = {}  # by number
        self._lane = copy_lane(lanes)
        # Of the last load of each place, the adapter and the end. One thread writes, another reads.
        self._loads: list[tuple[int, CopyMark] | None] = [None] * num_places

    def read(self, number: int, folder: str, root: str | None = None) -> AdapterFacts:
        """Read an adapter for plans to come; see AdapterReader."""
        self.lanes.enter_thread()
        adapter = read_adapter(Path(folder), root=None if root is None else Path(root))
        self._adapters[number] = self.pool.pack(adapter)
        return adapter.facts

    def drop(self, number: int) -> None:
        """Forget an adapter. It may not be there, and a copy of it may be on its way."""
        self._adapters.pop(number, None)

    def change(self, changes: Sequence[tuple[int, int]]) -> None:
        """Give slots of the tables the adapters at these places, which may be on their way."""
        for place in {value - 1 for _, value in changes if value}:
            loaded = self._loads[place]
            assert loaded is not None, "a place is used before it is loaded"
            self._lane.hold_compute(loaded[1])
        slots, values = self.lanes.upload([[slot for slot, _ in changes], [v for _, v in changes]])
        self.pool.numbers.index_copy_(0, slots, values.int())

    def load(self, place: int, adapter: int) -> None:
        """Begin to load an adapter, once the steps launched so far have ended."""
        host = self._adapters[adapter]
        mark = self._lane.queue(lambda: self.pool.load(place, host), [self.lanes.mark()])
        self._loads[place] = adapter, mark

    def landed(self, *, wait: bool) -> tuple[tuple[int, int], ...]:
        """The places whose loads have ended, and the adapters there. wait: for all that began."""
        loads = [(place, *each) for place, each in enumerate(self._loads) if each is not None]
        if wait:
            for *_, mark in loads:
                mark.wait()
        return tuple((place, adapter) for place, adapter, mark in loads if mark.is_reached())


class AdapterStep(StepPart):
    def __init__(self, adapters: DeviceAdapters, plan: AdapterPlan) -> None:
        self._adapters = adapters
        self._plan = plan

    def begin(self) -> None:
        if self._plan.changes:
            self._adapters.change(self._plan.changes)

    def end(self) -> None:
        for place, adapter in self._plan.loads:
            self._adapters.load(place, adapter)
        for adapter in self._plan.drops:
            self._adapters.drop(adapter)

    def outcome(self) -> tuple[tuple[int, int], ...]:
        return self._adapters.landed(wait=self._plan.is_alone)


def load_adapters(
    config: ResolvedConfig, facts: ModelConfig, model: Decoder, lanes: Lanes
) -> DeviceAdapters:
    """Give a model whose kernels are prepared room for adapters, and read those of the options.
    Raises CheckpointError for files that are broken or do not fit."""
    pool = AdapterPool.attach(
        cast("CausalLM | AdoptedModel", model),  # which all decoders are
        facts,
        num_loras=config.max_loras,
        max_rank=config.max_lora_rank,
        num_slots=config.max_running_requests,
        experts=config.lora_experts or any(map(_has_experts, config.adapters)),
        dtype=getattr(torch, config.dtype),
        device=lanes.device,
    )
    adapters = DeviceAdapters(pool, config.max_loras, lanes)
    for number, (name, folder) in enumerate(config.adapters):
        try:
            adapters.first[name] = adapters.read(number, folder)
        except AdapterError as error:
            raise CheckpointError(f"--lora {name}: {error}") from error
    pool.pin(config.max_loras - len(config.adapters))
    return adapters


def _has_experts(adapter: tuple[str, str]) -> bool:
    """Whether one of the options adapts experts; what is wrong with it is told when it is read."""
    with suppress(AdapterError):
        return read_adapter(Path(adapter[1])).has_experts
    return False
