"""Weights into a model: streamed from safetensors, or random for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.errors import CheckpointError
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import (
    Linear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minisgl.layers.norm import RMSNorm
from minisgl.models.config import ModelConfig
from minisgl.models.hub import safetensors_files
from minisgl.models.registry import FAMILIES
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard, whole

_WEIGHT_DTYPES = ("F32", "F16", "BF16")  # as safetensors names them
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_DUMMY_SEED = 0

# Called with the bytes filled so far and the bytes in all.
Progress = Callable[[int, int], None]


def load_model(
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    max_seq_len: int,
    progress: Progress | None = None,
    ranks: Communicator = SINGLE_RANK,
) -> CausalLM:
    """Build the model, or this rank's part of it, on `device` and fill every parameter.

    load_format 'safetensors' reads the files in `folder`, one tensor at a time, and of each only
    what the rank holds; 'dummy' draws random weights and reads nothing. Blocks. Raises
    CheckpointError where the files are not exactly what `config` describes.
    """
    model_type = FAMILIES[config.architecture].model
    model = model_type(config, max_seq_len=max_seq_len, dtype=dtype, device=device, comm=ranks)
    if load_format == "dummy":
        _fill_randomly(model, device, _DUMMY_SEED + ranks.rank)
    else:
        _fill_from_files(model, safetensors_files(folder), progress or (lambda done, total: None))
    return model


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor of a checkpoint goes."""

    target: Tensor  # (a part of) a weight
    cut: tuple[Shard, ...]  # what of each of the tensor's dimensions

    @property
    def shape(self) -> list[int]:
        """Of the tensor in the checkpoint."""
        return [shard.whole for shard in self.cut]

    def fill(self, part: Tensor) -> None:
        """part: what the checkpoint has of the cut. The rest of it is padding."""
        self.target.zero_()
        self.target[tuple(slice(size) for size in part.shape)].copy_(part)


def checkpoint_slots(model: CausalLM) -> dict[str, Slot]:
    """By the names of a checkpoint's tensors, without 'model.'."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedExperts):
            slots |= _expert_slots(path, module)
            continue
        for kind, weight in module.named_parameters(recurse=False):
            if isinstance(module, MergedColumnParallelLinear):
                parent = path.rpartition(".")[0]
                pieces = weight.split([part.size for part in module.parts.values()])
                for (name, part), piece in zip(module.parts.items(), pieces, strict=True):
                    cut = (part, module.inputs)[: weight.dim()]
                    slots[f"{parent}.{name}.{kind}"] = Slot(piece, cut)
            else:
                slots[f"{path}.{kind}"] = Slot(weight, _cut(module, weight))
    return slots


def _expert_slots(path: str, module: FusedExperts) -> dict[str, Slot]:
    """One tensor for each matrix of each expert."""
    slots: dict[str, Slot] = {}
    inner, hidden = module.inner, whole(module.down_proj.shape[1])
    for expert, (gate_up, down) in enumerate(
        zip(module.gate_up_proj, module.down_proj, strict=True)
    ):
        gate, up = gate_up.chunk(2)
        slots[f"{path}.{expert}.gate_proj.weight"] = Slot(gate, (inner, hidden))
        slots[f"{path}.{expert}.up_proj.weight"] = Slot(up, (inner, hidden))
        slots[f"{path}.{expert}.down_proj.weight"] = Slot(down, (hidden, inner))
    return slots


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a checkpoint that holds the matrices of all experts.

    Other programs write them transposed. Of one layer's two, the shape of at least one then does
    not fit: that of the gates does if hidden_size is twice an expert's size, that of the other if
    it is the same.
    """

    slots: tuple[Slot, ...]  # which it fills, each from its own cut
    stands_for: tuple[str, ...]  # the names of `checkpoint_slots` that it takes the place of


