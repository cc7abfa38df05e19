"""Finds out what an architecture of transformers computes, by running it without numbers."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minisgl.config import AttentionSpec, ExpertFacts
from minisgl.errors import UnsupportedModelError, in_one_line
from minisgl.models.adopted.attend import ATTENTION, WITH_MASKS, Recorder, register, take_seats

_NUM_ROWS = 3  # of the run; an odd number, which is the size of nothing else


@dataclass(frozen=True, slots=True)
class Discovered:
    """What the layers of a model attend to, and how large its parts are."""

    attention: tuple[AttentionSpec, ...]  # one a layer
    sources: tuple[int, ...]  # of each layer, the one whose KV it reads: itself, or an earlier one
    modules: tuple[str, ...]  # the name of the module that attends in each layer
    kinds: tuple[object, ...]  # of each layer; equal where two layers compute alike
    num_weights: int  # in the matrices of all layers, but those of experts
    num_head_weights: int
    experts: ExpertFacts | None
    has_position_table: bool  # positions are rows of a table, which has no more than they
    # The linear maps that are called once a step, by their names; maps of the same rows together.
    linear_maps: tuple[tuple[str, ...], ...]
    map_sizes: tuple[tuple[int, int], ...]  # outputs and inputs of those of the layers
    expert_sizes: tuple[tuple[int, int], ...]  # the same of the maps of one expert
    layers: tuple[str, ...]  # the names of the layers
    layer_outputs: int  # 0: a layer returns the rows; else the number of things that it returns


def discover(architecture: type[Any], config: Any) -> Discovered:
    """Run a model of a class of transformers on meta tensors, at the sizes of `config`.

    What runs there takes no decision that depends on a number, and so can be captured. Raises
    UnsupportedModelError with the reason if it cannot run, or asks for what minisgl has not.
    """
    register()
    try:
        num_layers = config.num_hidden_layers
        model, recorder, calls = _run(architecture, config, ATTENTION)
        has_window = any(spec.window for spec in recorder.specs)
        if getattr(config, "sliding_window", None) and not has_window:
            model, recorder, calls = _run(architecture, config, WITH_MASKS)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever the code of some architecture raises
        reason = _reason(error, config)
        raise UnsupportedModelError(
            f"{architecture.__name__} does not run on rows of several requests: {reason}."
        ) from error
    if len(recorder.modules) != num_layers:
        raise UnsupportedModelError(
            f"{architecture.__name__} cannot run with transformers' code: of its {num_layers} "
            f"layers, {len(recorder.modules)} have an attention that another implementation can "
            "compute; the others keep a state, or attend in a way of their own."
        )
    return _described(model, recorder, calls, config)


def _run(architecture: type[Any], config: Any, attention: str) -> tuple[Any, Recorder, _Calls]:
    """Make a model on meta tensors, and run it. attention: the name of its function."""
    recorder = Recorder()
    with torch.device("meta"), torch.no_grad():
        model = architecture._from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # which takes any sizes
        take_seats(model, recorder)
        calls = _Calls(model)
        rows = inputs(torch.zeros(_NUM_ROWS, dtype=torch.int64), torch.arange(_NUM_ROWS))
        if attention == WITH_MASKS:  # which else are made by the numbers of the positions
            rows["attention_mask"] = torch.ones(1, _NUM_ROWS, dtype=torch.int64)
        model(**rows)
        calls.end()
    return model, recorder, calls


def _reason(error: Exception, config: Any) -> str:
    """Why the code of an architecture did not run."""
    if isinstance(error, KeyError) and error.args == (ATTENTION,):
        return "its attention has implementations of its own, and takes no other"
    message = str(error).strip().partition("\n")[0].rstrip(".")
    if "meta" in message:
        return "what it computes depends on numbers that it reads on the host"
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if lacking := [n for n, value in vars(config).items() if value is None and f".{n}" in line]:
        return f"its code computes with {', '.join(lacking)}, which config.json lacks"
    return f"its code stops with {in_one_line(error)}"


def inputs(token_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """The arguments of a forward pass over the rows of one step, [num_rows] each."""
    return {
        "input_ids": token_ids.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "use_cache": False,
    }


class _Calls:
    """The calls of a model's modules, in their order."""

    def __init__(self, model: nn.Module) -> None:
        self.linear: list[tuple[str, torch.Tensor]] = []  # of linear maps, with what they multiply
        self.outputs: dict[nn.Module, Any] = {}  # of modules in lists
        self._handles = []
        for name, module in model.named_modules():
            if type(module) is nn.Linear:
                self._handles.append(module.register_forward_pre_hook(self._note_input(name)))
            elif name.rpartition(".")[2].isdecimal():
                self._handles.append(module.register_forward_hook(self._note_output))

    def _note_input(self, name: str) -> Any:
        return lambda module, args: self.linear.append((name, args[0]))

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[module] = output

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _linear_maps(calls: _Calls) -> tuple[tuple[str, ...], ...]:
    """The maps that are called once, those of one module and the same rows together: up to three,
    queries, keys and values. What is called like gates comes first."""
    counts = Counter(name for name, _ in calls.linear)
    groups: list[tuple[torch.Tensor, list[str]]] = []
    for name, rows in calls.linear:
        if counts[name] > 1:
            continue
        if groups:
            same, names = groups[-1]
            if rows is same and len(names) < 3 and _parent(names[0]) == _parent(name):
                names.append(name)
                continue
        groups.append((rows, [name]))
    return tuple(
        tuple(sorted(names, key=lambda name: "gate" not in name) if len(names) == 2 else names)
        for _, names in groups
    )


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _described(model: nn.Module, recorder: Recorder, calls: _Calls, config: Any) -> Discovered:
    names = {module: name for name, module in model.named_modules()}
    modules = tuple(names[module] for module in recorder.modules)
    layers = _layer_names(modules)
    in_layers = {
        name: weight
        for name, weight in model.named_parameters()
        if name.startswith(layers) and weight.dim() > 1
    }
    stacks = [(name, weight) for name, weight in in_layers.items() if weight.dim() == 3]
    maps = _linear_maps(calls)
    output = calls.outputs.get(model.get_submodule(layers[0].removesuffix(".")))
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    kinds: list[object] = []
    for layer, spec, source in zip(layers, recorder.specs, recorder.sources, strict=True):
        parts = model.get_submodule(layer.removesuffix("."))
        kinds.append(
            (
                spec,
                source == len(kinds),
                tuple((name, type(part).__name__) for name, part in parts.named_modules()),
                tuple((name, tuple(weight.shape)) for name, weight in parts.named_parameters()),
            )
        )
    return Discovered(
        attention=tuple(recorder.specs),
        sources=tuple(recorder.sources),
        modules=modules,
        kinds=tuple(kinds),
        num_weights=sum(weight.numel() for weight in in_layers.values() if weight.dim() == 2),
        num_head_weights=head.weight.numel(),
        experts=_experts(layers, stacks, config),
        expert_sizes=tuple(
            (weight.shape[1], weight.shape[2])
            for name, weight in stacks
            if stacks and _parent(name) == _parent(stacks[0][0])
        ),
        has_position_table=any(
            isinstance(module, nn.Embedding)
            and module is not embedding
            and not name.startswith(layers)
            and module.num_embeddings != embedding.num_embeddings
            for name, module in model.named_modules()
        ),
        linear_maps=maps,
        map_sizes=tuple(
            (weight.shape[0], weight.shape[1])
            for names in maps
            if names[0].startswith(layers)
            for weight in (in_layers[f"{name}.weight"] for name in names)
        ),
        layers=tuple(layer.removesuffix(".") for layer in layers),
        layer_outputs=len(output) if isinstance(output, tuple) else 0,
    )


