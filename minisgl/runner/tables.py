"""What the device knows about each slot, and the inputs of a step made from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import ChunkRows, DecodeRows, StepInputs
from minisgl.runner.lanes import Lanes
from minisgl.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step whose logits are sampled, in the order of StepPlan."""

    rows: Tensor | None  # [num_samples] int64 among the step's rows; None: they are all its rows
    slots: Tensor  # [num_samples] int64
    slots_host: tuple[int, ...]
    positions: Tensor  # [num_samples] int64: of the row's token; the sampled one comes behind it


class SlotTables:
    """Device tables indexed by slot. They change on the compute lane only, in launch order.

    A slot's length and last token are the device's own knowledge: in steady decode the host sends
    nothing, because the decode rows are those of the last step.
    """

    def __init__(self, *, num_slots: int, max_pages: int, page_size: int, lanes: Lanes) -> None:
        self._page_size = page_size
        self._lanes = lanes
        device = lanes.device
        self._page_table = torch.zeros((num_slots, max_pages), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._decode_slots_host: tuple[int, ...] = ()
        self._decode_slots = torch.empty(0, dtype=torch.int64, device=device)

    def prepare(self, plan: StepPlan) -> tuple[StepInputs, SampleRows]:
        """Apply the plan's page grants and build its inputs. Runs on the compute lane."""
        new_rows = plan.decode_slots is not self._decode_slots_host
        grants = [
            (grant.slot, column, page)
            for grant in plan.grants
            for column, page in enumerate(grant.pages, grant.index)
        ]
        num_decodes = len(plan.decode_slots)
        ends = [num_decodes]
        for chunk in plan.chunks:
            ends.append(ends[-1] + len(chunk.token_ids))
        sampling = [
            (c.slot, end - 1) for c, end in zip(plan.chunks, ends[1:], strict=True) if c.samples
        ]

        parts: list[list[int]] = [
            list(plan.decode_slots) if new_rows else [],
            [grant[0] for grant in grants],
            [grant[1] for grant in grants],
            [grant[2] for grant in grants],
            [chunk.slot for chunk in plan.chunks],
            [chunk.end for chunk in plan.chunks],
            [token_id for chunk in plan.chunks for token_id in chunk.token_ids],
            [position for chunk in plan.chunks for position in range(chunk.start, chunk.end)],
            [chunk.slot for chunk in plan.chunks for _ in chunk.token_ids],
            [slot for slot, _ in sampling],
            [row for _, row in sampling],
        ]
        if new_rows or grants or plan.chunks:
            uploaded = self._lanes.upload(parts)
        else:
            uploaded = (self._decode_slots[:0],) * len(parts)
        decode_slots, grant_slots, columns, pages, chunk_slots, chunk_ends = uploaded[:6]
        chunk_tokens, chunk_positions, token_slots, sampling_slots, sampling_rows = uploaded[6:]

        if new_rows:
            self._decode_slots_host, self._decode_slots = plan.decode_slots, decode_slots
        decode_slots = self._decode_slots
        if grants:
            self._page_table.index_put_((grant_slots, columns), pages.to(torch.int32))

        decode_positions = self._lengths[decode_slots]
        positions = torch.cat((decode_positions, chunk_positions))
        token_ids = torch.cat((self._last_tokens[decode_slots], chunk_tokens))
        slots = torch.cat((decode_slots, token_slots))
        self._lengths.index_copy_(0, decode_slots, decode_positions + 1)
        self._lengths.index_copy_(0, chunk_slots, chunk_ends)

        row_pages = self._page_table[slots, positions // self._page_size].to(torch.int64)
        width = self._num_pages(plan.longest_decode)
        chunk_width = self._num_pages(max((chunk.end for chunk in plan.chunks), default=0))
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            kv_index=row_pages * self._page_size + positions % self._page_size,
            decodes=DecodeRows(
                page_table=self._page_table[decode_slots, :width],
                lengths=(decode_positions + 1).to(torch.int32),
                longest=plan.longest_decode,
            ),
            chunks=ChunkRows(
                page_table=self._page_table[chunk_slots, :chunk_width],
                starts=tuple(chunk.start for chunk in plan.chunks),
                lengths=tuple(len(chunk.token_ids) for chunk in plan.chunks),
            ),
        )
        if not plan.chunks:
            return inputs, SampleRows(None, decode_slots, plan.decode_slots, decode_positions)
        rows = torch.cat((torch.arange(num_decodes, device=positions.device), sampling_rows))
        return inputs, SampleRows(
            rows=rows,
            slots=torch.cat((decode_slots, sampling_slots)),
            slots_host=plan.decode_slots + tuple(slot for slot, _ in sampling),
            positions=positions[rows],
        )

    def feed(self, samples: SampleRows, token_ids: Tensor) -> None:
        """Make the sampled tokens the inputs of the next step. Runs on the compute lane."""
        self._last_tokens.index_copy_(0, samples.slots, token_ids)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