def checkpoint_stacks(model: CausalLM) -> dict[str, Stack]:
    """By name, as in `checkpoint_slots`."""
    stacks: dict[str, Stack] = {}
    for path, module in model.named_modules():
        if not isinstance(module, FusedExperts):
            continue
        names = [f"{path}.{expert}" for expert in range(len(module.down_proj))]
        experts, hidden = whole(len(module.down_proj)), whole(module.down_proj.shape[1])
        inner = module.inner
        gate, up = module.gate_up_proj.chunk(2, dim=1)
        gates = Shard(inner.first, inner.size, 2 * inner.whole)
        ups = Shard(inner.whole + inner.first, inner.size, 2 * inner.whole)
        stacks[f"{path}.gate_up_proj"] = Stack(
            (Slot(gate, (experts, gates, hidden)), Slot(up, (experts, ups, hidden))),
            tuple(f"{name}.{kind}.weight" for name in names for kind in ("gate_proj", "up_proj")),
        )
        stacks[f"{path}.down_proj"] = Stack(
            (Slot(module.down_proj, (experts, hidden, inner)),),
            tuple(f"{name}.down_proj.weight" for name in names),
        )
    return stacks


def _cut(module: nn.Module, weight: Tensor) -> tuple[Shard, ...]:
    if isinstance(module, RowParallelLinear) and weight.dim() == 1 and not module.holds_bias:
        [size] = weight.shape
        return (Shard(size, size, size),)
    if isinstance(module, Linear):
        return (module.outputs, module.inputs)[: weight.dim()]
    if isinstance(module, VocabParallelEmbedding):
        return module.vocab, whole(weight.shape[1])
    return tuple(map(whole, weight.shape))


def _fill_from_files(model: CausalLM, files: list[Path], progress: Progress) -> None:
    slots, stacks = checkpoint_slots(model), checkpoint_stacks(model)
    total_bytes = sum(slot.target.nbytes for slot in slots.values())
    done_bytes = 0
    filled: set[str] = set()
    unexpected: list[str] = []
    tied_head: Tensor | None = None
    for file in files:
        for full_name, stored in _tensors(file):
            name = full_name.removeprefix("model.")
            if name == _HEAD and model.lm_head is None:
                tied_head = _part(stored, slots[_EMBEDDING].cut)
                continue
            if name.endswith("rotary_emb.inv_freq"):  # old checkpoints; computed from the config
                continue
            dtype = stored.get_dtype()
            known = name in slots or name in stacks
            if not known or dtype not in _WEIGHT_DTYPES:
                unexpected.append(f"{full_name} ({dtype})")
                continue
            stack = stacks[name] if name in stacks else Stack((slots[name],), (name,))
            if not filled.isdisjoint(stack.stands_for):
                raise CheckpointError(
                    f"{file.parent} holds {full_name} twice, again in {file.name}."
                )
            for slot in stack.slots:
                if stored.get_shape() != slot.shape:
                    raise CheckpointError(
                        f"{file}: {full_name} has the shape {stored.get_shape()}; "
                        f"the config asks for {slot.shape}."
                    )
                slot.fill(_part(stored, slot.cut))
                done_bytes += slot.target.nbytes
                progress(done_bytes, total_bytes)
            filled.update(stack.stands_for)
    folder = files[0].parent
    if unexpected:
        raise CheckpointError(
            f"{folder} holds weights that the model does not take: {_few(unexpected)}."
        )
    if missing := slots.keys() - filled:
        raise CheckpointError(f"{folder} lacks weights: {_few(sorted(missing))}.")
    if tied_head is not None:
        embedding = slots[_EMBEDDING].target[: len(tied_head)]
        if not torch.equal(tied_head.to(embedding), embedding):
            raise CheckpointError(
                f"{folder}: {_HEAD} differs from the embedding, to which the config ties it; "
                "set tie_word_embeddings to false in config.json."
            )


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of one file, of which nothing is read before it is asked for."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _part(stored: Any, cut: tuple[Shard, ...]) -> Tensor:
    """Read the cut of one of `_tensors`, as far as there is something."""
    parts = (slice(min(shard.first, shard.whole), shard.first + shard.num_real) for shard in cut)
    part: Tensor = stored[tuple(parts)]
    return part


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def _fill_randomly(model: CausalLM, device: torch.device, seed: int) -> None:
    """Seeded weights, scaled so that activations keep their size and logits stay moderate."""
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                weight.fill_(1.0)
            elif weight.dim() == 1:
                weight.zero_()
            else:
                weight.normal_(std=_num_inputs(module, weight) ** -0.5, generator=generator)


def _num_inputs(module: nn.Module, weight: Tensor) -> int:
    """Of the whole map, of which this may be a rank's part."""
    if isinstance(module, Linear):
        return module.inputs.whole
    if isinstance(module, FusedExperts) and weight is module.down_proj:
        return module.inner.whole
    return weight.shape[-1]
