"""The adapters of one rank on its device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.adapters import (
    RANK_UNIT,
    AdaptedRows,
    AdapterWeights,
    ExpertAdapters,
    StackedAdapters,
    b_of,
    places_of_parts,
)
from minisgl.kernels.lora.select_kernels import kernels_for
from minisgl.layers.linear import Linear
from minisgl.lora.experts import AdaptedExperts
from minisgl.lora.files import TENSORS_FILE, Adapter, AdapterError, Pair
from minisgl.lora.maps import Maps, Site, maps_of
from minisgl.lora.products import AdaptedProduct
from minisgl.models.config import ModelConfig
from minisgl.models.transformer import CausalLM

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """What one rank adds for an adapter, in the host's memory, as a slot of the pool has it."""

    matrices: Tensor  # [size of a slot], pinned where the pool is on a GPU
    ranks: Tensor  # [num_sites] int32, likewise; 0: the site is not adapted


class _Slots(NamedTuple):
    """The adapters in some slots, by the path of each site."""

    of_linears: dict[str, AdapterWeights]
    of_experts: dict[str, ExpertAdapters]


class AdapterPool:
    """The adapters of one rank on the device, in as many slots as there may be, and which of them
    the request of each slot of the tables has.

    What a slot has of all sites is one block of memory, so that an adapter is loaded by two copies.
    """

    def __init__(
        self,
        maps: Maps,
        num_loras: int,
        max_rank: int,
        num_slots: int,
        *,
        experts: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._maps, self._max_rank, self._num_loras = maps, max_rank, num_loras
        self._sites = {
            path: site for path, site in maps.sites.items() if site.num_experts is None or experts
        }
        size = sum(math.prod(shape) for site in self._sites.values() for shape in self._room(site))
        self._matrices = torch.zeros((num_loras, size), dtype=dtype, device=device)
        self._ranks = torch.zeros((len(self._sites), num_loras), dtype=torch.int32, device=device)
        self._kernels = kernels_for(device)
        # [num_slots + 1] int32: the adapter, which is its slot here and one, of the request in each
        # slot of the tables; 0: none.
        self.numbers = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    @staticmethod
    def attach(
        model: CausalLM | AdoptedModel,
        config: ModelConfig,
        *,
        num_loras: int,
        max_rank: int,
        num_slots: int,
        experts: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterPool:
        """Put products with a pool's adapters into a model, whose products are prepared.

        num_slots: of the tables, without the scratch slot. experts: whether these have room, too,
        which takes far more than the rest of a layer. Raises UnsupportedModelError for a model
        whose own code leaves them out.
        """
        if not isinstance(model, CausalLM):
            from minisgl.models.adopted.config import AdoptedConfig
            from minisgl.models.adopted.load import check_adapters

            assert isinstance(config, AdoptedConfig)
            check_adapters(config)
        maps = maps_of(model, config)
        pool = AdapterPool(
            maps, num_loras, max_rank, num_slots, experts=experts, dtype=dtype, device=device
        )
        slots = pool._slots(pool._matrices, pool._ranks)
        for path, site in pool._sites.items():
            module = site.module
            if isinstance(module, Linear):
                product = AdaptedProduct(module.product, slots.of_linears[path], pool._kernels)
                module.replace_product(product)
            else:
                module.product = AdaptedExperts(module.product, slots.of_experts[path])
        return pool

    def pack(self, adapter: Adapter) -> HostAdapter:
        """What a slot takes of an adapter. Raises AdapterError if it does not fit. Runs on any
        thread."""
        fitted = self._maps.fit(adapter, self._max_rank)
        matrices = self._on_host(self._matrices[0])
        ranks = self._on_host(self._ranks[:, 0])
        slots = self._slots(matrices[None], ranks[:, None])
        for path, pairs in fitted.items():
            if path in slots.of_linears:
                _pack(slots.of_linears[path], pairs)
            elif path in slots.of_experts:
                _pack_experts(slots.of_experts[path], pairs)
            else:
                raise AdapterError(
                    f"{TENSORS_FILE} adapts {path:.200}, and experts have no room for adapters; "
                    "allowed: the other maps of layers, or a start with --lora-experts."
                )
        if not bool(matrices.isfinite().all()):
            raise AdapterError(
                f"{TENSORS_FILE} has numbers that {matrices.dtype} cannot hold; allowed: smaller "
                "ones, or another --dtype."
            )
        return HostAdapter(matrices, ranks)

    def pin(self, num_adapters: int) -> None:
        """Have torch pin what so many adapters take, and keep it for them: while the driver pins
        memory, no step is launched."""
        _ = [self._on_host(self._matrices[0]) for _ in range(num_adapters)]

    def _on_host(self, like: Tensor) -> Tensor:
        pinned = self._matrices.is_cuda
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)

    def load(self, place: int, adapter: HostAdapter) -> None:
        """Queue the copies of an adapter into a slot, from 0 on, on the current stream."""
        self._matrices[place].copy_(adapter.matrices, non_blocking=True)
        self._ranks[:, place].copy_(adapter.ranks, non_blocking=True)

    def rows(self, slots: Tensor) -> AdaptedRows:
        """The rows of requests in these slots of the tables, by their adapters.

        slots: [num_rows] int64. Every kernel after the next may read what is returned.
        """
        return self._kernels.sort_rows(self.numbers[slots], self._num_loras)

    def _room(self, site: Site) -> list[tuple[int, ...]]:
        """The shapes of what a slot has of a site."""
        rank = -(-self._max_rank // RANK_UNIT) * RANK_UNIT
        shapes = [site.shapes(part, rank) for part in range(len(site.parts))]
        if site.num_experts is not None:
            (a, b), _, down = shapes  # those of the gates are those of the ups
            return [(2, *a), (2, *b), *((1, *shape) for shape in down)]
        width = sum(part.outputs.size for part in site.parts)
        return [(len(shapes), *shapes[0][0]), (width * rank,)]

    def _slots(self, matrices: Tensor, ranks: Tensor) -> _Slots:
        """Views of slots. matrices: [num_slots, size of a slot]; ranks: [num_sites, num_slots]."""
        slots, end = _Slots({}, {}), 0
        for (path, site), of_site in zip(self._sites.items(), ranks, strict=True):
            found = []
            for shape in self._room(site):
                start, end = end, end + math.prod(shape)
                found.append(matrices[:, start:end].unflatten(1, shape))
            if site.num_experts is None:
                a, b = found
                widths = [part.outputs.size for part in site.parts]
                starts = (0, *itertools.accumulate(widths[:-1]))
                slots.of_linears[path] = AdapterWeights(a, b, of_site, starts)
            else:
                a, b, down_a, down_b = found
                slots.of_experts[path] = ExpertAdapters(
                    StackedAdapters(a, b, of_site), StackedAdapters(down_a, down_b, of_site)
                )
        return slots


def _pack(slot: AdapterWeights, pairs: Sequence[Pair | None]) -> None:
    """Fill one slot of a linear layer."""
    rank = max(len(pair.a) for pair in pairs if pair is not None)
    padded = -(-rank // RANK_UNIT) * RANK_UNIT
    slot.ranks.fill_(padded)
    b = b_of(slot, 0, padded)
    for part, (pair, rows) in enumerate(zip(pairs, places_of_parts(slot), strict=True)):
        if pair is not None:
            slot.a[0, part, :rank] = pair.a
            b[rows, :rank] = pair.b


def _pack_experts(slot: ExpertAdapters, pairs: Sequence[Pair | None]) -> None:
    """Fill one slot of experts."""
    (a, b, ranks), (down_a, down_b, _) = slot
    for to_a, to_b, pair in zip((*a[0], down_a[0, 0]), (*b[0], down_b[0, 0]), pairs, strict=True):
        if pair is not None:
            rank = pair.a.shape[1]
            to_a[:, :rank] = pair.a
            to_b[..., :rank] = pair.b
            ranks.fill_(-(-rank // RANK_UNIT) * RANK_UNIT)
