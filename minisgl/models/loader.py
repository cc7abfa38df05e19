"""Loads weights into a model: streamed from safetensors, or random for benchmarks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.errors import CheckpointError
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import Quantization, WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.decoder import Decoder
from minisgl.models.dummy import fill_randomly
from minisgl.models.formats import QuantizedFormat
from minisgl.models.formats.quantized_format import StoredTensor
from minisgl.models.hub import safetensors_files
from minisgl.models.kv_scales import is_kv_scale
from minisgl.models.quantization import (
    are_experts,
    is_quantizable,
    quantized_maps,
    quantized_weights,
)
from minisgl.models.registry import FAMILIES
from minisgl.models.targets import (
    Destinations,
    Names,
    Stack,
    TiedHead,
    checkpoint_stacks,
    checkpoint_targets,
    of_other_ranks,
)
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel

logger = logging.getLogger(__name__)

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_AT_THE_END = (_HEAD, "norm.weight")  # of the last stage
GIB, MIB = 1 << 30, 1 << 20
DUMMY_SEED = 0

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
    layers: range | None = None,
) -> Decoder:
    """Build the model, or this rank's part of it, on `device` and fill every parameter.

    load_format 'safetensors' reads the files in `folder`, one tensor at a time, and only the rank's
    part of each; 'dummy' draws random weights and reads nothing. ranks: of the stage. layers: of
    the stage, all if not given. Blocks. Raises CheckpointError if the files do not match `config`
    exactly, or what is for this stage does not.
    """
    files = [] if load_format == "dummy" else safetensors_files(folder)
    layers = range(config.num_layers) if layers is None else layers
    made: Callable[..., CausalLM | AdoptedModel]
    if isinstance(config, NativeConfig):
        family = FAMILIES[config.architecture]
        names = Names(family.name_of, is_quantizable)
        made = partial(
            family.model,
            config,
            max_seq_len=max_seq_len,
            device=device,
            comm=ranks,
            layers=layers,
        )
    else:
        # Imports the modeling code of transformers.
        from minisgl.models.adopted.config import AdoptedConfig
        from minisgl.models.adopted.load import Blueprint

        assert isinstance(config, AdoptedConfig)
        blueprint = Blueprint(config, dtype, device, max_seq_len, ranks, layers)
        names, made = blueprint.names(), blueprint.build
    format = weight_format(config.quantization, folder, files, dtype, device, names)
    model = made(format=format)
    module = model if isinstance(model, CausalLM) else model.module
    if files:
        to = destinations(model, config.quantization)
        fill_from_files(to, names, files, progress or (lambda done, total: None))
    else:
        # The same for all stages, so that a head that is an embedding is that of the first.
        fill_randomly(module, device, DUMMY_SEED + ranks.rank)
    if format.scheme is not None:
        log_quantized(module, format.scheme)
    return model


def log_quantized(model: nn.Module, scheme: Quantization) -> None:
    """Which weights are quantised how, and the memory of this rank's."""
    num_maps = num_quantized = num_bytes = 0
    for path, module in model.named_modules():
        if "layers." in path and isinstance(module, Linear | FusedExperts):
            size = len(module.parts) if isinstance(module, Linear) else 3 * module.own.size
            num_maps += size
            if quantized_weights(module):
                num_quantized += size
                num_bytes += sum(weight.nbytes for weight in module.parameters(recurse=False))
    others = sum(weight.nbytes for weight in model.parameters()) - num_bytes
    logger.info(
        "Weights: %s, in %d of the %d linear maps of the layers, %s; all others take %s",
        scheme,
        num_quantized,
        num_maps,
        _shown(num_bytes),
        _shown(others),
    )


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def weight_format(
    scheme: QuantizedFormat | None,
    folder: Path,
    files: list[Path],
    dtype: torch.dtype,
    device: torch.device,
    names: Names,
) -> WeightFormat:
    """files: of the weights; none: they are made up, and quantised as the config says."""
    stored = stored_tensors(files, names)
    maps = quantized_maps(stored, scheme, folder) if files else frozenset()
    if scheme is None:
        return WeightFormat(dtype)
    if files and scheme.sign is not None:
        names_of = (f"{map}.{kind}" for map in maps for kind in ("weight_scale", "scales"))
        scales = {stored[name].dtype for name in names_of if name in stored}
        return WeightFormat(dtype, scheme.on(device, dtype, scales), maps.__contains__)
    is_quantizable = are_experts if scheme.only_experts else names.is_quantizable
    return WeightFormat(dtype, scheme.on(device, dtype), is_quantizable)


