"""Makes a rank's part of an adopted model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from minisgl.distributed.communicator import Communicator
from minisgl.layers.formats import WeightFormat
from minisgl.models.adopted.assembly import assemble, skeleton
from minisgl.models.adopted.config import AdoptedConfig
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.names import names_of
from minisgl.models.adopted.proof import prove_adapters, prove_parts
from minisgl.models.adopted.reader import model_class, transformers_config
from minisgl.models.quantization import is_quantizable
from minisgl.models.targets import Names

_ROUTERS = re.compile(r"(^|\.)(gate|router)(\.|$)")


def check_adapters(config: AdoptedConfig) -> None:
    """Raise UnsupportedModelError if adapters of the model would not reach all that it computes."""
    prove_adapters(model_class(config.architecture), _made(config), config.found, config.way)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a rank's part of a model is made of."""

    config: AdoptedConfig
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int
    comm: Communicator  # of the stage
    layers: range  # of the stage

    def build(self, *, format: WeightFormat) -> AdoptedModel:
        """Make the model with uninitialised weights. Raises UnsupportedModelError if a model that
        is divided would compute something else."""
        config, comm, layers = self.config, self.comm, self.layers
        architecture = model_class(config.architecture)
        is_part = comm.size > 1, len(layers) < config.num_layers
        if any(is_part):
            ranks, stages = is_part
            prove_parts(
                *(architecture, _made(config), config.found, config.way),
                ranks=ranks,
                stages=stages,
                experts_by_rank=config.experts_by_rank,
                by_request=config.attends_by_request,
            )
        dtype = str(self.dtype).removeprefix("torch.")
        return assemble(
            skeleton(architecture, _made(config), self.dtype, self.device),
            config.found,
            replace(config.facts(), dtype=dtype, max_seq_len=self.max_seq_len),
            config.known,
            config.way,
            format=format,
            device=self.device,
            comm=comm,
            layers=layers,
            experts_by_rank=config.experts_by_rank,
            by_request=config.attends_by_request,
        )


def tensor_names(config: AdoptedConfig) -> Names:
    """How the tensors of the checkpoint are called in the model."""
    with torch.device("meta"):
        model = model_class(config.architecture)._from_config(_made(config))
    layers = config.found.layers
    path, more = layers[0].rpartition(".")[0], range(config.num_drafting_layers)
    drafting = [f"{path}.{len(layers) + each}." for each in more]
    of = names_of(model, has_towers=config.has_towers, drafting=drafting)
    return Names(of, lambda name: is_quantizable(name) and not _ROUTERS.search(name))


def _made(config: AdoptedConfig) -> Any:
    """The config as transformers has it."""
    return transformers_config(config.values, config.architecture)
