"""The order of a row's tokens: the larger logit first, of equal logits the lower id.

`topk` leaves open which of equal logits it returns, and half-precision models make many. So a
token has an order key: one int64, larger for what comes first, from which its logit and its id can
be read back. device_order.py has the same in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

ID_BITS = 24
ID_MASK = (1 << ID_BITS) - 1


def order_keys(logits: Tensor, first_id: int = 0) -> Tensor:
    """The keys of `logits` [rows, n] float32, whose ids begin at `first_id`: [rows, n] int64."""
    bits = (logits + 0.0).view(torch.int32).long()  # adding 0 makes -0 equal to 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats count downwards
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    return (ordered << ID_BITS) | (ids ^ ID_MASK)


def ids_of(keys: Tensor) -> Tensor:
    """The ids in order keys: int64, of the same shape."""
    return (keys & ID_MASK) ^ ID_MASK
