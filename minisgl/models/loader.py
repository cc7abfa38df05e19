"""Loads weights into a model: streamed from safetensors, or random for benchmarks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import Quantization, WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.decoder import Decoder
from minisgl.models.dummy import fill_randomly
from minisgl.models.filling import Progress, fill_from_files, tensors_of
from minisgl.models.formats import QuantizedFormat
from minisgl.models.formats.quantized_format import StoredTensor
from minisgl.models.hub import safetensors_files
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
    TiedHead,
    checkpoint_stacks,
    checkpoint_targets,
    of_other_ranks,
)
from minisgl.models.transformer import CausalLM

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel

logger = logging.getLogger(__name__)

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_AT_THE_END = ("lm_head.", "norm.")  # of the last stage
GIB, MIB = 1 << 30, 1 << 20
DUMMY_SEED = 0


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
    names = names_in(config)
    made: Callable[..., CausalLM | AdoptedModel]
    if isinstance(config, NativeConfig):
        made = partial(
            FAMILIES[config.architecture].model,
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
        made = Blueprint(config, dtype, device, max_seq_len, ranks, layers).build
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


def names_in(config: ModelConfig) -> Names:
    """How the tensors of a checkpoint are called in the model."""
    if isinstance(config, NativeConfig):
        head = None if config.tie_word_embeddings else _HEAD.removesuffix(".weight")
        names = Names(FAMILIES[config.architecture].name_of, is_quantizable, head)
        return names.in_format(config.quantization)
    # Imports the modeling code of transformers.
    from minisgl.models.adopted.config import AdoptedConfig
    from minisgl.models.adopted.load import tensor_names

    assert isinstance(config, AdoptedConfig)
    return tensor_names(config).in_format(config.quantization)


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
    maps = quantized_maps(stored, scheme, folder, names.head) if files else {}
    if scheme is None:
        return WeightFormat(dtype)
    if files and scheme.signs:
        names_of = (f"{map}.{kind}" for map in maps for kind in ("weight_scale", "scales"))
        scales = {stored[name].dtype for name in names_of if name in stored}
        there = scheme.on(device, dtype, scales)
        by_sign = there.signs
        formats = {map: by_sign[sign] for map, sign in maps.items()}
        return WeightFormat(dtype, there, formats.get)
    there = scheme.on(device, dtype)
    is_quantizable = are_experts if scheme.only_experts else names.is_quantizable
    return WeightFormat(dtype, there, lambda name: there.at(name) if is_quantizable(name) else None)


def stored_tensors(files: list[Path], names: Names) -> dict[str, StoredTensor]:
    """The tensors of all files by their names in the model."""
    return {
        name: StoredTensor(stored_name, stored.get_dtype(), file)
        for file in files
        for stored_name, stored in tensors_of(file)
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


def _is_elsewhere(model: CausalLM, name: str) -> bool:
    """True for a tensor of another stage, which checks it, or of a layer that is left out."""
    kind, _, rest = name.partition(".")
    if kind == "layers":
        index = rest.partition(".")[0]
        stored = map(str, range(model.num_layers + model.num_left_out))
        return index in stored and index not in model.layers
    if name == _EMBEDDING:
        return not model.is_first
    return not model.is_last and name.startswith(_AT_THE_END)
