"""Proves that an adopted model computes what transformers computes.

A small copy of the model with random weights runs twice on the CPU in float32: as transformers runs
it, one sequence at a time, and as minisgl does, with its modules in it, in chunks of several
requests over pages. A model that is divided over ranks or stages runs once more, in parts.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention.backends import make_attention
from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.attention.state import LayerState, PagedKV
from minisgl.config import KVSpec, SharedKV
from minisgl.distributed.communicator import SINGLE_RANK, Communicator, SingleRank
from minisgl.errors import UnsupportedModelError, in_one_line
from minisgl.kernels.linear.product import Product
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.adopted.assembly import assemble, skeleton
from minisgl.models.adopted.config import facts_of
from minisgl.models.adopted.discover import Discovered, discover, inputs, num_layers_of_each_kind
from minisgl.models.adopted.division import divisibility
from minisgl.models.adopted.known import Known, recognised
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.shrunk import MAX_LAYERS, shrunk
from minisgl.models.adopted.swap import WAYS, Way
from minisgl.models.filling import InMemory, part_of
from minisgl.models.targets import Destinations

TOLERANCE = 1e-3  # of the standard deviation of the logits
_LENGTHS = (13, 9)
_CHUNKS = ((6, 0), (5, 7), (1, 1), (1, 1))  # new tokens of each sequence in each step
_PAGE_SIZE = 2
_SEED = 5
_NUM_PARTS = 2  # ranks, or stages, of a model that is divided


def prove(architecture: type[Any], config: Any, found: Discovered) -> tuple[Known, Way]:
    """Find what minisgl's kernels compute of a model, as much at once as they can.

    Raises UnsupportedModelError if the numbers differ even where they compute least, with the first
    layer where they do.
    """
    small = Small.of(architecture, config, found)
    for way in WAYS[:-1]:
        with contextlib.suppress(Exception):  # the code of the model asks for what is not known
            if _are_equal(small.wanted, small.logits([small.part(way)])):
                return small.known, way
    try:
        small.check(WAYS[-1])
    except UnsupportedModelError:
        raise
    except Exception as error:  # of whatever code
        raise UnsupportedModelError(
            f"{architecture.__name__} does not run here: {in_one_line(error)}"
        ) from error
    return small.known, WAYS[-1]


def prove_parts(
    architecture: type[Any],
    config: Any,
    found: Discovered,
    way: Way,
    *,
    ranks: bool,
    stages: bool,
    experts_by_rank: bool = False,
    by_request: bool = False,
) -> None:
    """Raise UnsupportedModelError if the numbers change where a model is divided over ranks, or
    over stages. experts_by_rank: each rank has whole experts. by_request: in attention ranks divide
    the requests."""
    small = Small.of(architecture, config, found)
    if stages and len(small.found.layers) > 1:
        middle = len(small.found.layers) // 2
        layers = range(middle), range(middle, len(small.found.layers))
        parts = [small.part(way, layers=each) for each in layers]
        _check_parts(small, "stages", lambda: small.logits(parts))
    if ranks:
        _check_parts(
            small,
            "ranks",
            lambda: small.logits_of_ranks(
                way, experts_by_rank=experts_by_rank, by_request=by_request
            ),
        )


def prove_adapters(architecture: type[Any], config: Any, found: Discovered, way: Way) -> None:
    """Raise UnsupportedModelError if the code of a model multiplies with the weights of linear maps
    itself, or with rows of no step: what adapters (LoRA) add would be missing."""
    small = Small.of(architecture, config, found)
    part = small.part(way)
    for name, module in part.module.named_modules():
        if isinstance(module, Linear) and "." in name:  # the others are heads
            module.replace_product(_Halved(module.product))
    with contextlib.suppress(Exception):  # the code takes the product for another
        if _are_equal(small.wanted, small.logits([part])):
            return
    raise UnsupportedModelError(
        f"{architecture.__name__} cannot have adapters (LoRA): its code multiplies with the "
        "weights of linear maps itself."
    )


class _Halved(Product):
    """Halves the weights of another product, and adds the other half for the rows of a step."""

    def __init__(self, base: Product) -> None:
        self._base = base
        self._half = base.weights["weight"].mul_(0.5).clone()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._base.weights

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        y = self._base(x, rows)
        return y if rows is None else y + x @ self._half.mT


def _check_parts(small: Small, kind: str, logits: Callable[[], Tensor]) -> None:
    try:
        if _are_equal(small.wanted, logits()):
            return
        why = "it computes other logits than as a whole"
    except Exception as error:  # the code of the model needs what another part has
        why = in_one_line(error)
    raise UnsupportedModelError(
        f"{small.architecture.__name__} cannot be divided over {kind}: {why}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A small copy of a model, with random weights."""

    architecture: Any
    config: Any
    found: Discovered
    known: Known
    weights: dict[str, Tensor]
    sequences: list[Tensor]
    wanted: Tensor  # the logits of all rows of all sequences, as transformers computes them
    wanted_layers: list[Tensor]  # what the attention of each layer returns

    @staticmethod
    def of(architecture: Any, config: Any, found: Discovered) -> Small:
        """found: of the model itself, whose kinds of layers the copy has."""
        small = shrunk(config, num_layers_of_each_kind(found, MAX_LAYERS))
        small_found = discover(architecture, copy.deepcopy(small))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = architecture._from_config(
                small, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            if model._can_set_experts_implementation():
                model.set_experts_implementation("eager")
            give_teeth(model)
            known = recognised(model)
            sequences = [torch.randint(2, small.vocab_size, (length,)) for length in _LENGTHS]
        wanted, wanted_layers = _as_transformers(model, small_found, sequences)
        return Small(
            architecture=architecture,
            config=small,
            found=small_found,
            known=known,
            weights=model.state_dict(),
            sequences=sequences,
            wanted=wanted,
            wanted_layers=wanted_layers,
        )

    def part(
        self,
        way: Way,
        *,
        comm: Communicator = SINGLE_RANK,
        layers: range | None = None,
        experts_by_rank: bool = False,
        by_request: bool = False,
    ) -> AdoptedModel:
        """The copy with minisgl's modules in it, or the part of a rank or a stage."""
        device = torch.device("cpu")
        config = copy.deepcopy(self.config)
        config._experts_implementation = "eager"
        model = skeleton(self.architecture, config, torch.float32, device)
        facts = facts_of(
            self.found,
            "float32",
            config.vocab_size,
            max(_LENGTHS),
            divides=divisibility(model, self.found),
        )
        facts = replace(facts, divides_heads=facts.divides_heads and not by_request)
        part = assemble(
            model,
            self.found,
            facts,
            self.known,
            way,
            format=WeightFormat(torch.float32),
            device=device,
            comm=comm,
            layers=layers or range(len(self.found.layers)),
            experts_by_rank=experts_by_rank,
            by_request=by_request,
        )
        prefix = f"{model.base_model_prefix}."
        _fill(
            part.destinations(None),
            {name.removeprefix(prefix): weight for name, weight in self.weights.items()},
        )
        part.prepare()
        return part

    def logits(self, stages: Sequence[AdoptedModel], rank: int | None = None) -> Tensor:
        """The logits of all rows, in their order, as minisgl computes them. rank: that has the
        sequence of its number alone."""
        return _as_minisgl(stages, self.sequences, rank)

    def logits_of_ranks(self, way: Way, *, experts_by_rank: bool, by_request: bool) -> Tensor:
        """The same of several ranks, a thread each."""
        meeting = _Meeting()

        def run(rank: int) -> Tensor:
            try:
                comm = _ThreadRank(rank, meeting)
                part = self.part(
                    way, comm=comm, experts_by_rank=experts_by_rank, by_request=by_request
                )
                return self.logits([part], rank if by_request else None)
            except BaseException:
                meeting.barrier.abort()
                raise

        with ThreadPoolExecutor(_NUM_PARTS) as threads:
            parts = list(threads.map(run, range(_NUM_PARTS)))
        return torch.cat(parts, dim=1)[:, : self.config.vocab_size]

    def check(self, way: Way) -> None:
        """Raise UnsupportedModelError if the numbers differ."""
        part = self.part(way)
        outputs = _Outputs(part.module, self.found)
        got = self.logits([part])
        got_layers = outputs.taken(_order_of_rows())
        for layer, (theirs, ours) in enumerate(zip(self.wanted_layers, got_layers, strict=True)):
            if not _are_equal(theirs, ours):
                raise UnsupportedModelError(
                    f"{self.architecture.__name__} computes something else here than in "
                    f"transformers, first in the attention of layer {layer} "
                    f"({self.found.modules[layer]}, {self.found.attention[layer]})."
                )
        if not _are_equal(self.wanted, got):
            raise UnsupportedModelError(
                f"{self.architecture.__name__} computes other logits here than in transformers, "
                "from equal results of all attention layers."
            )


def _fill(to: Destinations, weights: dict[str, Tensor]) -> None:
    """Fill the weights of a part from those of the whole model."""
    for name, weight in weights.items():
        stack = to.stack(name)
        for target in () if stack is None else stack.targets:
            target.fill(part_of(InMemory(weight), target.cut))


@dataclass
class _Meeting:
    """Where the threads of several ranks exchange what they have."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(_NUM_PARTS))
    parts: list[Tensor] = field(default_factory=lambda: [torch.empty(0)] * _NUM_PARTS)


class _ThreadRank(SingleRank):
    """A rank that is a thread of this process."""

    size = _NUM_PARTS

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def all_reduce(self, part: Tensor) -> Tensor:
        return self._all(part).sum(0)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat([*self._all(part)], dim=-1)

    def _all(self, part: Tensor) -> Tensor:
        """What all ranks have."""
        meeting = self._meeting
        meeting.parts[self.rank] = part
        meeting.barrier.wait()
        parts = torch.stack(meeting.parts)
        meeting.barrier.wait()
        return parts

    def all_reduce_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return super().all_reduce_norm(self.all_reduce(part), rows, weight, eps)


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
        self._rows: list[list[Tensor]] = [[] for _ in found.modules]
        self._handles = [
            model.get_submodule(name).register_forward_hook(self._hook(layer))
            for layer, name in enumerate(found.modules)
        ]

    def _hook(self, layer: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self._rows[layer].append(first.reshape(-1, first.shape[-1]).clone())

        return note

    def taken(self, order: Tensor | None = None) -> list[Tensor]:
        """Take no more, and return those of each layer, in another order if there is one."""
        for handle in self._handles:
            handle.remove()
        layers = [torch.cat(rows) for rows in self._rows]
        return layers if order is None else [rows[order] for rows in layers]


@torch.no_grad()
def _as_transformers(
    model: Any, found: Discovered, sequences: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The logits and the results of each layer's attention, of all rows of all sequences."""
    outputs = _Outputs(model, found)
    logits = [model(**inputs(ids, torch.arange(len(ids)))).logits[0] for ids in sequences]
    return torch.cat(logits), outputs.taken()


@torch.no_grad()
def _as_minisgl(
    stages: Sequence[AdoptedModel], sequences: list[Tensor], rank: int | None
) -> Tensor:
    """The same logits, in the same order, of steps that mix chunks and decode rows. rank: that
    attends for the sequence of its number alone; None: for all."""
    num_pages = -(-max(_LENGTHS) // _PAGE_SIZE)
    # Scattered pages, the first of which is scratch.
    order = torch.randperm(
        len(sequences) * num_pages, generator=torch.Generator().manual_seed(_SEED)
    )
    pages = 1 + order.view(len(sequences), -1).to(torch.int32)
    states = [_states(stage, int(pages.max()) + 1) for stage in stages]
    attention = make_attention("torch", "torch")
    done = [0] * len(sequences)
    logits: list[Tensor] = []
    for counts in _CHUNKS:
        batch = _batch(sequences, pages, done, counts)
        if rank is not None:  # the rows are in the order of the sequences, and of the ranks
            own = _batch([sequences[rank]], pages[rank, None], [done[rank]], [counts[rank]])
            batch = replace(own, token_ids=batch.token_ids, rows=batch.rows, shares=counts)
        rows: Tensor | None = None
        for stage, its_states in zip(stages, states, strict=True):
            rows = stage(batch, its_states, attention, rows)
        assert rows is not None
        logits.append(stages[-1].logits(rows))
        done = [before + count for before, count in zip(done, counts, strict=True)]
    assert done == [len(ids) for ids in sequences]
    return torch.cat(logits)[_order_of_rows()]


def _order_of_rows() -> Tensor:
    """The places of the rows of all steps, sequence by sequence."""
    done, rows = [0] * len(_LENGTHS), list[tuple[int, int]]()
    for counts in _CHUNKS:
        rows += _rows(done, counts)
        done = [before + count for before, count in zip(done, counts, strict=True)]
    return torch.tensor([rows.index(row) for row in sorted(rows)])


def _rows(done: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    """The sequence and the position of each row of a step: decode rows, then chunks."""
    decodes = [index for index, count in enumerate(counts) if count == 1]
    chunks = [index for index, count in enumerate(counts) if count > 1]
    return [
        (index, done[index] + offset)
        for index in (*decodes, *chunks)
        for offset in range(counts[index])
    ]


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
    sequences: list[Tensor], pages: Tensor, done: list[int], counts: Sequence[int]
) -> ForwardBatch:
    """The next `counts` tokens of each sequence. One token is a decode row."""
    decodes = [index for index, count in enumerate(counts) if count == 1]
    chunks = [index for index, count in enumerate(counts) if count > 1]
    places = _rows(done, counts)
    which = torch.tensor([index for index, _ in places], dtype=torch.int64)
    positions = torch.tensor([position for _, position in places], dtype=torch.int64)
    rows = Rows.of(which, positions)
    ids = [int(sequences[index][position]) for index, position in places]
    slots = pages[which, positions // _PAGE_SIZE].long() * _PAGE_SIZE + positions % _PAGE_SIZE
    lengths = [done[index] + 1 for index in decodes]
    prefill = PrefillBatch.of(
        pages[chunks], [done[index] for index in chunks], [counts[index] for index in chunks]
    )
    chunk_slots = torch.tensor(chunks, dtype=torch.int64)
    return ForwardBatch(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        rows=rows,
        own=rows,
        slot_mapping=slots,
        decodes=DecodeBatch(
            pages[decodes], torch.tensor(lengths, dtype=torch.int32), max(lengths, default=0)
        ),
        chunks=prefill,
        slots=BatchSlots(
            torch.tensor(decodes, dtype=torch.int64),
            Segments(chunk_slots, chunk_slots, prefill.row_starts),
        ),
    )
