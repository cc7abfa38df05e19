"""Makes a model of transformers with minisgl's modules in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minisgl.config import ModelFacts
from minisgl.distributed.communicator import Communicator
from minisgl.layers.formats import WeightFormat
from minisgl.models.adopted.attend import ATTENTION, register
from minisgl.models.adopted.discover import Discovered
from minisgl.models.adopted.division import WHOLE, Kind, division_of
from minisgl.models.adopted.heads import Heads
from minisgl.models.adopted.known import Known
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.stages import OtherStages, body_of
from minisgl.models.adopted.swap import Swap, Way
from minisgl.shards import vocab_shard


def skeleton(architecture: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model with its parameters on the meta device, and its buffers on `device`; those that no
    checkpoint has are filled."""
    register()
    with torch.device("meta"):
        model = architecture._from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    for weight in model.parameters():
        weight._is_hf_initialized = True
    with torch.device(device):
        model.initialize_weights()
    return model.eval()


def assemble(
    model: Any,
    found: Discovered,
    facts: ModelFacts,
    known: Known,
    way: Way,
    *,
    format: WeightFormat,
    device: torch.device,
    comm: Communicator,
    layers: range,
    experts_by_rank: bool = False,
    by_request: bool = False,
) -> AdoptedModel:
    """Put minisgl's modules into a skeleton, and make room for its other weights.

    facts: of the whole model. comm and layers: of the stage. experts_by_rank: as in
    ModelConfig. by_request: whether ranks divide the requests in attention, where
    each then has all heads. Raises UnsupportedModelError if it cannot be a stage.
    """
    is_first, is_last = layers.start == 0, layers.stop == len(found.layers)
    by_request = by_request and comm.size > 1
    division = division_of(model, found) if comm.size > 1 else WHOLE
    if by_request:
        division = division.outside(found.modules)
    body, heads = body_of(model), Heads(facts.max_seq_len)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    names = {module: name for name, module in model.named_modules()}
    stages = None if is_first and is_last else OtherStages(model, body, found, layers)
    swap = Swap(
        model=model,
        found=found,
        known=known,
        division=division,
        way=way,
        format=format,
        comm=comm,
        experts_by_rank=experts_by_rank,
        heads=heads,
    )
    vocab = vocab_shard(model.config.vocab_size, comm.rank, comm.size)
    with torch.device(device):
        swap.layers([found.layers[layer] for layer in layers])
        for module in list(body.children()):
            if type(module).__name__ in known.norms:
                swap.norm(names[module])
        swap.parameters(division.parameters)
        _allocate(model)
        if not is_last:
            swap.put(names[head], nn.Identity())
        elif is_tied and is_first and comm.size == 1:
            swap.tied_head(names[head], embedding.weight)
        else:
            swap.head(names[head], vocab)
    if way.defers:
        for module in body.children():
            if "RotaryEmbedding" in type(module).__name__:
                heads.take_over_angles(module)
    if Kind.HEADS in division.kinds.values():  # the modules compute where heads begin
        own = found.attention[0].on_rank(comm.size)
        model.config.num_attention_heads = own.num_heads
        model.config.num_key_value_heads = own.num_kv_heads
        for layer in layers:
            module = model.get_submodule(found.modules[layer])
            module.num_key_value_heads = own.num_kv_heads
    return AdoptedModel(
        model,
        body,
        found,
        facts,
        layers,
        heads=heads,
        products=swap.products,
        split=swap.split,
        stages=stages,
        tied=(names[head], names[embedding]) if is_tied else None,
        comm=comm,
        by_request=by_request,
    )


def _allocate(model: nn.Module) -> None:
    """Make room on torch's default device for the parameters that are nowhere yet."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                made = torch.empty(weight.shape, dtype=weight.dtype)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
