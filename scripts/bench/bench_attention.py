"""Times attention backends on a GPU: `python scripts/bench/bench_attention.py triton fi trtllm`.

Decode: replays of a CUDA graph that attends once in each of several layers, whose caches together
do not fit into L2, as in a model. Prefill: 8 chunks of 2,048 tokens. Chunks: 1 to 4 chunks of 16 to
512 tokens on a context of 2k to 32k, as the turns of a chat, replayed like decode and with the
padding of the runner's graphs. Medians; bytes and operations are those that the arithmetic needs,
each key and value read once and masked scores left out. The share of a case of chunks is that of
what reading or arithmetic, whichever is longer, would take an H200 at its peak.

`--splits` says for Triton's chunks over how many programs the keys are split: one, or as many as it
chooses.

Each case is timed with the cache in the dtypes of `--kv-dtype`: bfloat16, and FP8 where a backend
reads it. `--latents` takes cases, and tiles to try, of attention over latents: 20 query heads of
GLM-4.7-Flash, or 16 of DeepSeek-V2-Lite, over one key of 576 numbers, of which 512 are the value.

`--tune` and `--tune-prefill` time the tiles that Triton may use for either phase, and
`--tune-splits` how it may split the keys of chunks. They say for each case which three are best,
and beside them the time of those that it uses now. Tiles are compiled first, by `--jobs` processes,
into Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from graph_timer import graph_s, median_s
from torch import Tensor

from minisgl.attention.backends import make_attention
from minisgl.attention.base import (
    Attention,
    AttentionShape,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.config import AttentionSpec
from minisgl.runner.graphs import CHUNK_ROWS, MAX_CHUNKS

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.attention.triton_attention import TritonAttention
    from minisgl.kernels.tuning import DecodeTiles, PrefillTiles

# Of an H200, by its data sheet.
BYTES_PER_S, FLOPS_PER_S = 4.8e12, 989e12
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# Much more than L2, so that each layer finds the cache as cold as it does between the weights.
ROTATED_BYTES = 512 << 20
REPLAYS, REPLAYS_IN_TUNING = 25, 7


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    kv_dtype: torch.dtype = DTYPE
    rank: int | None = None  # the first numbers of a key that are its value

    def __str__(self) -> str:
        kind = "bf16" if self.kv_dtype == DTYPE else "fp8"
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim} {kind}"

    @property
    def stored(self) -> int:
        """Numbers of a token in the cache, of each KV head."""
        return 2 * self.head_dim if self.rank is None else self.head_dim

    @property
    def multiplied(self) -> int:
        """Multiplications of a query with a key and its value."""
        return self.head_dim + (self.head_dim if self.rank is None else self.rank)


@dataclass(frozen=True)
class AttentionCase:
    num_rows: int
    context: int
    heads: Heads
    page_size: int

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.context}, {self.heads}, page {self.page_size}"

    @property
    def kv_bytes(self) -> int:
        heads = self.heads
        itemsize = heads.kv_dtype.itemsize
        return self.num_rows * self.context * heads.num_kv_heads * heads.stored * itemsize

    def with_kv(self, dtype: torch.dtype) -> AttentionCase:
        """The same with its cache in `dtype`."""
        return replace(self, heads=replace(self.heads, kv_dtype=dtype))

    @property
    def spec(self) -> AttentionSpec:
        heads = self.heads
        return AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            scale=heads.head_dim**-0.5,
            value_dim=heads.rank,
            v_in_k=heads.rank is not None,
        )

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            layers=frozenset((self.spec,)),
            page_size=self.page_size,
            dtype=DTYPE,
            kv_dtype=self.heads.kv_dtype,
        )


@dataclass(frozen=True)
class ChunkCase:
    """Chunks of `length` new tokens on `context` cached ones."""

    num_chunks: int
    length: int
    context: int
    heads: Heads
    page_size: int = 16

    def __str__(self) -> str:
        return f"{self.num_chunks} x {self.length} on {self.context}, {self.heads}"

    @property
    def cached(self) -> AttentionCase:
        """The sequences as decode would read them."""
        end = self.context + self.length
        return AttentionCase(self.num_chunks, end, self.heads, self.page_size)

    @property
    def flops(self) -> float:
        pairs = self.num_chunks * self.length * (self.context + (self.length + 1) / 2)
        return 2 * pairs * self.heads.num_heads * self.heads.multiplied

    @property
    def padded_size(self) -> tuple[int, int]:
        """Rows and chunks of the step that the runner replays, or of the step itself."""
        num_rows = self.num_chunks * self.length
        captured = next((most for most in CHUNK_ROWS if num_rows <= most), None)
        return (captured, MAX_CHUNKS) if captured else (num_rows, self.num_chunks)

    def with_kv(self, dtype: torch.dtype) -> ChunkCase:
        return replace(self, heads=replace(self.heads, kv_dtype=dtype))


Case = TypeVar("Case", AttentionCase, ChunkCase)

DECODE_CASES = [
    AttentionCase(num_rows, context, heads, page_size)
    for (num_rows, context), heads in [
        ((256, 800), Heads(16, 8)),
        ((256, 800), Heads(32, 8)),
        ((256, 800), Heads(40, 8)),
        ((256, 800), Heads(64, 8)),
        ((64, 4096), Heads(16, 8)),
        ((64, 8192), Heads(40, 8)),
        ((32, 800), Heads(16, 8)),
        ((8, 800), Heads(16, 8)),
        ((1, 100), Heads(16, 8)),
        ((1, 800), Heads(16, 8)),
        ((1, 800), Heads(40, 8)),
        ((1, 32768), Heads(16, 8)),
    ]
    for page_size in (1, 16, 64)
]
PREFILL_CASES = [
    AttentionCase(8, 2048, Heads(num_heads, 8), page_size)
    for num_heads in (16, 32, 40)
    for page_size in (1, 16, 64)
]
CHUNK_CASES = [
    ChunkCase(num_chunks, length, context, heads)
    for heads in (Heads(16, 8), Heads(40, 8))
    for context in (2048, 8192, 32768)
    for length in (16, 64, 128, 512)
    for num_chunks in (1, 2, 4)
]
TUNED_HEADS = [Heads(num_heads, 8) for num_heads in (16, 32, 40)]
TUNED_DECODES = [
    AttentionCase(num_rows, context, heads, page_size)
    for heads in TUNED_HEADS
    for page_size in (16, 64)
    for num_rows, context in [
        *((n, 640) for n in (1, 8, 32, 64, 128, 256)),
        (64, 8192),
        (1, 32768),
    ]
]
TUNED_PREFILLS = [AttentionCase(8, 2048, heads, 16) for heads in TUNED_HEADS]
TUNED_CHUNKS = [
    ChunkCase(num_chunks, length, context, heads)
    for heads in (Heads(16, 8), Heads(40, 8))
    for context in (2048, 8192, 32768)
    for num_chunks, length in ((1, 16), (1, 65), (4, 16), (1, 250), (2, 180))
]
# The same over latents.
LATENTS = [Heads(num_heads, 1, 576, rank=512) for num_heads in (20, 16)]
LATENT_DECODES = [
    AttentionCase(num_rows, context, heads, 16)
    for heads in LATENTS
    for num_rows, context in [
        *((n, 1024) for n in (1, 8, 32, 128)),
        *[(64, 8192), (8, 8192), (1, 8192), (1, 32768)],
    ]
]
LATENT_PREFILLS = [
    AttentionCase(num_rows, context, heads, 16)
    for heads in LATENTS
    for num_rows, context in [(8, 2048), (1, 8192)]
]
LATENT_CHUNKS = [
    ChunkCase(num_chunks, length, context, heads)
    for heads in LATENTS
    for context in (2048, 32768)
    for num_chunks, length in ((1, 16), (1, 64), (4, 64), (1, 512))
]
KV_DTYPES = {"bf16": DTYPE, "fp8": torch.float8_e4m3fn}


# -- inputs ----------------------------------------------------------------------------------------


def random_layers(case: AttentionCase, num_layers: int) -> tuple[list[PagedKV], Tensor]:
    """Caches of as many layers, and the page table, whose pages are scattered."""
    pages_per_row = -(-case.context // case.page_size)
    num_pages = 1 + case.num_rows * pages_per_row
    table = 1 + torch.randperm(num_pages - 1, device=DEVICE)
    size = (num_pages, case.page_size, case.heads.num_kv_heads, case.heads.head_dim)
    rank, kv_dtype = case.heads.rank, case.heads.kv_dtype

    def random_layer() -> PagedKV:
        k, v = (
            torch.randn(size if needed else 0, dtype=DTYPE, device=DEVICE).to(kv_dtype)
            for needed in (True, rank is None)
        )
        return PagedKV(k, v) if rank is None else PagedKV(k, k[..., :rank], v_in_k=True)

    layers = [random_layer() for _ in range(num_layers)]
    return layers, table.view(case.num_rows, pages_per_row).int()


def random_queries(case: AttentionCase, num_rows: int) -> Tensor:
    size = (num_rows, case.heads.num_heads, case.heads.head_dim)
    return torch.randn(size, dtype=DTYPE, device=DEVICE)


def begin(attention: Attention, decodes: DecodeBatch, chunks: PrefillBatch) -> None:
    """Let the backends plan, of which they need the rows alone."""
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    attention.prepare(
        ForwardBatch(nothing, nothing, nothing, decodes, chunks, BatchSlots(nothing, nothing))
    )


def no_decodes() -> DecodeBatch:
    empty = torch.empty((0, 1), dtype=torch.int32, device=DEVICE)
    return DecodeBatch(empty, empty[:, 0], 0, ())


def no_chunks() -> PrefillBatch:
    return PrefillBatch.of(torch.empty((0, 1), dtype=torch.int32, device=DEVICE), (), ())


# -- clocks ----------------------------------------------------------------------------------------


class DecodeClock:
    """Times one layer's decode of a case."""

    def __init__(self, case: AttentionCase, replays: int = REPLAYS) -> None:
        self._case, self._replays = case, replays
        num_layers = min(max(-(-ROTATED_BYTES // case.kv_bytes), 2), 64)
        self._layers, table = random_layers(case, num_layers)
        lengths = [case.context] * case.num_rows
        on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self._rows = DecodeBatch(table, on_device, case.context, lengths)
        self._q = random_queries(case, case.num_rows)

    def seconds(self, attention: Attention) -> float:
        begin(attention, self._rows, no_chunks())

        decode, spec = attention.decode_backend.decode, self._case.spec
        calls = [partial(decode, self._q, layer, self._rows, spec) for layer in self._layers]
        return graph_s(calls, rounds=self._replays)


class PrefillClock:
    """Times one layer's prefill of a case."""

    def __init__(self, case: AttentionCase, replays: int = REPLAYS) -> None:
        self._case, self._replays = case, replays
        [self._layer], table = random_layers(case, 1)
        self._rows = PrefillBatch.of(table, (0,) * case.num_rows, (case.context,) * case.num_rows)
        self._q = random_queries(case, self._rows.num_rows)

    def seconds(self, attention: Attention) -> float:
        begin(attention, no_decodes(), self._rows)
        prefill, spec = attention.prefill_backend.prefill, self._case.spec
        work = partial(prefill, self._q, self._layer, self._rows, spec)
        return median_s(work, rounds=self._replays)


class ChunkClock:
    """Times one layer's prefill of a case, in a graph with the padding of the runner's."""

    def __init__(self, case: ChunkCase, replays: int = REPLAYS) -> None:
        self._spec, self._replays = case.cached.spec, replays
        num_layers = min(max(-(-ROTATED_BYTES // case.cached.kv_bytes), 2), 64)
        self._layers, table = random_layers(case.cached, num_layers)
        num_rows, num_chunks = case.padded_size
        known = PrefillBatch.of(
            table, (case.context,) * case.num_chunks, (case.length,) * case.num_chunks
        )
        more = num_chunks - case.num_chunks
        self._rows = replace(
            known,
            page_table=torch.cat((table, table.new_zeros(more, table.shape[1]))),
            row_starts=torch.cat((known.row_starts, known.row_starts[-1:].expand(more))),
            ends=torch.cat((known.ends, known.ends.new_zeros(more))),
            num_rows=num_rows,
            starts=(),
            lengths=(),
        )
        self._q = random_queries(case.cached, num_rows)

    def seconds(self, attention: Attention) -> float:
        prefill, spec = attention.prefill_backend.prefill, self._spec
        calls = [partial(prefill, self._q, layer, self._rows, spec) for layer in self._layers]
        return graph_s(calls, rounds=self._replays)


# -- reports ---------------------------------------------------------------------------------------


def report(
    cases: list[AttentionCase], names: list[str], measure: Callable[[Attention, AttentionCase], str]
) -> None:
    for case, name in itertools.product(cases, names):
        try:
            attention = make_attention(name, name, case.shape)
            result = measure(attention, case)
        except (ImportError, RuntimeError, ValueError) as error:  # not all backends take all pages
            result = str(error).partition("\n")[0]
        print(f"{case!s:47} {name:8} {result}", flush=True)


def measure_decode(attention: Attention, case: AttentionCase) -> str:
    return describe_decode(case, DecodeClock(case).seconds(attention))


def measure_prefill(attention: Attention, case: AttentionCase) -> str:
    return describe_prefill(case, PrefillClock(case).seconds(attention))


def report_chunks(cases: list[ChunkCase], splits: list[str]) -> None:
    """Of Triton alone: other backends read no chunks that only the device knows."""
    for case in cases:
        clock = ChunkClock(case)
        times = {name: clock.seconds(both(split_backend(case, name))) for name in splits}
        described = (f"{name}: {describe_chunks(case, time)}" for name, time in times.items())
        print(f"{case!s:36} {'  '.join(described)}", flush=True)


def split_backend(case: ChunkCase, splits: str) -> TritonAttention:
    from minisgl.attention.triton_attention import TritonAttention

    tiles = tiles_in_use(case)
    return TritonAttention(prefill=replace(tiles, programs_per_sm=0) if splits == "1" else None)


def tiles_in_use(case: ChunkCase) -> PrefillTiles:
    from minisgl.attention.triton_attention import prefill_tiles
    from minisgl.kernels.tuning import tuning_of

    return prefill_tiles(
        case.heads.head_dim, DTYPE.itemsize, tuning_of(DEVICE), v_in_k=case.cached.spec.v_in_k
    )


def describe_chunks(case: ChunkCase, seconds: float) -> str:
    least = max(case.cached.kv_bytes / BYTES_PER_S, case.flops / FLOPS_PER_S)
    return f"{seconds * 1e6:8.1f} µs {least / seconds:5.0%}"


def describe_decode(case: AttentionCase, seconds: float) -> str:
    return f"{seconds * 1e6:8.1f} µs {case.kv_bytes / seconds / 1e12:7.2f} TB/s"


def describe_prefill(case: AttentionCase, seconds: float) -> str:
    pairs = case.num_rows * case.context * (case.context + 1) / 2
    flops = 2 * pairs * case.heads.num_heads * case.heads.multiplied
    return f"{seconds * 1e6:8.1f} µs {flops / seconds / 1e12:7.0f} TFLOP/s"


# -- tuning ----------------------------------------------------------------------------------------


def tune_decode(cases: list[AttentionCase], jobs: int) -> None:
    """One way of working for each number of splits that a case can come to."""
    from minisgl.attention.triton_attention import TritonAttention

    candidates = decode_candidates(over_latents=cases[0].spec.v_in_k)
    alike = {(tiles.block_n, tiles.num_warps, tiles.num_stages): tiles for tiles in candidates}
    heads = dict.fromkeys(case.heads for case in cases)
    kinds = itertools.product(heads, (16, 64), [*alike.values(), None])
    compile_all(compile_decode, list(kinds), jobs)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for case in cases:
        clock = DecodeClock(case, REPLAYS_IN_TUNING)
        different = {
            (
                tiles.block_n,
                tiles.num_warps,
                tiles.num_stages,
                num_splits(case, tiles, num_sms),
            ): tiles
            for tiles in reversed(candidates)
        }
        times = {
            f"{tiles}, {key[-1]} splits": seconds_or_none(clock, TritonAttention(tiles))
            for key, tiles in different.items()
        }
        report_best(case, times, clock.seconds(both(TritonAttention())), describe_decode)


def decode_candidates(*, over_latents: bool) -> list[DecodeTiles]:
    from minisgl.kernels.tuning import DecodeTiles

    if over_latents:
        return [
            DecodeTiles(block_n, num_warps, num_stages, programs_per_sm, min_split)
            for block_n in (16, 32, 64)
            for num_warps in (4, 8)
            for num_stages in (2, 3)
            for programs_per_sm in (1, 2, 4)
            for min_split in (32, 64, 128, 256)
        ]
    return [
        DecodeTiles(block_n, num_warps, num_stages, programs_per_sm, min_split)
        for block_n, num_warps, num_stages in (
            (32, 2, 4),
            (32, 4, 3),
            (32, 4, 4),
            (32, 4, 6),
            (64, 4, 2),
            (64, 4, 3),
            (64, 4, 4),
            (128, 4, 2),
            (128, 4, 3),
            (128, 8, 2),
            (128, 8, 3),
        )
        for programs_per_sm in (1, 2, 3, 4, 8, 16, 32)
        for min_split in (64, 128, 256)
    ]


def num_splits(case: AttentionCase, tiles: DecodeTiles, num_sms: int) -> int:
    """Of each row, as the kernel comes to them."""
    target_splits = num_sms * tiles.programs_per_sm // case.heads.num_kv_heads
    share = max(-(-case.num_rows * case.context // target_splits), tiles.min_split)
    even = -(-case.context // -(-case.context // share))
    whole_tiles = -(-even // tiles.block_n) * tiles.block_n
    return -(-case.context // whole_tiles)


def compile_decode(kind: tuple[Heads, int, DecodeTiles | None]) -> None:
    from minisgl.attention.triton_attention import TritonAttention

    heads, page_size, tiles = kind
    # What is used now has one way of working for few rows and one for many.
    for num_rows in (1,) if tiles else (1, 256):
        case = AttentionCase(num_rows, 1, heads, page_size)
        [layer], table = random_layers(case, 1)
        rows = DecodeBatch(table, torch.ones(num_rows, dtype=torch.int32, device=DEVICE), 1)
        with suppress_too_large():
            q = random_queries(case, num_rows)
            TritonAttention(tiles).decode(q, layer, rows, case.spec)


def tune_prefill(cases: list[AttentionCase], jobs: int) -> None:
    from minisgl.attention.triton_attention import TritonAttention

    candidates = prefill_candidates(over_latents=cases[0].spec.v_in_k)
    heads = dict.fromkeys(case.heads for case in cases)
    compile_all(compile_prefill, list(itertools.product(heads, [*candidates, None])), jobs)
    for case in cases:
        clock = PrefillClock(case, REPLAYS_IN_TUNING)
        times = {
            str(tiles): seconds_or_none(clock, TritonAttention(prefill=tiles))
            for tiles in candidates
        }
        report_best(case, times, clock.seconds(both(TritonAttention())), describe_prefill)


def prefill_candidates(*, over_latents: bool) -> list[PrefillTiles]:
    from minisgl.kernels.tuning import PrefillTiles

    if over_latents:
        return [
            PrefillTiles(block_m, block_n, num_warps, num_stages)
            for block_m in (32, 64, 128)
            for block_n in (16, 32, 64)
            for num_warps in (4, 8)
            for num_stages in (1, 2, 3)
        ]
    return [
        PrefillTiles(block_m, block_n, num_warps, num_stages)
        for block_m, block_n, num_warps, stages in (
            (64, 32, 4, (3, 4)),
            (64, 64, 4, (2, 3, 4)),
            (64, 128, 4, (2,)),
            (128, 32, 8, (3, 4)),
            (128, 64, 4, (2, 3)),
            (128, 64, 8, (2, 3, 4)),
            (128, 128, 8, (2, 3)),
            (256, 32, 8, (3,)),
            (256, 64, 8, (2, 3)),
            (256, 64, 16, (2, 3)),
        )
        for num_stages in stages
    ]


def compile_prefill(kind: tuple[Heads, PrefillTiles | None]) -> None:
    from minisgl.attention.triton_attention import TritonAttention

    heads, tiles = kind
    case = AttentionCase(1, 16, heads, 16)
    [layer], table = random_layers(case, 1)
    rows = PrefillBatch.of(table, (0,), (16,))
    with suppress_too_large():
        q = random_queries(case, 16)
        TritonAttention(prefill=tiles).prefill(q, layer, rows, case.spec)


def tune_splits(cases: list[ChunkCase]) -> None:
    """One kernel serves all ways to split."""
    from minisgl.attention.triton_attention import TritonAttention

    for case in cases:
        clock = ChunkClock(case, REPLAYS_IN_TUNING)
        tiles = tiles_in_use(case)
        candidates = [replace(tiles, programs_per_sm=0)] + [
            replace(tiles, programs_per_sm=programs_per_sm, min_split=min_split)
            for programs_per_sm in (1, 2, 3, 4)
            for min_split in (256, 512, 1024, 2048)
        ]
        times = {
            f"{tiles.programs_per_sm} a SM, {tiles.min_split} keys": clock.seconds(
                both(TritonAttention(prefill=tiles))
            )
            for tiles in candidates
        }
        report_best(case, times, clock.seconds(both(TritonAttention())), describe_chunks)


def compile_all(compile_one: Callable[[Any], None], kinds: list[Any], jobs: int) -> None:
    """What compiles for one case is what the others of its kind take."""
    with ProcessPoolExecutor(min(jobs, len(kinds)), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, kinds))


def both(backend: TritonAttention) -> Attention:
    return Attention(backend, backend)


def seconds_or_none(clock: DecodeClock | PrefillClock, backend: TritonAttention) -> float | None:
    with suppress_too_large():
        return clock.seconds(both(backend))
    return None


@contextlib.contextmanager
def suppress_too_large() -> Iterator[None]:
    """Tiles that do not fit into the shared memory of an SM, or into tensor memory."""
    from triton.runtime.errors import OutOfResources

    with contextlib.suppress(OutOfResources):
        yield


def report_best(
    case: Case,
    times: Mapping[str, float | None],
    now: float,
    describe: Callable[[Case, float], str],
) -> None:
    print(f"{case}: now {describe(case, now).strip()}")
    timed = sorted((seconds, name) for name, seconds in times.items() if seconds is not None)
    for seconds, name in timed[:3]:
        print(f"  {describe(case, seconds)}  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backends", nargs="*", default=["triton"], help="as --attn names them")
    parser.add_argument("--only", choices=["decode", "prefill", "chunks"], help="one table")
    parser.add_argument("--tune", action="store_true", help="try the tiles of Triton's decode")
    parser.add_argument("--tune-prefill", action="store_true", help="try those of its prefill")
    parser.add_argument("--tune-splits", action="store_true", help="try its splits of chunks")
    parser.add_argument(
        "--splits", nargs="+", choices=("1", "chosen"), default=["1", "chosen"], help="of chunks"
    )
    parser.add_argument(
        "--kv-dtype", nargs="+", choices=KV_DTYPES, default=["bf16"], help="of the cache"
    )
    parser.add_argument(
        "--heads", type=int, nargs="+", choices=(16, 20, 32, 40, 64), help="only cases of these"
    )
    parser.add_argument("--latents", action="store_true", help="cases of attention over latents")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="that compile")
    options = parser.parse_args()
    torch.manual_seed(0)

    def chosen(cases: list[Case]) -> list[Case]:
        return [
            case.with_kv(KV_DTYPES[name])
            for case in cases
            for name in options.kv_dtype
            if not options.heads or case.heads.num_heads in options.heads
        ]

    latents = options.latents
    if options.tune:
        tune_decode(chosen(LATENT_DECODES if latents else TUNED_DECODES), options.jobs)
    if options.tune_prefill:
        tune_prefill(chosen(LATENT_PREFILLS if latents else TUNED_PREFILLS), options.jobs)
    if options.tune_splits:
        tune_splits(chosen(LATENT_CHUNKS if latents else TUNED_CHUNKS))
    if options.tune or options.tune_prefill or options.tune_splits:
        return
    if options.only in (None, "decode"):
        cases = LATENT_DECODES if latents else DECODE_CASES
        report(chosen(cases), options.backends, measure_decode)
    if options.only in (None, "prefill"):
        cases = LATENT_PREFILLS if latents else PREFILL_CASES
        report(chosen(cases), options.backends, measure_prefill)
    if options.only in (None, "chunks") and "triton" in options.backends:
        report_chunks(chosen(LATENT_CHUNKS if latents else CHUNK_CASES), options.splits)


if __name__ == "__main__":
    main()
