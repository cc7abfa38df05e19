"""Finds out what norms and routers compute, by trying them on random rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.kernels.elementwise.reference import rms_norm
from minisgl.kernels.moe.reference import Clamped, Routing, activated, topk_softmax

_NUM_ROWS = 7
_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True, slots=True)
class Known:
    """The classes of modules that minisgl has kernels for, by their names."""

    norms: dict[str, bool] = field(default_factory=dict)  # RMS norms: whether they add 1 to weights
    routers: dict[str, bool] = field(default_factory=dict)  # of a softmax: whether they normalise


@torch.no_grad()
def recognised(model: nn.Module) -> Known:
    """model: on the CPU, in float32, with random weights."""
    known = Known()
    for module in model.modules():
        kind = type(module).__name__
        if kind not in known.norms and (adds_one := _adds_one(module)) is not None:
            known.norms[kind] = adds_one
        if kind not in known.routers and (normalizes := _normalizes(module)) is not None:
            known.routers[kind] = normalizes
    return known


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What experts compute, and how a checkpoint has them: see FusedExperts."""

    transposed: bool = False  # of a matrix the inputs come before the outputs
    bias: bool = False
    clamped: Clamped | None = None  # None: silu(gate) · up
    interleaved: bool = False


PLAIN = ExpertKind()
# Whether matrices are transposed, there are biases, and gates come first, not in turn with ups.
_LAYOUTS = ((False, False, True), (True, False, True), (True, True, False))


def expert_kind(module: Any) -> ExpertKind | None:
    """Of a module of experts that minisgl's kernels compute: silu(gate) · up without biases, gates
    first, or those of gpt-oss."""
    # Not every release has each of them.
    has_gate, has_norm, transposed, bias = (
        getattr(module, name, False)
        for name in ("has_gate", "has_post_expert_norm", "is_transposed", "has_bias")
    )
    if not has_gate or has_norm or (transposed, bias, module.is_concatenated) not in _LAYOUTS:
        return None
    kind, gates = ExpertKind(transposed), torch.linspace(-9, 9, 24, device="cpu").view(2, 12)
    if bias:
        limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
        if not isinstance(limit, int | float) or not isinstance(alpha, int | float):
            return None
        kind, gates = ExpertKind(True, True, Clamped(limit, alpha), True), gates * (limit / 5)
    in_turn = gates.view(2, 2, 6).mT.flatten(1) if kind.interleaved else gates
    return kind if _is_close(module._apply_gate(in_turn), activated(gates, kind.clamped)) else None


def has_plain_experts(module: Any) -> bool:
    """Whether this is a module of experts as minisgl divides them over ranks."""
    return expert_kind(module) == PLAIN


def epsilon(module: nn.Module) -> float | None:
    """Of a module that may be a norm."""
    found = [getattr(module, name) for name in _EPSILON_NAMES if hasattr(module, name)]
    return found[0] if found and isinstance(found[0], float) else None


def _adds_one(module: nn.Module) -> bool | None:
    """Whether an RMS norm adds 1 to its weights; None if it is none."""
    weights, eps = dict(module.named_parameters()), epsilon(module)
    if weights.keys() != {"weight"} or weights["weight"].dim() != 1 or eps is None:
        return None
    # So small that eps matters.
    x = torch.randn(1, _NUM_ROWS, len(weights["weight"])) * eps**0.5
    found = _tried(module, x)
    for adds_one in (False, True):
        if _is_close(found, rms_norm(x, weights["weight"] + adds_one, eps)):
            return adds_one
    return None


def _normalizes(module: nn.Module) -> bool | None:
    """Whether a router by a softmax makes the weights of a row add up to 1; None if it is none."""
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if weights.keys() != {"weight"} or weights["weight"].dim() != 2 or buffers:
        return None
    x = torch.randn(_NUM_ROWS, weights["weight"].shape[1])
    found = _tried(module, x)
    if not isinstance(found, tuple) or len(found) != 3:
        return None
    logits = F.linear(x, weights["weight"])
    for normalizes in (False, True):
        chosen, shares = topk_softmax(logits, Routing(found[2].shape[-1], normalizes))
        if torch.equal(found[2], chosen.long()) and _is_close(found[1], shares):
            return normalizes
    return None


def _tried(module: nn.Module, x: Tensor) -> Any:
    try:
        return module(x)
    except Exception:  # it wants something else
        return None


def _is_close(found: Any, wanted: Tensor) -> bool:
    return (
        isinstance(found, Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    )
