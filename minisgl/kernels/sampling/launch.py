"""Sampling inside a captured decode step: reference.py in Triton, for any mix of requests.

The host knows nothing of a step but the number of rows: what a row needs is read from the record of
its slot. A token is that of the torch reference on the same device, except where the comments say
that rounding may differ. Three ideas keep the cost near that of reading the logits once:

- A token's noise needs two logarithms, but only a large random word can win. So a tile bounds its
  scores from the words' float bits, and computes them only if the bound reaches the best so far
  (of n tiles, about ln n do). The bounds of a filtered row are kept for segments of 64 ids: if its
  draw is rejected, the next one is searched in the few segments with the largest bounds.
- Each filter keeps a prefix of one order: logit descending, then id ascending. So nothing is
  sorted. The winner among all tokens is the winner among the kept ones if it is kept itself, which
  the sum of the weights before it decides; otherwise the search continues among the tokens before
  it. A draw from all survives top_p with probability top_p or more.
- The first pass writes the maximum of every segment. The k likeliest tokens are in the k segments
  with the largest maxima (of equal maxima, those with lower ids), because each of these has a token
  that precedes every token of the other segments. So top_k rereads k segments instead of the row,
  and 20 top logprobs reread 20. A token's rank is counted in the segments whose maxima reach its
  logit, which are few.

Kernels of the plain variant: draw (draw.py), weigh and settle (filters.py). The full one has `edit`
before and `record` after them (scores.py).

The bytes of a row of V logits of b bytes: bV greedy or with temperature only (256 rows of 151,936
in bf16: 78 MB, 18 µs at 4.27 TB/s, which noise exceeds: about 27 instructions an id, compiled for
sm_90, are 36 µs of issue slots). Any filter: V/8 more, for maxima and bounds, written and read.
With top_k (alone or with the others) only 64bk on top, twice for k > 64, and noise for those ids
only. top_p without top_k: bV again, and for each rejected draw up to as much once more, read by one
program; min_p alone: a few segments if the draw is rejected. The full variant adds for a row with
edits or penalties bV + 5V read and 4V written, and reads 4V in place of bV; for one with logprobs
bV.

Every sum that decides is of integers and every other reduction is a maximum, and the logprobs are
summed in tiles of a fixed size: a row gets the same alone and in any batch, bit for bit.

A kernel is compiled once for a type of logits: nothing that depends on the number of rows is
specialised on, since a step that compiles takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.sampling.draw import draw_kernel
from minisgl.kernels.sampling.filters import LIST_IDS, LIST_SEGMENTS, settle_kernel, weigh_kernel
from minisgl.kernels.sampling.order import ids_of
from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.sampling.rows import SEGMENT
from minisgl.kernels.sampling.scores import edit_kernel, record_kernel
from minisgl.kernels.sampling.tables import SamplingTables
from minisgl.kernels.tuning import tuning_of

_TILE = 2048  # ids that a program works on at a time


_Rows = tuple[Tensor, Tensor, Tensor]  # logits, slots, output index


class SampleWorkspace:
    """Intermediate results of the kernels, for one stream.

    Calls with more than `num_rows` rows are split into blocks, which bounds the memory: about 60 KB
    a row for a vocabulary of 150,000, and 4 bytes an id more for the full variant.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_tiles = triton.cdiv(vocab_size, _TILE)
        self.num_segments = triton.cdiv(vocab_size, SEGMENT.value)
        self._device = device
        self.best = self._empty(self.num_tiles, dtype=torch.int64)
        self.peaks = self._empty(self.num_tiles, dtype=torch.float32)
        self.sums = self._empty(self.num_tiles, 2, dtype=torch.int64)
        self.segment_max = self._empty(self.num_segments, dtype=torch.float32)
        self.segment_bound = self._empty(self.num_segments, dtype=torch.float32)
        self.segment_list = self._empty(self.num_segments + LIST_SEGMENTS.value, dtype=torch.int32)
        self.gathered = self._empty(LIST_IDS.value, dtype=torch.int64)
        # Of the full variant
        self.edited: Tensor | None = None
        self.raw_max: Tensor | None = None
        self.tile_sums: Tensor | None = None

    def allocate_full(self) -> None:
        """Allocates what the full variant needs, at the first call."""
        if self.edited is None:
            self.edited = self._empty(self.vocab_size, dtype=torch.float32)
            self.raw_max = self._empty(self.num_segments, dtype=torch.float32)
            self.tile_sums = self._empty(self.num_tiles, 2, dtype=torch.float32)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((self.num_rows, *shape), dtype=dtype, device=self._device)


