"""What the device knows about each slot, and the inputs of a step made from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

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


@dataclass(frozen=True, slots=True)
class _Sent:
    """A plan on the device: int64 all, [n] each."""

    decode_slots: Tensor
    grant_slots: Tensor
    grant_columns: Tensor
    grant_pages: Tensor
    chunk_slots: Tensor
    chunk_ends: Tensor
    token_ids: Tensor  # of the chunks, one behind the other, and so the next two
    positions: Tensor
    token_slots: Tensor
    sampling_slots: Tensor  # of the chunks that sample
    sampling_rows: Tensor  # their last rows, among all rows of the step


def _pack(plan: StepPlan, *, with_decodes: bool) -> list[list[int]]:
    """The parts of `_Sent`, in its order."""
    grants = [
        (grant.slot, column, page)
        for grant in plan.grants
        for column, page in enumerate(grant.pages, grant.index)
    ]
    sampling: list[tuple[int, int]] = []
    num_rows = len(plan.decode_slots)
    for chunk in plan.chunks:
        num_rows += len(chunk.token_ids)
        if chunk.samples:
            sampling.append((chunk.slot, num_rows - 1))
    return [
        list(plan.decode_slots) if with_decodes else [],
        [slot for slot, _, _ in grants],
        [column for _, column, _ in grants],
        [page for _, _, page in grants],
        [chunk.slot for chunk in plan.chunks],
        [chunk.end for chunk in plan.chunks],
        [token_id for chunk in plan.chunks for token_id in chunk.token_ids],
        [position for chunk in plan.chunks for position in range(chunk.start, chunk.end)],
        [chunk.slot for chunk in plan.chunks for _ in chunk.token_ids],
        [slot for slot, _ in sampling],
        [row for _, row in sampling],
    ]


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
        sent = self._send(plan)
        if plan.grants:
            granted = (sent.grant_slots, sent.grant_columns)
            self._page_table.index_put_(granted, sent.grant_pages.to(torch.int32))
        decode_positions = self._lengths[sent.decode_slots]
        positions = torch.cat((decode_positions, sent.positions))
        token_ids = torch.cat((self._last_tokens[sent.decode_slots], sent.token_ids))
        slots = torch.cat((sent.decode_slots, sent.token_slots))
        self._lengths.index_copy_(0, sent.decode_slots, decode_positions + 1)
        if plan.chunks:
            self._lengths.index_copy_(0, sent.chunk_slots, sent.chunk_ends)

        row_pages = self._page_table[slots, positions // self._page_size].to(torch.int64)
        decode_width = self._num_pages(plan.longest_decode)
        chunk_width = self._num_pages(max((chunk.end for chunk in plan.chunks), default=0))
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            kv_index=row_pages * self._page_size + positions % self._page_size,
            decodes=DecodeRows(
                page_table=self._page_table[sent.decode_slots, :decode_width],
                lengths=(decode_positions + 1).to(torch.int32),
                longest=plan.longest_decode,
            ),
            chunks=ChunkRows(
                page_table=self._page_table[sent.chunk_slots, :chunk_width],
                starts=tuple(chunk.start for chunk in plan.chunks),
                lengths=tuple(len(chunk.token_ids) for chunk in plan.chunks),
            ),
        )
        if not plan.chunks:
            return inputs, SampleRows(None, sent.decode_slots, plan.decode_slots, decode_positions)
        decode_rows = torch.arange(len(plan.decode_slots), device=positions.device)
        rows = torch.cat((decode_rows, sent.sampling_rows))
        sampling_chunks = tuple(chunk.slot for chunk in plan.chunks if chunk.samples)
        return inputs, SampleRows(
            rows=rows,
            slots=torch.cat((sent.decode_slots, sent.sampling_slots)),
            slots_host=plan.decode_slots + sampling_chunks,
            positions=positions[rows],
        )

    def _send(self, plan: StepPlan) -> _Sent:
        """What of the plan the device does not know yet; nothing in a steady step of decode."""
        new_decodes = plan.decode_slots is not self._decode_slots_host
        if new_decodes or plan.grants or plan.chunks:
            decode_slots, *rest = self._lanes.upload(_pack(plan, with_decodes=new_decodes))
            if new_decodes:
                self._decode_slots_host, self._decode_slots = plan.decode_slots, decode_slots
            return _Sent(self._decode_slots, *rest)
        nothing = self._decode_slots[:0]
        return _Sent(self._decode_slots, *[nothing] * (len(fields(_Sent)) - 1))

    def feed(self, samples: SampleRows, token_ids: Tensor) -> None:
        """Make the sampled tokens the inputs of the next step. Runs on the compute lane."""
        self._last_tokens.index_copy_(0, samples.slots, token_ids)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
