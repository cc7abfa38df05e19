"""How a model of transformers is divided over ranks and stages, as its own plans say.

The plans name forms for patterns of modules. Four kinds of division follow from these:

- OUTPUTS, INPUTS: a linear map is split by its outputs, or by its inputs with a sum after it;
- HALVES: so are the two halves of the outputs, gates and what they multiply;
- HEADS: so are queries, keys and values, which one map has side by side.

A map whose outputs the plan gathers is whole on every rank, unless it is one of the last two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from minisgl.config import AttentionSpec
from minisgl.models.adopted.discover import Discovered
from minisgl.models.adopted.known import has_plain_experts
from minisgl.models.adopted.stages import why_one_stage

_GATHERED, _SPLIT = "colwise_gather_output", "rowwise_split_input"
# Forms of parameters that are whole, or of modules whose parameters have forms of their own.
_WITHOUT_EFFECT = {
    "replicated_with_grad_allreduce",
    "local_params",
    "embedding_rowwise",
    "moe_tp_experts",
    "packed_colwise",
    _GATHERED,
    _SPLIT,
}


class Kind(Enum):
    """How a linear map is divided over ranks."""

    WHOLE = auto()
    OUTPUTS = auto()
    INPUTS = auto()
    HALVES = auto()
    HEADS = auto()


@dataclass(frozen=True, slots=True)
class Division:
    """Of the maps of a model, by their names. What is not listed is whole."""

    kinds: Mapping[str, Kind]
    parameters: frozenset[str]  # of the others, those that are split in their first dimension
    experts: frozenset[str]  # the modules of experts, whose inner dimension is split
    why_not: str | None = None  # the model cannot be divided; None: it can

    def outside(self, modules: Sequence[str]) -> Division:
        """The same, with what is in these modules whole."""
        inside = tuple(f"{name}." for name in modules)
        kinds = {name: kind for name, kind in self.kinds.items() if not name.startswith(inside)}
        parameters = frozenset(name for name in self.parameters if not name.startswith(inside))
        return replace(self, kinds=kinds, parameters=parameters)


WHOLE = Division({}, frozenset(), frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisibility:
    """Over how many ranks and stages a model can be divided."""

    one_rank: str | None  # why over no more than one rank; None: over several
    one_stage: str | None  # the same of stages
    divides_heads: bool  # each rank attends for its own heads; else for all
    common_size: int  # the greatest common divisor of what is split beside heads and experts, or 0
    expert_size: int  # of the inner dimension of experts that are split; 0: none are
    not_by_rank: str | None  # why ranks cannot have whole experts; None: they can
    num_attention_weights: int  # in the matrices of attention that are split
    num_whole_weights: int  # in the matrices of layers that are not split
    tied: bool  # the head is the embedding


def divisibility(model: Any, found: Discovered) -> Divisibility:
    """model: as transformers makes it, on any device."""
    division = division_of(model, found)
    inside = tuple(f"{name}." for name in found.modules)
    sizes = []
    for name, kind in division.kinds.items():
        if not name.startswith(inside):
            linear = model.get_submodule(name)
            outputs = linear.out_features // (2 if kind == Kind.HALVES else 1)
            sizes.append(linear.in_features if kind == Kind.INPUTS else outputs)
    experts = [model.get_submodule(name).down_proj.shape[2] for name in division.experts]
    stacks = {name.rpartition(".")[0] for name, w in model.named_parameters() if w.dim() == 3}
    layers = tuple(f"{name}." for name in found.layers)
    matrices = {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and name.startswith(layers)
    }
    divided = {*division.kinds, *division.parameters}
    split = {
        name: size
        for name, size in matrices.items()
        if name in divided or name.rpartition(".")[0] in divided
    }
    not_by_rank = None
    if not all(has_plain_experts(model.get_submodule(name)) for name in stacks):
        not_by_rank = f"minisgl does not divide the experts of {type(model).__name__}"
    return Divisibility(
        one_rank=division.why_not,
        one_stage=why_one_stage(model, found),
        divides_heads=any(name.startswith(inside) for name in division.kinds),
        common_size=math.gcd(*sizes),
        expert_size=math.gcd(*experts),
        not_by_rank=not_by_rank,
        num_attention_weights=sum(size for name, size in split.items() if name.startswith(inside)),
        num_whole_weights=sum(matrices.values()) - sum(split.values()),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    )


def division_of(model: Any, found: Discovered) -> Division:
    """The division that the plan of a model says. model: as transformers makes it, on any
    device."""
    prefix, kind = f"{model.base_model_prefix}.", type(model).__name__
    plan = {
        _pattern(name): form
        for name, form in (model.config.base_model_tp_plan or {}).items()
        if form not in _WITHOUT_EFFECT or form in (_GATHERED, _SPLIT, "packed_colwise")
    }
    kinds, parameters, experts = dict[str, Kind](), set[str](), set[str]()
    # Two maps that have one another's halves or heads, by the module that has both.
    gathered, taking = dict[str, str](), dict[str, str]()
    names = dict(model.named_modules())
    for name in (*names, *(name for name, _ in model.named_parameters())):
        form = _form(plan, name.removeprefix(prefix))
        if form is None:
            continue
        module, parent = names.get(name), name.rpartition(".")[0]
        if form == "packed_colwise":
            experts.add(parent)
        elif form == "colwise" and module is None:
            parameters.add(name)
        elif form == "colwise":
            kinds[name] = Kind.OUTPUTS
        elif form == "rowwise" and module is not None:
            kinds[name] = Kind.INPUTS
        elif form == _GATHERED:
            gathered[parent] = name
        elif form == _SPLIT:
            taking[parent] = name
        elif form != "rowwise":
            return replace(WHOLE, why_not=f"the plan of {kind} has a form {form!r}")
    for parent in gathered.keys() & taking.keys():  # either of both may come first
        first, second = gathered[parent], taking[parent]
        packed = _packed_kind(names[first], names[second], _spec_of(found, parent))
        if packed is not None:
            kinds |= {first: packed, second: Kind.INPUTS}
    if not kinds and not experts:
        return replace(WHOLE, why_not=f"transformers has no plan to divide {kind} over ranks")
    if not all(has_plain_experts(names[name]) for name in experts):
        return replace(WHOLE, why_not=f"minisgl does not divide the experts of {kind}")
    return Division(kinds, frozenset(parameters), frozenset(experts))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _form(plan: Mapping[re.Pattern[str], str], name: str) -> str | None:
    return next((form for pattern, form in plan.items() if pattern.fullmatch(name)), None)


def _spec_of(found: Discovered, module: str) -> AttentionSpec | None:
    return found.attention[found.modules.index(module)] if module in found.modules else None


def _packed_kind(first: Any, second: Any, spec: AttentionSpec | None) -> Kind | None:
    """How a map whose outputs lie side by side is split, if what follows takes one of them."""
    if spec is None:
        return Kind.HALVES if first.out_features == 2 * second.in_features else None
    num_heads = spec.num_heads + 2 * spec.num_kv_heads
    return Kind.HEADS if first.out_features == num_heads * spec.head_dim else None
