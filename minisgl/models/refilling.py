"""Fills the weights of a model that runs anew, where they are: captured steps hold their places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minisgl.device.lanes import Lanes
from minisgl.distributed.addresses import GroupAddress
from minisgl.distributed.weight_group import WeightGroup
from minisgl.errors import CheckpointError, UnsupportedModelError, in_one_line
from minisgl.layers.latent_attention import LatentAttention
from minisgl.layers.linear import Linear
from minisgl.models.config import ModelConfig
from minisgl.models.filling import DTYPES, Filling, InMemory, Places, Stored, tensors_of
from minisgl.models.loader import destinations, names_in
from minisgl.models.reading import Piece, pieces_of
from minisgl.models.sleeping import Sleep
from minisgl.models.target import Target
from minisgl.models.transformer import CausalLM

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel

UPDATE = "The update"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorInfo(NamedTuple):
    """What is said of a tensor before it comes."""

    name: str  # in a checkpoint
    dtype: str  # as safetensors names it
    shape: list[int]

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape

    @staticmethod
    def of(name: str, stored: Any) -> TensorInfo:
        return TensorInfo(name, stored.get_dtype(), stored.get_shape())


class WeightTaker(Protocol):
    """What takes the weights of all ranks anew: `begin`, which changes nothing, what brings
    tensors, and `end`. Blocks; one call at a time, while no step runs."""

    def begin(self, infos: Sequence[TensorInfo], partial: bool) -> None: ...

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def take_files(self, files: Sequence[str]) -> None: ...

    def join(self, address: GroupAddress) -> None: ...

    def take_group(self, name: str, infos: Sequence[TensorInfo], packed: bool) -> None: ...

    def leave(self, name: str) -> None: ...

    def end(self) -> None: ...

    def lacks(self) -> bool: ...

    def read(self, name: str, num_rows: int) -> list[Piece]: ...

    def sleep(self, drops_weights: bool) -> None: ...

    def wake(self, tags: Collection[str]) -> None: ...

    def capture(self) -> None: ...


class Refilling:
    """Takes the weights of one rank anew, as a WeightTaker."""

    def __init__(
        self, model: CausalLM | AdoptedModel, config: ModelConfig, lanes: Lanes, rank: int
    ) -> None:
        """model: whose kernels are prepared before `begin`. rank: among all of the engine. Methods
        run on any thread, one at a time, while no step does."""
        self._model, self._config, self._lanes, self._rank = model, config, lanes, rank
        self.tower: Places | None = None  # beside the model, where it sees
        self.memory: Sleep | None = None  # of the runner that has the model
        self._filling: _Fillings | None = None
        self._coming: set[tuple[int, str]] = set()  # of an update that has changed nothing yet
        self._lacking: set[tuple[int, str]] = set()  # of updates that have not ended
        self._groups: dict[str, WeightGroup] = {}

    def begin(self, infos: Sequence[TensorInfo], partial: bool) -> None:
        """Check all that is to come. partial: the other weights stay. Raises CheckpointError, and
        UnsupportedModelError for weights that the kernels read in another form."""
        self._lanes.enter_thread()
        self._refuse(partial)
        dry = _Fillings(self._all_places, partial=partial, reads=False)
        for info in infos:
            dry.add(info.name, info)
        dry.end()
        self._filling = _Fillings(self._all_places, partial=partial)
        self._coming = dry.filled

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put tensors into their places. Raises CheckpointError, also for numbers that are not
        finite."""
        self._lanes.enter_thread()
        for name, tensor in tensors:
            self._take(name, tensor)

    def take_files(self, files: Sequence[str]) -> None:
        """The same of all tensors of safetensors files."""
        stored = chain.from_iterable(tensors_of(Path(file)) for file in files)
        self.take((name, each[...]) for name, each in stored)

    def join(self, address: GroupAddress) -> None:
        """Join a trainer's group. Raises CheckpointError if that cannot be."""
        self._lanes.enter_thread()
        self.leave(address.group_name)
        rank = address.rank_offset + self._rank
        try:
            self._groups[address.group_name] = WeightGroup(address, rank, self._lanes.device)
        except (RuntimeError, OSError, ValueError) as error:
            raise CheckpointError(f"The group cannot be joined: {in_one_line(error)}.") from error

    def leave(self, name: str) -> None:
        """Leave a group, if it is one."""
        if (group := self._groups.pop(name, None)) is not None:
            group.close()

    def close(self) -> None:
        """Leave all groups."""
        for name in [*self._groups]:
            self.leave(name)

    def take_group(self, name: str, infos: Sequence[TensorInfo], packed: bool) -> None:
        """The same of tensors that the trainer of a group sends now, in this order. packed: as
        bytes, whatever was said when the group was joined."""
        self._lanes.enter_thread()
        if (group := self._groups.get(name)) is None:
            raise CheckpointError(f"There is no group {name:.80}; allowed: one that was joined.")
        expected = ((info.shape, DTYPES[info.dtype]) for info in infos)
        wrong: CheckpointError | None = None
        try:
            tensors = group.receive(expected, packed=packed or group.packed)
            for info, tensor in zip(infos, tensors, strict=True):
                try:
                    if wrong is None:
                        self._take(info.name, tensor)
                except CheckpointError as error:  # the others in the group wait for this rank
                    wrong = error
        except RuntimeError as error:
            self.leave(name)  # of which nothing more can come
            raise CheckpointError(f"{UPDATE} ends: {in_one_line(error)}.") from error
        if wrong is not None:
            raise wrong

    def _take(self, name: str, tensor: Tensor) -> None:
        assert self._filling is not None, "an update has begun"
        if tensor.dtype in _FLOATS and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{UPDATE}: {name} has NaN or infinities; allowed: numbers.")
        if self._coming:
            self._lacking |= self._coming
            self._coming = set()
            for largest in self._input_scales():  # of those that come
                largest.zero_()
        self._filling.add(name, InMemory(tensor))

    def end(self) -> None:
        """Make what kernels read of the weights again. Raises CheckpointError."""
        assert self._filling is not None, "an update has begun"
        self._lanes.enter_thread()
        filling, self._filling = self._filling, None
        filling.end()
        for module in self._module.modules():
            if isinstance(module, Linear):
                module.product.plain.refresh()
            elif hasattr(module, "refresh"):
                module.refresh()
        self._lanes.synchronize()  # steps may read weights before their turn comes
        self._lacking -= filling.filled

    def lacks(self) -> bool:
        """Whether a part of the weights is lacking, since an update has failed or a sleep has
        dropped it."""
        return bool(self._lacking)

    def read(self, name: str, num_rows: int) -> list[Piece]:
        """What this rank has of the first rows of a tensor, by its name in a checkpoint."""
        self._lanes.enter_thread()
        places = self._all_places[_place_of(name, self._all_places)]
        return pieces_of(places.to, places.names.of(name), num_rows)

    def sleep(self, drops_weights: bool) -> None:
        """Give the memory of weights and caches back. drops_weights: a whole update must follow
        once they are awake; else the host keeps their numbers. Raises DeviceMemoryError, and
        UnsupportedModelError for weights that cannot be replaced."""
        self._lanes.enter_thread()
        assert self.memory is not None, "a runner has the model"
        required: dict[str, Target] = {}
        if drops_weights:
            self._refuse(False)
            targets = self._places.to.targets.items()
            required = {name: each for name, each in targets if each.is_required}
        self.memory.release(_storages(required.values()))
        self._lacking |= {(0, name) for name in required}

    def wake(self, tags: Collection[str]) -> None:
        """Take the memory of "weights" or "kv_cache" again. Raises DeviceMemoryError."""
        self._lanes.enter_thread()
        assert self.memory is not None, "a runner has the model"
        self.memory.restore(tags)

    def capture(self) -> None:
        """Capture steps again after `wake`, if all is awake. All ranks call this together."""
        self._lanes.enter_thread()
        assert self.memory is not None, "a runner has the model"
        self.memory.capture()

    def _refuse(self, partial: bool) -> None:
        reason = ""
        if partial and any(True for _ in self._input_scales()):
            reason = "of a part of the weights its scales of inputs cannot be known"
        for module in self._module.modules():
            if isinstance(module, Linear) and not module.product.plain.can_refresh:
                reason = "its kernels keep the weights in another form"
            if isinstance(module, LatentAttention) and self._config.quantization is not None:
                reason = "latent attention keeps a quantised map in another form"
        if reason:
            raise UnsupportedModelError(
                f"the weights of this model cannot be replaced in {self._config.quantization}: "
                f"{reason}; allowed: a checkpoint in bfloat16, also with --quantization fp8"
            )

    def _input_scales(self) -> Iterator[Tensor]:
        named = self._module.named_parameters()
        return (weight for name, weight in named if name.endswith("input_scale"))

    @cached_property
    def _places(self) -> Places:
        """Made by the first update: of a model by transformers' code it takes a moment."""
        to = destinations(self._model, self._config.quantization)
        return Places(to, names_in(self._config))

    @property
    def _all_places(self) -> list[Places]:
        """Those of the model, and of the tower beside it."""
        return [self._places, *filter(None, [self.tower])]

    @property
    def _module(self) -> Any:
        return self._model if isinstance(self._model, CausalLM) else self._model.module


class _Fillings:
    """Those of a model, and of the tower beside it, whose weights stay unless they are given."""

    def __init__(self, places: Sequence[Places], *, partial: bool, reads: bool = True) -> None:
        self._places, self._partial = places, partial
        self._fillings = [Filling(*each, reads=reads) for each in places]

    def add(self, name: str, stored: Stored) -> None:
        self._fillings[_place_of(name, self._places)].add(UPDATE, name, stored)

    def end(self) -> None:
        for place, filling in enumerate(self._fillings):
            filling.end(UPDATE, partial=self._partial or place > 0)

    @property
    def filled(self) -> set[tuple[int, str]]:
        return {(i, name) for i, filling in enumerate(self._fillings) for name in filling.filled}


def _place_of(name: str, places: Sequence[Places]) -> int:
    """The first that knows a tensor, or else the model, which says what is wrong with it."""
    return next((i for i, each in enumerate(places) if each.names.of(name) is not None), 0)


def _storages(targets: Iterable[Target]) -> set[int]:
    """Where the storages of their weights are."""
    weights = (tensor for each in targets for tensor in (each.weight, each.scale))
    return {each.untyped_storage().data_ptr() for each in weights if each is not None}
