"""Cases of bench_kernels.py: attention of one layer, by each backend that takes it.

Decode and chunks are captured, with the calls of several layers, whose caches together do not fit
into L2. Chunks have the padding of the runner's graphs. Prompts are timed without a graph. Bytes
and operations are those that the arithmetic needs: each key and value is read once, and masked
scores are left out. `latents`: query heads of GLM-4.7-Flash (20) or DeepSeek-V2-Lite (16), over one
key of 576 numbers, the first 512 of which are the value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from kernel_timer import COLD_BYTES, DEVICE, DTYPE, Call, Case, Problem, random
from torch import Tensor

from minisgl.attention.backends import make_attention
from minisgl.attention.base import (
    Attention,
    AttentionCall,
    AttentionShape,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.config import AttentionSpec
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.kernels.tuning import DecodeTiles, PrefillTiles, tuning_of
from minisgl.runner.graphs import CHUNK_ROWS, MAX_CHUNKS

BACKENDS = ("triton", "fi", "trtllm", "fa")
FP8 = torch.float8_e4m3fn
MOST_LAYERS = 64
TILES = (DecodeTiles, PrefillTiles)


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    kv_dtype: torch.dtype = DTYPE
    rank: int | None = None  # the first numbers of a key that are its value

    def __str__(self) -> str:
        kind = "fp8" if self.kv_dtype == FP8 else "bf16"
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim} {kind}"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            value_dim=self.rank,
            v_in_k=self.rank is not None,
        )

    def tiles(self, pairs: int | None = None) -> Any:
        """The tiles in use for prompts, or to decode `pairs` of a row and a KV head."""
        from minisgl.attention.triton_attention import decode_tiles, prefill_tiles

        v_in_k, tuning = self.rank is not None, tuning_of(DEVICE)
        if pairs is not None:
            return decode_tiles(pairs, self.head_dim, DTYPE.itemsize, tuning, v_in_k=v_in_k)
        fp8 = self.kv_dtype == FP8
        return prefill_tiles(self.head_dim, DTYPE.itemsize, tuning, fp8=fp8, v_in_k=v_in_k)


@dataclass(frozen=True, slots=True)
class Sequences:
    """`count` sequences with `length` new tokens behind `context` cached ones."""

    count: int
    length: int
    context: int
    heads: Heads
    page_size: int = 16

    @property
    def end(self) -> int:
        return self.context + self.length

    @property
    def kv_bytes(self) -> int:
        heads = self.heads
        stored = heads.head_dim * (2 if heads.rank is None else 1)
        return self.count * self.end * heads.num_kv_heads * stored * heads.kv_dtype.itemsize

    @property
    def operations(self) -> float:
        heads, pairs = self.heads, self.count * self.length * (self.context + (self.length + 1) / 2)
        return 2 * pairs * heads.num_heads * (heads.head_dim + (heads.rank or heads.head_dim))

    @property
    def num_layers(self) -> int:
        return min(max(-(-COLD_BYTES // self.kv_bytes), 2), MOST_LAYERS)

    def caches(self, num_layers: int) -> tuple[list[PagedKV], Tensor]:
        """Caches of as many layers, and the page table, whose pages are scattered."""
        pages_per_row = -(-self.end // self.page_size)
        num_pages = 1 + self.count * pages_per_row
        table = 1 + torch.randperm(num_pages - 1, device=DEVICE)
        heads = self.heads
        size = (num_pages, self.page_size, heads.num_kv_heads, heads.head_dim)

        def cache() -> PagedKV:
            k = random(*size).to(heads.kv_dtype)
            if heads.rank is not None:
                return PagedKV(k, k[..., : heads.rank], v_in_k=True)
            return PagedKV(k, random(*size).to(heads.kv_dtype))

        return [cache() for _ in range(num_layers)], table.view(self.count, pages_per_row).int()

    def queries(self, num_rows: int) -> Tensor:
        return random(num_rows, self.heads.num_heads, self.heads.head_dim)

    def problem(
        self,
        calls: Callable[[Attention], Sequence[Call]],
        ways: Mapping[str, Callable[[], Attention]],
        tiles: Callable[[], Any],
        **more: Any,
    ) -> Problem:
        """calls: by one of the `ways`, or by ours with some tiles; tiles: those in use."""
        return Problem(
            calls={name: partial(lambda make: calls(make()), make) for name, make in ways.items()},
            num_bytes=self.kv_bytes,
            operations=self.operations,
            rounds=25,
            tiles=tiles,
            tiled=lambda tiles: calls(triton(tiles)),
            **more,
        )

    def backends(self) -> dict[str, Callable[[], Attention]]:
        shape = AttentionShape(
            layers=frozenset((self.heads.spec,)),
            page_size=self.page_size,
            dtype=DTYPE,
            kv_dtype=self.heads.kv_dtype,
        )
        return {name: partial(make_attention, name, name, shape) for name in BACKENDS}


# -- problems --------------------------------------------------------------------------------------


def decode_problem(case: Sequences) -> Problem:
    layers, table = case.caches(case.num_layers)
    lengths = [case.end] * case.count
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rows, q = DecodeBatch(table, on_device, case.end, lengths), case.queries(case.count)
    empty = torch.empty((0, 1), dtype=torch.int32, device=DEVICE)

    def calls(attention: Attention) -> Sequence[Call]:
        prepare(attention, rows, PrefillBatch.of(empty, (), ()))
        decode, spec = attention.decode_backend.decode, case.heads.spec
        return [partial(decode, AttentionCall(q, layer, spec), rows) for layer in layers]

    tiles = partial(case.heads.tiles, case.count * case.heads.num_kv_heads)
    return case.problem(calls, case.backends(), tiles)


def prompt_problem(case: Sequences) -> Problem:
    [layer], table = case.caches(1)
    rows = PrefillBatch.of(table, (0,) * case.count, (case.length,) * case.count)
    q = case.queries(rows.num_rows)
    empty = torch.empty((0, 1), dtype=torch.int32, device=DEVICE)

    def calls(attention: Attention) -> Sequence[Call]:
        prepare(attention, DecodeBatch(empty, empty[:, 0], 0, ()), rows)
        call = AttentionCall(q, layer, case.heads.spec)
        return [partial(attention.prefill_backend.prefill, call, rows)]

    return case.problem(calls, case.backends(), case.heads.tiles, captured=False)


def chunk_problem(case: Sequences) -> Problem:
    """By Triton only: other backends read no chunks that only the device knows. `unsplit`: all
    keys of a tile in one program."""
    layers, table = case.caches(case.num_layers)
    num_rows = case.count * case.length
    captured = next((most for most in CHUNK_ROWS if num_rows <= most), None)
    padded, num_chunks = (captured, MAX_CHUNKS) if captured else (num_rows, case.count)
    known = PrefillBatch.of(table, (case.context,) * case.count, (case.length,) * case.count)
    more = num_chunks - case.count
    rows = replace(
        known,
        page_table=torch.cat((table, table.new_zeros(more, table.shape[1]))),
        row_starts=torch.cat((known.row_starts, known.row_starts[-1:].expand(more))),
        ends=torch.cat((known.ends, known.ends.new_zeros(more))),
        num_rows=padded,
        starts=(),
        lengths=(),
    )
    q = case.queries(padded)

    def calls(attention: Attention) -> Sequence[Call]:
        prefill, spec = attention.prefill_backend.prefill, case.heads.spec
        return [partial(prefill, AttentionCall(q, layer, spec), rows) for layer in layers]

    tiles = case.heads.tiles
    unsplit = replace(tiles(), programs_per_sm=0)
    ways = {"triton": triton, "unsplit": partial(triton, unsplit)}
    return case.problem(calls, ways, tiles, num_rows=num_rows)


def prepare(attention: Attention, decodes: DecodeBatch, chunks: PrefillBatch) -> None:
    """Let the backends plan, for which they need only the rows."""
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    slots = BatchSlots(nothing, Segments(nothing, nothing, nothing))
    rows = Rows.of(nothing, nothing)
    attention.prepare(ForwardBatch(nothing, rows, rows, nothing, decodes, chunks, slots))


def triton(tiles: DecodeTiles | PrefillTiles | None = None) -> Attention:
    from minisgl.attention.triton_attention import TritonAttention

    decode, prefill = (tiles if isinstance(tiles, kind) else None for kind in TILES)
    backend = TritonAttention(decode, prefill)
    return Attention(backend, backend)


# -- tables ----------------------------------------------------------------------------------------

Form = tuple[int, int, int]  # sequences, their new tokens and their cached ones
DECODES = [(256, 1, 799), (64, 1, 4095), (32, 1, 799), (8, 1, 799)]
DECODES += [(1, 1, 99), (1, 1, 799), (1, 1, 32767)]
CHUNKS = list(itertools.product((1, 2, 4), (16, 64, 128, 512), (2048, 8192, 32768)))
LATENT_DECODES = [*((n, 1, 1023) for n in (1, 8, 32, 128)), (64, 1, 8191), (8, 1, 8191)]
LATENT_DECODES += [(1, 1, 8191), (1, 1, 32767)]
LATENT_CHUNKS = list(itertools.product((1, 4), (16, 64, 512), (2048, 32768)))
LATENTS = [Heads(num_heads, 1, 576, rank=512) for num_heads in (20, 16)]
TABLES: dict[str, list[tuple[Form, Heads]]] = {
    "decode": [
        *((form, Heads(n, 8)) for form in DECODES for n in (16, 32, 40, 64)),
        ((64, 1, 8191), Heads(40, 8)),
    ],
    "prefill": [((8, 2048, 0), Heads(num_heads, 8)) for num_heads in (16, 32, 40)],
    "chunks": [(form, Heads(num_heads, 8)) for num_heads in (16, 40) for form in CHUNKS],
    "latent-decode": list(itertools.product(LATENT_DECODES, LATENTS)),
    "latent-prefill": list(itertools.product([(8, 2048, 0), (1, 8192, 0)], LATENTS)),
    "latent-chunks": list(itertools.product(LATENT_CHUNKS, LATENTS)),
}


def attention_case(form: Form, heads: Heads) -> Case:
    case = Sequences(*form, heads)
    name, make = f"{case.count} x {case.end}, {heads}", prompt_problem
    if case.length == 1:
        make = decode_problem
    elif case.context:
        name, make = f"{case.count} x {case.length} on {case.context}, {heads}", chunk_problem
    return Case(name, partial(make, case))


def attention_cases(table: str, _rows: Sequence[int] | None) -> Iterator[Case]:
    """Those of a table, with a cache of each dtype."""
    for form, heads in TABLES[table]:
        yield attention_case(form, heads)
        yield attention_case(form, replace(heads, kv_dtype=FP8))