def _experts(
    layers: tuple[str, ...], stacks: list[tuple[str, nn.Parameter]], config: Any
) -> ExpertFacts | None:
    """stacks: the matrices of all experts of a layer, one parameter each."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    chosen = [
        getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)
    ]
    if not stacks or not chosen:
        return None
    sparse = {layer for layer in layers for name, _ in stacks if name.startswith(layer)}
    num_experts = stacks[0][1].shape[0]
    return ExpertFacts(
        num_layers=len(sparse),
        num_experts=num_experts,
        num_chosen=chosen[0],
        num_weights=sum(weight.numel() for _, weight in stacks) // (len(sparse) * num_experts),
        size=0,  # follows from what the ranks divide
    )


def _layer_names(modules: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the layers in which these modules are, up to the number and a dot."""
    layers = []
    for name in modules:
        parts = name.split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
        layers.append(".".join(parts[: numbers[0] + 1]) + "." if numbers else name + ".")
    if len(set(layers)) < len(layers):
        raise UnsupportedModelError("A layer has several attention modules.")
    return tuple(layers)


def num_layers_of_each_kind(found: Discovered, at_most: int) -> int:
    """The number of first layers among which is one of each kind; two, if there are, and `at_most`
    at most."""
    first = [found.kinds.index(kind) for kind in set(found.kinds)]
    return min(at_most, len(found.kinds), max(2, max(first) + 1))
