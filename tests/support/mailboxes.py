"""Mailboxes of several ranks in one process."""

from __future__ import annotations

import torch

from minisgl.kernels.comm.mailbox import Mailbox


def make_mailboxes(
    num_ranks: int, max_rows: int, size: int, itemsize: int, device: torch.device
) -> list[Mailbox]:
    """One mailbox per rank, before the first exchange, for elements of `itemsize` bytes."""
    word = torch.int32 if itemsize == 2 else torch.int64
    shape = (2, num_ranks, max_rows, size)
    inboxes = [torch.zeros(shape, dtype=word, device=device) for _ in range(num_ranks)]
    addresses = tuple(inbox.data_ptr() for inbox in inboxes)
    return [
        Mailbox(inbox, addresses, torch.zeros(max_rows, dtype=torch.int32, device=device), rank)
        for rank, inbox in enumerate(inboxes)
    ]
