"""Loads weights into a model: streamed from safetensors, or random for benchmarks."""

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
from minisgl.models.kv_scales import is_kv_scale
from minisgl.models.registry import FAMILIES
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard, whole

_WEIGHT_DTYPES = ("F32", "F16", "BF16")  # as safetensors names them
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_DUMMY_SEED = 0

# Called with the number of bytes filled so far, and the total.
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

    load_format 'safetensors' reads the files in `folder`, one tensor at a time, and only the rank's
    part of each; 'dummy' draws random weights and reads nothing. Blocks. Raises CheckpointError if
    the files do not match `config` exactly.
    """
    model_type = FAMILIES[config.architecture].model
    model = model_type(config, max_seq_len=max_seq_len, dtype=dtype, device=device, comm=ranks)
    if load_format == "dummy":
        _fill_randomly(model, device, _DUMMY_SEED + ranks.rank)
    else:
        _fill_from_files(model, safetensors_files(folder), progress or (lambda done, total: None))
    return model


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checkpoint tensor."""

    weight: Tensor  # a parameter, or a part of one
    cut: tuple[Shard, ...]  # the range of each of the tensor's dimensions

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor in the checkpoint."""
        return [shard.whole for shard in self.cut]

    def fill(self, part: Tensor) -> None:
        """part: the cut as far as the checkpoint has it. The rest of the target is zero padding."""
        self.weight.zero_()
        self.weight[tuple(slice(size) for size in part.shape)].copy_(part)


def checkpoint_targets(model: CausalLM) -> dict[str, Target]:
    """Maps the names of a checkpoint's tensors, without 'model.', to their destinations."""
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedExperts):
            targets |= _expert_targets(path, module)
            continue
        for kind, weight in module.named_parameters(recurse=False):
            if isinstance(module, MergedColumnParallelLinear):
                parent = path.rpartition(".")[0]
                pieces = weight.split([part.size for part in module.parts.values()])
                for (name, part), piece in zip(module.parts.items(), pieces, strict=True):
                    cut = (part, module.inputs)[: weight.dim()]
                    targets[f"{parent}.{name}.{kind}"] = Target(piece, cut)
            else:
                targets[f"{path}.{kind}"] = Target(weight, _cut(module, weight))
    return targets


def _expert_targets(path: str, module: FusedExperts) -> dict[str, Target]:
    """One tensor for each matrix of each expert."""
    targets: dict[str, Target] = {}
    inner, hidden = module.inner, whole(module.down_proj.shape[1])
    for expert, (gate_up, down) in enumerate(
        zip(module.gate_up_proj, module.down_proj, strict=True)
    ):
        gate, up = gate_up.chunk(2)
        targets[f"{path}.{expert}.gate_proj.weight"] = Target(gate, (inner, hidden))
        targets[f"{path}.{expert}.up_proj.weight"] = Target(up, (inner, hidden))
        targets[f"{path}.{expert}.down_proj.weight"] = Target(down, (hidden, inner))
    return targets


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a checkpoint that holds the matrices of all experts.

    Some exporters store these transposed. The shapes reveal it, because at most one of a layer's
    two can fit by accident: the gates' if hidden_size is twice an expert's size, the other's if
    both are equal.
    """

    targets: tuple[Target, ...]  # the destinations, each with its own cut
    stands_for: tuple[str, ...]  # the names in `checkpoint_targets` that it replaces


def checkpoint_stacks(model: CausalLM) -> dict[str, Stack]:
    """Maps names, as in `checkpoint_targets`, to the stacks of a checkpoint."""
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
            (Target(gate, (experts, gates, hidden)), Target(up, (experts, ups, hidden))),
            tuple(f"{name}.{kind}.weight" for name in names for kind in ("gate_proj", "up_proj")),
        )
        stacks[f"{path}.down_proj"] = Stack(
            (Target(module.down_proj, (experts, hidden, inner)),),
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
    targets, stacks = checkpoint_targets(model), checkpoint_stacks(model)
    total_bytes = sum(target.weight.nbytes for target in targets.values())
    done_bytes = 0
    filled: set[str] = set()
    unexpected: list[str] = []
    tied_head: Tensor | None = None
    for file in files:
        for full_name, stored in _tensors(file):
            name = full_name.removeprefix("model.")
            if name == _HEAD and model.lm_head is None:
                tied_head = _part(stored, targets[_EMBEDDING].cut)
                continue
            if name.endswith("rotary_emb.inv_freq"):  # old checkpoints; computed from the config
                continue
            if is_kv_scale(name):
                continue
            dtype = stored.get_dtype()
            known = name in targets or name in stacks
            if not known or dtype not in _WEIGHT_DTYPES:
                unexpected.append(f"{full_name} ({dtype})")
                continue
            stack = stacks[name] if name in stacks else Stack((targets[name],), (name,))
            if not filled.isdisjoint(stack.stands_for):
                raise CheckpointError(
                    f"{file.parent} holds {full_name} twice, again in {file.name}."
                )
            for target in stack.targets:
                if stored.get_shape() != target.shape:
                    raise CheckpointError(
                        f"{file}: {full_name} has the shape {stored.get_shape()}; "
                        f"the config asks for {target.shape}."
                    )
                target.fill(_part(stored, target.cut))
                done_bytes += target.weight.nbytes
                progress(done_bytes, total_bytes)
            filled.update(stack.stands_for)
    folder = files[0].parent
    if unexpected:
        raise CheckpointError(
            f"{folder} holds weights that the model does not take: {_few(unexpected)}."
        )
    if missing := targets.keys() - filled:
        raise CheckpointError(f"{folder} lacks weights: {_few(sorted(missing))}.")
    if tied_head is not None:
        embedding = targets[_EMBEDDING].weight[: len(tied_head)]
        if not torch.equal(tied_head.to(embedding), embedding):
            raise CheckpointError(
                f"{folder}: {_HEAD} differs from the embedding, to which the config ties it; "
                "set tie_word_embeddings to false in config.json."
            )


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """The names and lazily read tensors of one file. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _part(stored: Any, cut: tuple[Shard, ...]) -> Tensor:
    """Reads the cut of a tensor from `_tensors`, without padding."""
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
    """The number of inputs of the whole linear map, of which `weight` may be a rank's part."""
    if isinstance(module, Linear):
        return module.inputs.whole
    if isinstance(module, FusedExperts) and weight is module.down_proj:
        return module.inner.whole
    return weight.shape[-1]