class TritonSampling:
    """Samples rows of the slots of `tables`. For one stream, which may be capturing.

    `logits` [rows, vocab] are float32, bfloat16 or float16, ids contiguous, and stay as they are;
    `slots` and `output_index` [rows] are as for `Sampler.sample`. Token ids are [rows] int64.
    With `masked`, rows whose records say so obey the masks of `tables`, and read only the logits of
    allowed tokens; without it masks are ignored. The kernels keep to the rule of launch_options.py.
    """

    def __init__(
        self,
        tables: SamplingTables,
        workspace: SampleWorkspace,
        *,
        num_top: int,
        processed: bool = False,
    ) -> None:
        """num_top: the most top logprobs of a row, up to 2 * LIST_SEGMENTS. processed: logprobs
        are of what is drawn from, in place of the raw logits."""
        self._tables = tables
        self._workspace = workspace
        self._num_top = min(num_top, workspace.vocab_size)
        self._processed = processed

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        *,
        top_p: bool = True,
        masked: bool = False,
    ) -> Tensor:
        """Samples with the plain variant: greedy, or with temperature, seed and common filters.
        Three kernels; without `top_p`, which no row may then use, two."""
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        for part in _blocks(logits, self._workspace):
            rows = logits[part], slots[part], output_index[part]
            self._draw(rows, None, token_ids[part], top_p=top_p, masked=masked)
        return token_ids

    def sample_part(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        *,
        first_id: int,
        masked: bool = False,
        all_reduce_max: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Samples rows without filters from one vocabulary shard, which starts at `first_id`.

        `all_reduce_max` takes order keys [rows, any] int64 of tokens of this shard, and returns the
        largest of each row over all shards: [rows].
        """
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        for part in _blocks(logits, self._workspace):
            rows = logits[part], slots[part], output_index[part]
            best = self._best(rows, None, first_id=first_id, masked=masked)
            token_ids[part] = ids_of(all_reduce_max(best))
        return token_ids

    def sample_full(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        *,
        top_p: bool = True,
        masked: bool = False,
    ) -> tuple[Tensor, TokenScores]:
        """Samples with the full variant: edits, penalties and rare filters, too, and counts the
        tokens into the history.

        Two kernels more. Of the scores, a row's logprob, rank and first num_logprobs top logprobs
        are written; those of rows that want none are undefined. Raises RuntimeError if it is
        captured before what it needs is allocated: the tables' history, and the workspace by the
        first call.
        """
        tables, workspace = self._tables, self._workspace
        complete = tables.prompt_seen is not None and workspace.edited is not None
        if not complete and logits.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("allocate the history and sample once before this is captured")
        workspace.allocate_full()
        num_rows = len(logits)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        scores = _empty_scores(num_rows, self._num_top, logits.device)
        for part in _blocks(logits, workspace):
            rows = logits[part], slots[part], output_index[part]
            self._edit(rows)
            self._draw(rows, workspace.edited, token_ids[part], top_p=top_p, masked=masked)
            self._record(rows, token_ids[part], scores, part, masked)
        return token_ids, scores

    def _best(
        self, rows: _Rows, edited: Tensor | None, *, first_id: int = 0, masked: bool
    ) -> Tensor:
        """[rows, any] int64: the order key of the best token before filters in each part of a row.
        A view of the workspace, written by the first pass."""
        (logits, slots, output_index), tables, workspace = rows, self._tables, self._workspace
        num_rows, vocab_size = logits.shape
        splits, tiles = _split(logits)
        draw_kernel[(splits, num_rows)](
            logits,
            logits if edited is None else edited,
            slots,
            output_index,
            tables.records,
            *_mask_table(tables, masked),
            workspace.best,
            workspace.peaks,
            workspace.segment_max,
            workspace.segment_bound,
            vocab_size,
            logits.stride(0),
            workspace.num_segments,
            workspace.num_tiles,
            tiles,
            first_id,
            full=edited is not None,
            processed=self._processed and edited is not None,
            quads_block=_TILE // 4,
            num_warps=4,
            maxnreg=128 if edited is None else 168,  # so that an SM holds four or three
            **_options(logits),
        )
        return workspace.best[:num_rows, :splits]

    def _draw(
        self, rows: _Rows, edited: Tensor | None, token_ids: Tensor, *, top_p: bool, masked: bool
    ) -> None:
        (logits, slots, output_index), tables, workspace = rows, self._tables, self._workspace
        num_rows, vocab_size = logits.shape
        splits, tiles = _split(logits)
        source = logits if edited is None else edited
        sizes = (vocab_size, logits.stride(0))
        padded_tiles = triton.next_power_of_2(workspace.num_tiles)
        options = {"full": edited is not None, **_options(logits)}
        self._best(rows, edited, masked=masked)
        if top_p:
            weigh_kernel[(splits, num_rows)](
                logits,
                source,
                slots,
                tables.records,
                *_mask_table(tables, masked),
                workspace.best,
                workspace.peaks,
                workspace.sums,
                *sizes,
                workspace.num_tiles,
                tiles,
                splits,
                quads_block=_TILE // 4,
                tiles_block=padded_tiles,
                num_warps=4,
                **options,
            )
        settle_kernel[(num_rows,)](
            logits,
            source,
            slots,
            output_index,
            tables.records,
            *_mask_table(tables, masked),
            workspace.best,
            workspace.peaks,
            workspace.segment_max,
            workspace.segment_bound,
            workspace.sums,
            workspace.segment_list,
            workspace.gathered,
            token_ids,
            *sizes,
            workspace.num_segments,
            workspace.num_tiles,
            splits,
            segments_block=triton.next_power_of_2(workspace.num_segments),
            tiles_block=padded_tiles,
            num_warps=8,
            maxnreg=128,  # with more an SM would hold one program only
            **options,
        )

    def _edit(self, rows: _Rows) -> None:
        (logits, slots, output_index), tables, workspace = rows, self._tables, self._workspace
        assert workspace.edited is not None, "allocate_full comes first"
        num_rows, vocab_size = logits.shape
        splits, tiles = _split(logits)
        edit_kernel[(splits, num_rows)](
            logits,
            workspace.edited,
            slots,
            output_index,
            tables.records,
            tables.edits,
            tables.prompt_seen,
            tables.output_counts,
            workspace.raw_max,
            workspace.tile_sums,
            vocab_size,
            logits.stride(0),
            tables.edits.stride(0),
            workspace.num_segments,
            workspace.num_tiles,
            tiles,
            quads_block=_TILE // 4,
            edits_block=128,
            num_warps=8,
            **_options(logits),
        )

    def _record(
        self, rows: _Rows, token_ids: Tensor, scores: TokenScores, part: slice, masked: bool
    ) -> None:
        (logits, slots, _), tables, workspace = rows, self._tables, self._workspace
        num_rows, vocab_size = logits.shape
        record_kernel[(num_rows,)](
            logits,
            workspace.edited,
            slots,
            tables.records,
            *_mask_table(tables, masked),
            token_ids,
            tables.output_counts,
            workspace.segment_max if self._processed else workspace.raw_max,
            workspace.tile_sums,
            workspace.segment_list,
            workspace.gathered,
            scores.logprob[part],
            scores.rank[part],
            scores.top_ids[part],
            scores.top_logprobs[part],
            vocab_size,
            logits.stride(0),
            workspace.num_segments,
            workspace.num_tiles,
            self._num_top,
            lists=triton.cdiv(max(self._num_top, 1), LIST_SEGMENTS.value),
            processed=self._processed,
            segments_block=triton.next_power_of_2(workspace.num_segments),
            tiles_block=triton.next_power_of_2(workspace.num_tiles),
            num_warps=8,
            **_options(logits),
        )


def _blocks(logits: Tensor, workspace: SampleWorkspace) -> list[slice]:
    """Slices of rows of about the same size, each of which fits the workspace."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size <= workspace.vocab_size
    count = max(triton.cdiv(num_rows, workspace.num_rows), 1)
    size = max(triton.cdiv(num_rows, count), 1)
    return [slice(first, first + size) for first in range(0, num_rows, size)]


def _empty_scores(num_rows: int, num_top: int, device: torch.device) -> TokenScores:
    shape = (num_rows, num_top)
    return TokenScores(
        logprob=torch.empty(num_rows, dtype=torch.float32, device=device),
        rank=torch.empty(num_rows, dtype=torch.int64, device=device),
        top_ids=torch.empty(shape, dtype=torch.int64, device=device),
        top_logprobs=torch.empty(shape, dtype=torch.float32, device=device),
    )


def _split(logits: Tensor) -> tuple[int, int]:
    """(programs a row, tiles a program): enough programs to fill the device, of enough work
    each."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    programs = tuning_of(logits.device).sampling_programs
    tiles = triton.cdiv(num_tiles * num_rows, programs)
    tiles = min(max(tiles, 1), num_tiles)
    return triton.cdiv(num_tiles, tiles), tiles


def _options(logits: Tensor) -> dict[str, Any]:
    """Launch options. Without fusion a product is rounded before a sum, as in torch."""
    return {"enable_fp_fusion": False, **pdl_options(logits.device, True)}


def _mask_table(tables: SamplingTables, masked: bool) -> tuple[Tensor | None, int | None]:
    """The masks and their stride for kernels that read them; without them others are compiled."""
    return (tables.masks, tables.masks.stride(0)) if masked else (None, None)
