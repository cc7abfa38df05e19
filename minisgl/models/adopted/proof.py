"""Proves that an adopted model computes what transformers computes.

A small copy of the model with random weights runs twice on the CPU in float32: as transformers runs
it, one sequence at a time, and as minisgl does, in chunks of several requests over pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention.backends import make_attention
from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.attention.state import LayerState, PagedKV
from minisgl.config import KVSpec, SharedKV
from minisgl.errors import UnsupportedModelError
from minisgl.models.adopted.attend import ATTENTION
from minisgl.models.adopted.config import facts_of
from minisgl.models.adopted.discover import Discovered, discover, inputs, num_layers_of_each_kind
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.shrunk import MAX_LAYERS, shrunk

TOLERANCE = 1e-3  # of the standard deviation of the logits
_LENGTHS = (13, 9)
_CHUNKS = ((6, 0), (5, 7), (1, 1), (1, 1))  # new tokens of each sequence in each step
_PAGE_SIZE = 2
_SEED = 5


def prove(architecture: type[Any], config: Any, found: Discovered) -> None:
    """Raise UnsupportedModelError if the numbers differ, with the first layer where they do."""
    small = shrunk(config, num_layers_of_each_kind(found, MAX_LAYERS))
    small_found = discover(architecture, small)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = architecture._from_config(
            small, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        experts = small._experts_implementation
        _set_experts(model, "eager")
        give_teeth(model)
        sequences = [torch.randint(2, small.vocab_size, (length,)) for length in _LENGTHS]
    wanted, wanted_layers = _as_transformers(model, small_found, sequences)
    model.set_attn_implementation(ATTENTION)
    _set_experts(model, experts)
    facts = facts_of(small_found, "float32", small.vocab_size, max(_LENGTHS))
    got, got_layers = _as_minisgl(AdoptedModel(model, small_found, facts), small_found, sequences)
    for layer, (theirs, ours) in enumerate(zip(wanted_layers, got_layers, strict=True)):
        if not _are_equal(theirs, ours):
            raise UnsupportedModelError(
                f"{architecture.__name__} computes something else here than in transformers, first "
                f"in the attention of layer {layer} ({small_found.modules[layer]}, "
                f"{small_found.attention[layer]})."
            )
    if not _are_equal(wanted, got):
        raise UnsupportedModelError(
            f"{architecture.__name__} computes other logits here than in transformers, from equal "
            "results of all attention layers."
        )


def _set_experts(model: Any, implementation: str) -> None:
    """Choose how experts are computed, where there are some that leave the choice."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(implementation)


def _are_equal(wanted: Tensor, got: Tensor) -> bool:
    return bool((got - wanted).abs().max() <= TOLERANCE * wanted.std())


@torch.no_grad()
def give_teeth(model: nn.Module) -> None:
    """Weights that make attention peaked and norms uneven, so that a mistake shows."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            weight.normal_(std=2 * weight.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            weight.normal_(std=0.2)
        else:
            weight.copy_(weight + torch.empty_like(weight).normal_(std=0.2))


class _Outputs:
    """What the attention modules return, row by row."""

    def __init__(self, model: Any, found: Discovered) -> None:
        self.rows: list[list[Tensor]] = [[] for _ in found.modules]
        self._handles = [
            model.get_submodule(name).register_forward_hook(self._hook(layer))
            for layer, name in enumerate(found.modules)
        ]

    def _hook(self, layer: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self.rows[layer].append(first.reshape(-1, first.shape[-1]).clone())

        return note

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@torch.no_grad()
def _as_transformers(
    model: Any, found: Discovered, sequences: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The logits and the results of each layer's attention, of all rows of all sequences."""
    outputs = _Outputs(model, found)
    logits = [model(**inputs(ids, torch.arange(len(ids)))).logits[0] for ids in sequences]
    outputs.close()
    return torch.cat(logits), [torch.cat(rows) for rows in outputs.rows]


def _as_minisgl(
    model: AdoptedModel, found: Discovered, sequences: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The same, in the same order, of steps that mix chunks and decode rows."""
    outputs = _Outputs(model.module, found)
    num_pages = -(-max(_LENGTHS) // _PAGE_SIZE)
    # Scattered pages, the first of which is scratch.
    pages = 1 + torch.randperm(len(sequences) * num_pages).view(len(sequences), -1).to(torch.int32)
    states = _states(model, int(pages.max()) + 1)
    attention = make_attention("torch", "torch")
    done = [0] * len(sequences)
    order: list[tuple[int, int]] = []  # the sequence and position of each row
    logits: list[Tensor] = []
    steps = [*_CHUNKS]
    for counts in steps:
        batch, rows = _batch(sequences, pages, done, counts)
        order += rows
        logits.append(model.logits(model(batch, states, attention)))
        done = [before + count for before, count in zip(done, counts, strict=True)]
    outputs.close()
    place = {row: index for index, row in enumerate(order)}
    back = torch.tensor([place[row] for row in sorted(order)])
    assert done == [len(ids) for ids in sequences]
    return torch.cat(logits)[back], [torch.cat(rows)[back] for rows in outputs.rows]


def _states(model: AdoptedModel, num_pages: int) -> list[LayerState]:
    states: list[LayerState] = []
    for spec in model.layer_specs("float32"):
        if isinstance(spec, SharedKV):
            states.append(states[spec.layer])
        else:
            assert isinstance(spec, KVSpec)
            # NaN, which spoils whatever reads a slot that was not written.
            k, v = (torch.full((num_pages, _PAGE_SIZE, *its), torch.nan) for its in spec.shapes)
            states.append(PagedKV(k, v))
    return states


def _batch(
    sequences: list[Tensor], pages: Tensor, done: list[int], counts: tuple[int, ...]
) -> tuple[ForwardBatch, list[tuple[int, int]]]:
    """The next `counts` tokens of each sequence, and the sequence and position of each row. One
    token is a decode row."""
    decodes = [index for index, count in enumerate(counts) if count == 1]
    chunks = [index for index, count in enumerate(counts) if count > 1]
    rows = [
        (index, done[index] + offset)
        for index in (*decodes, *chunks)
        for offset in range(counts[index])
    ]
    which = torch.tensor([index for index, _ in rows])
    positions = torch.tensor([position for _, position in rows])
    slots = pages[which, positions // _PAGE_SIZE].long() * _PAGE_SIZE + positions % _PAGE_SIZE
    lengths = [done[index] + 1 for index in decodes]
    batch = ForwardBatch(
        token_ids=torch.stack([sequences[index][position] for index, position in rows]),
        positions=positions,
        slot_mapping=slots,
        decodes=DecodeBatch(
            pages[decodes], torch.tensor(lengths, dtype=torch.int32), max(lengths, default=0)
        ),
        chunks=PrefillBatch.of(
            pages[chunks], [done[index] for index in chunks], [counts[index] for index in chunks]
        ),
        slots=BatchSlots(torch.tensor(decodes), torch.tensor(chunks)),
    )
    return batch, rows
