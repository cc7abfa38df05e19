"""The attention that transformers' modeling code calls in the models of this package.

The attention function of a model is chosen by a name in its config. Ours is registered once under
`ATTENTION`, and passes each call to the seat that `take_seats` has put into every module of the
model: a `Recorder` while the model is looked at, a `Seat` while it runs. Under `WITH_MASKS`
transformers makes masks as well, by a function that returns no numbers but the sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minisgl.attention.base import AttentionCall
from minisgl.attention.state import PagedKV
from minisgl.config import AttentionSpec
from minisgl.errors import UnsupportedModelError
from minisgl.kernels.elementwise.reference import store
from minisgl.kernels.rows import Rows
from minisgl.layers.step import Step
from minisgl.models.adopted.heads import DeferralError, Heads
from minisgl.models.adopted.rows import SEAT

ATTENTION, WITH_MASKS = "minisgl", "minisgl_with_masks"

# Arguments of a call that say nothing about what is attended to.
_WITHOUT_EFFECT = frozenset(
    """position_ids cache_position position_embeddings past_key_values past_key_value cache
    use_cache output_attentions output_hidden_states output_router_logits return_dict logits_to_keep
    layer_idx is_causal""".split()
)


class Attends(Protocol):
    """What answers the calls of a model's attention function."""

    def attend(self, module: nn.Module, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: [1, heads, rows, width]; returns [1, rows, heads, width of v]."""
        ...


@dataclass(frozen=True, slots=True)
class Windowed:
    """What stands for the mask of a sliding window."""

    size: int  # in tokens


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the attention function computes, apart from queries, keys and values."""

    spec: AttentionSpec
    sinks: Tensor | None  # [num_heads]

    @staticmethod
    def of(
        where: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Windowed | None,
        given: Mapping[str, Any],
    ) -> Call:
        """Raises UnsupportedModelError for an argument that is not understood."""
        others = dict(given)
        scale, window = others.pop("scaling", None), others.pop("sliding_window", None)
        softcap, sinks = others.pop("softcap", None), others.pop("s_aux", None)
        if isinstance(mask, Windowed):
            window = mask.size
        elif mask is not None:
            raise UnsupportedModelError(f"{where} attends with a mask of its own.")
        if others.pop("dropout", 0.0):
            raise UnsupportedModelError(f"{where} drops attention weights at random.")
        for name, value in others.items():
            if value is not None and name not in _WITHOUT_EFFECT:
                raise UnsupportedModelError(
                    f"{where} passes the argument {name}, which minisgl's attention does not know."
                )
        if given.get("is_causal") is False:
            raise UnsupportedModelError(f"{where} attends to later tokens, too.")
        return Call(
            AttentionSpec(
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=q.shape[3],
                value_dim=None if v.shape[3] == q.shape[3] else v.shape[3],
                scale=q.shape[3] ** -0.5 if scale is None else float(scale),
                window=window,
                softcap=softcap,
                sinks=sinks is not None,
            ),
            sinks,
        )


@dataclass
class Seat:
    """Attends over the paged KV cache. One for all modules of a model."""

    layers: Mapping[nn.Module, int]  # the module that attends in each layer, with its number
    specs: Mapping[int, AttentionSpec]  # of each layer
    sources: Mapping[int, int]  # of each layer, the one whose KV it reads
    heads: Heads  # what is left to the attention
    step: Step | None = None  # the one that runs
    rows: Rows | None = None  # of the module that runs

    def attend(self, module: nn.Module, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the rows' K and V into the layer's cache, unless it reads another layer's, and
        attend. Raises UnsupportedModelError if the call is another than at the start."""
        step, layer = self.step, self.layers[module]
        assert step is not None
        spec = self.specs[layer]
        # The window may be one of masks, which are not made here.
        if call.spec not in (spec, replace(spec, window=None)):
            raise UnsupportedModelError(f"The attention of layer {layer} changes between steps.")
        kv, is_own = step.kv(layer), self.sources[layer] == layer
        sinks = None if call.sinks is None else call.sinks.float()
        left = self.heads.take(q, k, v)
        if left is not None:
            if not is_own:
                raise DeferralError("the layer reads the keys of another")
            qkv, norm_rope = left
            asked = AttentionCall(qkv, kv, spec, sinks, norm_rope)
        else:
            if is_own:
                _store(k, v, kv, step.batch.of(kv).slot_mapping)
            asked = AttentionCall(q[0].transpose(0, 1).contiguous(), kv, spec, sinks)
        return step.attention(asked, step.batch).unsqueeze(0)


def _store(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    store(k[0].transpose(0, 1), slot_mapping, kv.k, kv.scales.k)
    store(v[0].transpose(0, 1), slot_mapping, kv.v, kv.scales.v)


def take_seats(model: nn.Module, seat: Attends) -> None:
    """Let `seat` answer the calls of all modules of the model."""
    for module in model.modules():
        module.__dict__[SEAT] = seat


def register() -> None:
    """Make the attention known to transformers, under its names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (ATTENTION, WITH_MASKS):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(WITH_MASKS, _mask)


def _mask(*, local_size: int | None = None, **given: Any) -> Windowed | None:
    """As transformers' mask functions. Chunks, which have a size, too, are found by the proof."""
    return None if local_size is None else Windowed(local_size)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Windowed | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    where = type(module).__name__
    call = Call.of(where, query, key, value, attention_mask, given)
    seat: Attends = module.__dict__[SEAT]
    return seat.attend(module, call, query, key, value), None


@dataclass
class Recorder:
    """Notes what each layer attends to. Attends to nothing: the results are right in their shapes
    only."""

    modules: list[nn.Module] = field(default_factory=list)  # one a layer, in the order of calls
    specs: list[AttentionSpec] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # the layer whose KV each reads
    _keys: list[Tensor] = field(default_factory=list)

    def attend(self, module: nn.Module, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Note the call. Raises UnsupportedModelError for a second one of the same module."""
        if any(module is other for other in self.modules):
            raise UnsupportedModelError(f"A {type(module).__name__} attends more than once a step.")
        same = [layer for layer, keys in enumerate(self._keys) if keys is k]
        self.sources.append(same[0] if same else len(self.modules))
        self.modules.append(module)
        self.specs.append(call.spec)
        self._keys.append(k)
        return torch.zeros((1, q.shape[2], q.shape[1], v.shape[3]), dtype=q.dtype, device=q.device)
