"""Norm and rotation of the heads, which are left to minisgl's attention.

The code of a layer's attention norms queries and keys, and rotates them. minisgl's kernels do both
while they store the keys, or attend. So here both are only noted, and what attends is given
queries, keys and values as they are, with the notes.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.kernels.elementwise.reference import NormRope
from minisgl.models.adopted.modules import NormOf

ROTATE = "apply_rotary_pos_emb"


class DeferralError(RuntimeError):
    """What was left to the attention cannot be computed there."""


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Stands for the cos and the sin of the rows of a step."""

    table: Tensor  # of rotary_table

    def __getitem__(self, index: Any) -> Angles:
        """Those of all rows."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(part not in (slice(None), slice(0, None), Ellipsis) for part in parts):
            raise DeferralError("angles are taken apart")
        return self


class Heads:
    """What is to be done to the heads of the layer that runs."""

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self._still: dict[int, Tensor] = {}  # tables without a rotation, by the width of heads
        self._clear()

    def _clear(self) -> None:
        self._qkv: Tensor | None = None
        self._norms: dict[int, NormOf] = {}  # by the address of the first head
        self._rotated = set[int]()  # the same, of heads that are rotated
        self._angles: Angles | None = None

    def begin(self, qkv: Tensor) -> None:
        """Note the product [num_rows, columns] of a layer."""
        self._clear()
        self._qkv = qkv

    def defer_norm(self, heads: Tensor, norm: NormOf) -> bool:
        """Whether the norm of some heads, a view of the product, is left to the attention."""
        at, qkv = heads.data_ptr(), self._qkv
        if qkv is None or not 0 <= at - qkv.data_ptr() < qkv.stride(0) * qkv.itemsize:
            return False
        if at in self._rotated or at in self._norms:
            raise DeferralError("heads are normed after they were rotated, or twice")
        self._norms[at] = norm
        return True

    def rotate(self, *args: Any, **given: Any) -> Any:
        """Stands for the function that rotates heads: of queries, of keys or of both."""
        heads = [each for each in args if isinstance(each, Tensor)]
        angles = [each for each in (*args, *given.values()) if isinstance(each, Angles)]
        at = {each.data_ptr() for each in heads}
        if len(set(map(id, angles))) != 1 or self._angles not in (None, angles[0]):
            raise DeferralError("heads are rotated by other angles")
        if not self._rotated.isdisjoint(at):
            raise DeferralError("heads are rotated twice")
        self._rotated |= at
        self._angles = angles[0]
        return heads[0] if len(heads) == 1 else tuple(heads)

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, NormRope] | None:
        """Queries, keys and values side by side, and what is to be done to their heads; None if
        nothing was left. q, k, v: [1, heads, rows, width]."""
        qkv, norms, rotated, angles = self._qkv, self._norms, self._rotated, self._angles
        self._clear()
        at = (q.data_ptr(), k.data_ptr())
        if rotated not in (set(), set(at)) or norms.keys() not in (set(), set(at)):
            raise DeferralError("others than queries and keys are rotated or normed")
        if qkv is None or not _are_columns(qkv, (q, k, v)):
            if not norms and not rotated:
                return None
            if v.shape[3] != q.shape[3]:
                raise DeferralError("values have another width")
            qkv = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (q, k, v)], dim=1)
        table = self._without_rotation(q) if angles is None else angles.table
        if not norms:
            return qkv, NormRope(table)
        q_norm, k_norm = norms[at[0]], norms[at[1]]
        if q_norm.eps != k_norm.eps:
            raise DeferralError("queries and keys have different norms")
        q_weights, k_weights = q_norm.weights_for(q), k_norm.weights_for(k)
        return qkv, NormRope(table, q_weights.weight, k_weights.weight, q_norm.eps)

    def _without_rotation(self, q: Tensor) -> Tensor:
        width = q.shape[3]
        if width not in self._still:
            table = torch.zeros((self._max_seq_len, width), device=q.device)
            table[:, : width // 2] = 1
            self._still[width] = table
        return self._still[width]

    # -- what is changed in a model ----------------------------------------------------------------

    def take_over_rotation(self, attention: nn.Module) -> None:
        """Let the attention of a layer call `rotate`, in a copy of its code."""
        forward: Any = inspect.unwrap(type(attention).forward)
        if ROTATE not in forward.__code__.co_names:
            return
        copied = types.FunctionType(
            forward.__code__,
            {**forward.__globals__, ROTATE: self.rotate},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        attention.forward = types.MethodType(copied, attention)

    def take_over_angles(self, rope: nn.Module) -> None:
        """Let a module that computes cos and sin of positions return Angles."""
        computed, tables = rope.forward, dict[Any, Angles]()

        def angles(x: Any, position_ids: Any = None, *args: Any, **given: Any) -> Any:
            key = (*args, *sorted(given.items()))
            if key not in tables:
                positions = torch.arange(self._max_seq_len, device=x.device)[None]
                like = torch.zeros(1, device=x.device)
                tables[key] = Angles(_table(*computed(like, positions, *args, **given)))
            return tables[key], tables[key]

        rope.forward = angles


def _table(cos: Tensor, sin: Tensor) -> Tensor:
    """rotary_table of cos and sin of all positions, [1, max_seq_len, width]."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[..., :half], cos[..., half:]):
        cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat((cos[0], sin[0]), dim=-1).float().contiguous()


def _are_columns(qkv: Tensor, parts: tuple[Tensor, ...]) -> bool:
    """Whether the heads of `parts`, [1, heads, rows, width], are the columns of qkv in this
    order."""
    first = 0
    for part in parts:
        _, heads, rows, width = part.shape
        if width != parts[0].shape[3] or rows != len(qkv):
            return False
        if part.data_ptr() != qkv.data_ptr() + first * qkv.itemsize:
            return False
        for length, found, wanted in zip(
            part.shape[1:], part.stride()[1:], (width, qkv.stride(0), 1), strict=True
        ):
            if length > 1 and found != wanted:
                return False
        first += heads * width
    return first == qkv.shape[1]
