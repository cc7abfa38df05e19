"""Fills the weights of a model, one tensor of a checkpoint at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.errors import CheckpointError
from minisgl.models.formats import QuantizedFormat
from minisgl.models.kv_scales import is_kv_scale
from minisgl.models.target import Target
from minisgl.models.targets import Destinations, Names
from minisgl.shards import Shard

# As safetensors names them.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Called with the number of bytes filled so far, and the total.
Progress = Callable[[int, int], None]


class Stored(Protocol):
    """A tensor of a checkpoint, of which parts can be read. Files of safetensors have such."""

    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, part: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor as it is."""

    tensor: Tensor

    def get_dtype(self) -> str:
        return DTYPE_NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def __getitem__(self, part: Any) -> Tensor:
        return self.tensor[part]


class Places(NamedTuple):
    """Where the weights of a model are."""

    to: Destinations
    names: Names


class Filling:
    """Takes the tensors of one checkpoint, in any order.

    what, in the methods: where a tensor or all of them are, for errors.
    """

    def __init__(self, to: Destinations, names: Names, *, reads: bool = True) -> None:
        """reads: False only checks what the tensors are."""
        self._to, self._names, self._reads = to, names, reads
        self.filled: set[str] = set()  # names of targets
        self._unexpected: list[str] = []
        self._tied_head: Tensor | None = None
        self.total_bytes = sum(target.num_bytes for target in to.targets.values())
        self.done_bytes = 0

    def add(self, what: Path | str, full_name: str, stored: Stored) -> None:
        """Read the rank's part of a tensor into its place. Raises CheckpointError for a tensor that
        is there twice, or is another one than the model has."""
        to, name = self._to, self._names.of(full_name)
        if name is None:
            return
        if to.tied_head is not None and name == to.tied_head.name:
            self._check(what, full_name, stored, to.tied_head.target)
            if self._reads:
                self._tied_head = part_of(stored, to.tied_head.target.cut)
            return
        # Old checkpoints have the frequencies, which are computed from the config.
        if name.endswith("rotary_emb.inv_freq") or is_kv_scale(name):
            return
        stack = to.stack(name)
        if stack is None:
            if not to.is_left_out(name):
                self._unexpected.append(f"{full_name} ({stored.get_dtype()})")
            return
        if not self.filled.isdisjoint(stack.stands_for):
            raise CheckpointError(f"{what}: {full_name} is there twice.")
        for target in stack.targets:
            self._check(what, full_name, stored, target)
            if self._reads:
                try:
                    target.fill(stored[...] if target.any_shape else part_of(stored, target.cut))
                except CheckpointError as error:
                    raise CheckpointError(f"{what}: {full_name} {error}.") from error
            self.done_bytes += target.num_bytes
        self.filled.update(stack.stands_for)

    def _check(self, what: Path | str, full_name: str, stored: Stored, target: Target) -> None:
        dtype, shape = stored.get_dtype(), stored.get_shape()
        if dtype not in target.dtypes:
            raise CheckpointError(
                f"{what}: {full_name} has the dtype {dtype}; expected {' or '.join(target.dtypes)}."
            )
        if not target.any_shape and shape not in target.shapes:
            raise CheckpointError(
                f"{what}: {full_name} has the shape {shape}; "
                f"the config asks for {target.shapes[0]}{_of_scheme(self._to.scheme, full_name)}."
            )

    def end(self, what: Path | str, *, partial: bool = False) -> None:
        """Raise CheckpointError for tensors that the model does not take, and for those that it
        lacks unless the checkpoint is a part of one."""
        if self._unexpected:
            raise CheckpointError(
                f"{what} holds weights that the model does not take: {_few(self._unexpected)}."
            )
        to = self._to
        required = {name for name, target in to.targets.items() if target.is_required}
        if not partial and (missing := required - self.filled):
            raise CheckpointError(f"{what} lacks weights: {_few(sorted(missing))}.")
        if self._tied_head is not None and to.tied_head is not None:
            assert to.tied_head.target.weight is not None
            embedding = to.tied_head.target.weight[: len(self._tied_head)]
            if not torch.equal(self._tied_head.to(embedding), embedding):
                raise CheckpointError(
                    f"{what}: {to.tied_head.name} differs from the embedding, to which the config "
                    "ties it; set tie_word_embeddings to false in config.json."
                )


def fill_from_files(
    to: Destinations, names: Names, files: Sequence[Path], progress: Progress
) -> None:
    """Read the parts of this rank, one tensor at a time. Raises CheckpointError if a tensor is
    missing or left over, is there twice, or is another one than the model has."""
    filling = Filling(to, names)
    for file in files:
        for full_name, stored in tensors_of(file):
            before = filling.done_bytes
            filling.add(file, full_name, stored)
            if filling.done_bytes != before:
                progress(filling.done_bytes, filling.total_bytes)
    filling.end(files[0].parent)


def tensors_of(file: Path) -> Iterator[tuple[str, Any]]:
    """The names and lazily read tensors of one file. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def part_of(stored: Stored, cut: tuple[Shard, ...]) -> Tensor:
    """Reads the cut of a tensor, without padding."""
    parts = (slice(min(shard.first, shard.whole), shard.first + shard.num_real) for shard in cut)
    part: Tensor = stored[tuple(parts) if stored.get_shape() else ...]
    return part


def _few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def _of_scheme(scheme: QuantizedFormat | None, name: str) -> str:
    """What asks for the shape of a tensor that only quantised weights have."""
    return "" if scheme is None or name.endswith((".weight", ".bias")) else f" ({scheme})"