def stored_tensors(files: list[Path], names: Names) -> dict[str, StoredTensor]:
    """The tensors of all files by their names in the model."""
    return {
        name: StoredTensor(stored_name, stored.get_dtype(), file)
        for file in files
        for stored_name, stored in _tensors(file)
        if (name := names.of(stored_name)) is not None
    }


def destinations(model: CausalLM | AdoptedModel, scheme: QuantizedFormat | None) -> Destinations:
    """Where the tensors of a checkpoint go. scheme: of its quantised weights."""
    if not isinstance(model, CausalLM):
        return model.destinations(scheme)
    targets = checkpoint_targets(model, scheme)
    is_tied = model.embed_tokens is not None and model.is_tied
    of_others = of_other_ranks(model)
    return Destinations(
        targets=targets,
        stacks=checkpoint_stacks(model, scheme),
        scheme=scheme,
        is_left_out=lambda name: _is_elsewhere(model, name) or of_others(name),
        tied_head=TiedHead(_HEAD, targets[_EMBEDDING]) if is_tied else None,
    )


def fill_from_files(to: Destinations, names: Names, files: list[Path], progress: Progress) -> None:
    """Read the parts of this rank, one tensor at a time. Raises CheckpointError if a tensor is
    missing or left over, is there twice, or is another one than the model has."""
    targets, stacks = to.targets, to.stacks
    total_bytes = sum(target.num_bytes for target in targets.values())
    done_bytes = 0
    filled: set[str] = set()
    unexpected: list[str] = []
    tied_head: Tensor | None = None
    for file in files:
        for full_name, stored in _tensors(file):
            name = names.of(full_name)
            if name is None:
                continue
            if to.tied_head is not None and name == to.tied_head.name:
                tied_head = _part(stored, to.tied_head.target.cut)
                continue
            # Old checkpoints have the frequencies, which are computed from the config.
            if name.endswith("rotary_emb.inv_freq") or is_kv_scale(name):
                continue
            dtype = stored.get_dtype()
            stack = stacks.get(name)
            if stack is None and name in targets:
                stack = Stack((targets[name],), (name,))
            if stack is None and to.is_left_out(name):
                continue
            if stack is None:
                unexpected.append(f"{full_name} ({dtype})")
                continue
            if dtype not in (dtypes := stack.targets[0].dtypes):
                raise CheckpointError(
                    f"{file}: {full_name} has the dtype {dtype}; expected {' or '.join(dtypes)}."
                )
            if not filled.isdisjoint(stack.stands_for):
                raise CheckpointError(
                    f"{file.parent} holds {full_name} twice, again in {file.name}."
                )
            for target in stack.targets:
                if not target.any_shape and stored.get_shape() not in target.shapes:
                    raise CheckpointError(
                        f"{file}: {full_name} has the shape {stored.get_shape()}; "
                        f"the config asks for {target.shapes[0]}{_of_scheme(to.scheme, name)}."
                    )
                try:
                    target.fill(stored[...] if target.any_shape else _part(stored, target.cut))
                except CheckpointError as error:
                    raise CheckpointError(f"{file}: {full_name} {error}.") from error
                done_bytes += target.num_bytes
                progress(done_bytes, total_bytes)
            filled.update(stack.stands_for)
    folder = files[0].parent
    if unexpected:
        raise CheckpointError(
            f"{folder} holds weights that the model does not take: {_few(unexpected)}."
        )
    required = {name for name, target in targets.items() if target.is_required}
    if missing := required - filled:
        raise CheckpointError(f"{folder} lacks weights: {_few(sorted(missing))}.")
    if tied_head is not None and to.tied_head is not None:
        assert to.tied_head.target.weight is not None
        embedding = to.tied_head.target.weight[: len(tied_head)]
        if not torch.equal(tied_head.to(embedding), embedding):
            raise CheckpointError(
                f"{folder}: {to.tied_head.name} differs from the embedding, to which the config "
                "ties it; set tie_word_embeddings to false in config.json."
            )


def _is_elsewhere(model: CausalLM, name: str) -> bool:
    """True for a tensor of another stage, which checks it, or of a layer that is left out."""
    kind, _, rest = name.partition(".")
    if kind == "layers":
        index = rest.partition(".")[0]
        stored = map(str, range(model.num_layers + model.num_left_out))
        return index in stored and index not in model.layers
    return not model.is_first if name == _EMBEDDING else not model.is_last and name in _AT_THE_END


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
    part: Tensor = stored[tuple(parts) if stored.get_shape() else ...]
    return part


def _of_scheme(scheme: QuantizedFormat | None, name: str) -> str:
    """What asks for the shape of a tensor that only quantised weights have."""
    return "" if scheme is None or name.endswith((".weight", ".bias")) else f" ({scheme})"


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest
