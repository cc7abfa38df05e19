"""The state of slots on the device, the rows that a step makes of it, and the ring of its
results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of each slot on the device. The last slot is scratch, for padded rows: its length
    stays 0, and its pages are page 0."""

    page_table: Tensor  # [num_slots + 1, max_pages] int32
    lengths: Tensor  # [num_slots + 1] int32: tokens whose KV is written
    last_tokens: Tensor  # [num_slots + 1] int32: sampled, with no KV yet
    # [num_slots + 1, max_run - 1] int32: a guess of the tokens after the last; from a -1 on, none
    drafts: Tensor
    takes_drafts: Tensor  # [num_slots + 1] int32: 1 if the slot's runs may have several tokens
    prompt_lengths: Tensor  # [num_slots + 1] int64, of any stride
    page_size: int
    # [num_slots + 1, max_pages] int32: of windowed layers, if these have pages of their own, with
    # the widest window. What is before that of a slot's last token is undefined.
    window_table: Tensor | None = None
    window: int = 0

    @property
    def scratch_slot(self) -> int:
        return self.page_table.shape[0] - 1


class WindowRows(NamedTuple):
    """What a batch reads and writes in the pages of windowed layers."""

    slot_mapping: Tensor  # [num_rows] int64: the KV slot of each row
    page_table: Tensor  # [num_rows, max_pages] int32; columns outside a row's window are undefined


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a batch, a run for each slot. Rows of the scratch slot have position and length
    0."""

    numbers: Tensor  # [5, num_rows] int64, see below
    lengths: Tensor  # [num_rows] int32: tokens attended to, the row's own included
    page_table: Tensor  # [num_rows, max_pages] int32; columns past a row's length are undefined
    windows: WindowRows | None = None  # if windowed layers have pages of their own

    @staticmethod
    def allocate(num_rows: int, max_pages: int, device: torch.device, window: int = 0) -> SlotRows:
        """window: keys that a windowed layer sees; 0: there is none."""
        numbers = torch.zeros((5, num_rows), dtype=torch.int64, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        page_table = torch.zeros((num_rows, max_pages), dtype=torch.int32, device=device)
        windows: WindowRows | None = None
        if window:
            windows = WindowRows(torch.zeros_like(numbers[0]), torch.zeros_like(page_table))
        return SlotRows(numbers, lengths, page_table, windows)

    @property
    def slots(self) -> Tensor:
        return self.numbers[0]

    @property
    def token_ids(self) -> Tensor:
        return self.numbers[1]

    @property
    def positions(self) -> Tensor:
        return self.numbers[2]

    @property
    def slot_mapping(self) -> Tensor:
        """The KV slot of each row."""
        return self.numbers[3]

    @property
    def output_index(self) -> Tensor:
        """That of the token that the row samples."""
        return self.numbers[4]

    def part(self, rows: slice, width: int | None = None) -> SlotRows:
        """A view of some rows, and of the first `width` columns of their page tables."""
        windows = self.windows
        if windows is not None:
            mapping, table = windows
            windows = WindowRows(mapping[rows], table[rows, :width])
        return SlotRows(
            numbers=self.numbers[:, rows],
            lengths=self.lengths[rows],
            page_table=self.page_table[rows, :width],
            windows=windows,
        )


@dataclass(frozen=True, slots=True)
class OutputRing:
    """A ring buffer in host memory; the device writes one entry per step.

    Pinned and mapped if the device is a GPU, whose kernels write to it directly.
    """

    token_ids: Tensor  # [ring, rows] int32
    logprob: Tensor  # [ring, rows] float32: see TokenScores
    rank: Tensor  # [ring, rows] int32
    top_ids: Tensor  # [ring, rows, num_top] int32
    top_logprobs: Tensor  # [ring, rows, num_top] float32
    run_lengths: Tensor  # [ring, rows] int32: of the runs; undefined if all have one token
    num_drafted: Tensor  # [ring, rows] int32: drafts of the runs; undefined as well
    next_entry: Tensor  # [1] int32, on the device: the index of the next step's entry

    @staticmethod
    def allocate(size: int, num_rows: int, num_top: int, device: torch.device) -> OutputRing:
        pinned = device.type == "cuda"

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((size, *shape), dtype=dtype, pin_memory=pinned)

        return OutputRing(
            token_ids=zeros(num_rows, dtype=torch.int32),
            logprob=zeros(num_rows, dtype=torch.float32),
            rank=zeros(num_rows, dtype=torch.int32),
            top_ids=zeros(num_rows, num_top, dtype=torch.int32),
            top_logprobs=zeros(num_rows, num_top, dtype=torch.float32),
            run_lengths=zeros(num_rows, dtype=torch.int32),
            num_drafted=zeros(num_rows, dtype=torch.int32),
            next_entry=torch.zeros(1, dtype=torch.int32, device=device),
        )


def slot_mapping_of(page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """The KV slots of `positions` [n] int64 of the requests in `slots` [n] int64: [n] int64."""
    pages = page_table[slots, positions // page_size].to(torch.int64)
    return pages * page_size + positions % page_size
