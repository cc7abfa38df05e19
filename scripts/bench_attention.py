"""Times attention backends on a GPU: `python scripts/bench_attention.py triton fi trtllm`.

Decode: replays of a CUDA graph that attends once in each of several layers, whose caches together
do not fit into L2, as in a model. Prefill: 8 chunks of 2,048 tokens. Medians; bytes and operations
are those that the arithmetic needs, each key and value read once and masked scores left out.

`--tune` times the tiles that Triton's decode may use, and says which are best.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.attention.backends import make_attention
from minisgl.attention.base import (
    Attention,
    AttentionShape,
    ChunkRows,
    DecodeRows,
    LayerKV,
    StepInputs,
)

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.triton_attention import DecodeTiles

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# Much more than L2, so that each layer finds the cache as cold as it does between the weights.
ROTATED_BYTES = 512 << 20
REPLAYS = 25


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"

    def shape(self, page_size: int) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=DTYPE,
        )


@dataclass(frozen=True)
class Case:
    num_rows: int
    context: int
    heads: Heads
    page_size: int

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.context}, {self.heads}, page {self.page_size}"

    @property
    def kv_bytes(self) -> int:
        heads = self.heads
        return self.num_rows * self.context * heads.num_kv_heads * heads.head_dim * 2 * 2

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)


DECODE_CASES = [
    Case(num_rows, context, heads, page_size)
    for (num_rows, context), heads in [
        ((256, 800), Heads(16, 8)),
        ((256, 800), Heads(32, 8)),
        ((256, 800), Heads(40, 8)),
        ((256, 800), Heads(64, 8)),
        ((64, 4096), Heads(16, 8)),
        ((32, 800), Heads(16, 8)),
        ((8, 800), Heads(16, 8)),
        ((1, 100), Heads(16, 8)),
        ((1, 800), Heads(16, 8)),
        ((1, 800), Heads(40, 8)),
        ((1, 32768), Heads(16, 8)),
    ]
    for page_size in (1, 16, 64)
]
TUNED_CASES = [
    Case(num_rows, context, heads, page_size=16)
    for heads in (
        Heads(8, 8),
        Heads(16, 8),
        Heads(32, 8),
        Heads(40, 8),
        Heads(32, 8, 64),
        Heads(16, 8, 256),
    )
    for num_rows, context in ((256, 800), (32, 800), (1, 800), (1, 32768))
]
PREFILL_CASES = [
    Case(8, 2048, Heads(num_heads, 8), page_size)
    for num_heads in (16, 32, 40)
    for page_size in (1, 16, 64)
]


# -- inputs ----------------------------------------------------------------------------------------


def random_layers(case: Case, num_layers: int) -> tuple[list[LayerKV], Tensor]:
    """Caches of as many layers, and the page table, whose pages are scattered."""
    pages_per_row = -(-case.context // case.page_size)
    num_pages = 1 + case.num_rows * pages_per_row
    table = 1 + torch.randperm(num_pages - 1, device=DEVICE)
    size = (num_pages, case.page_size, case.heads.num_kv_heads, case.heads.head_dim)
    layers = [
        LayerKV(*(torch.randn(size, dtype=DTYPE, device=DEVICE) for _ in range(2)))
        for _ in range(num_layers)
    ]
    return layers, table.view(case.num_rows, pages_per_row).int()


def random_queries(case: Case, num_rows: int) -> Tensor:
    size = (num_rows, case.heads.num_heads, case.heads.head_dim)
    return torch.randn(size, dtype=DTYPE, device=DEVICE)


def begin(attention: Attention, decodes: DecodeRows, chunks: ChunkRows) -> None:
    """Let the backends plan, of which they need the rows alone."""
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    attention.begin(StepInputs(nothing, nothing, nothing, decodes, chunks))


def no_decodes() -> DecodeRows:
    empty = torch.empty((0, 1), dtype=torch.int32, device=DEVICE)
    return DecodeRows(empty, empty[:, 0], 0, ())


def no_chunks() -> ChunkRows:
    return ChunkRows(torch.empty((0, 1), dtype=torch.int32, device=DEVICE), (), ())


# -- clocks ----------------------------------------------------------------------------------------


def median_s(work: Callable[[], object]) -> float:
    """Seconds on the device that `work` takes, whose host time stays in front of it."""
    times: list[float] = []
    for _ in range(3):
        work()
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def decode_s(attention: Attention, case: Case) -> float:
    """Seconds of one layer's decode."""
    num_layers = min(max(-(-ROTATED_BYTES // case.kv_bytes), 2), 64)
    layers, table = random_layers(case, num_layers)
    lengths = [case.context] * case.num_rows
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rows = DecodeRows(table, on_device, case.context, lengths)
    q = random_queries(case, case.num_rows)
    begin(attention, rows, no_chunks())

    def step() -> None:
        for layer in layers:
            attention.decode_backend.decode(q, layer, rows, case.scale)

    step()  # compiles, and allocates what outlives the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median_s(graph.replay) / num_layers


def prefill_s(attention: Attention, case: Case) -> float:
    [layer], table = random_layers(case, 1)
    rows = ChunkRows(table, (0,) * case.num_rows, (case.context,) * case.num_rows)
    q = random_queries(case, rows.num_rows)
    begin(attention, no_decodes(), rows)
    return median_s(lambda: attention.prefill_backend.prefill(q, layer, rows, case.scale))


# -- reports ---------------------------------------------------------------------------------------


def report(cases: list[Case], names: list[str], measure: Callable[[Attention, Case], str]) -> None:
    for case, name in itertools.product(cases, names):
        try:
            attention = make_attention(name, name, case.heads.shape(case.page_size))
            result = measure(attention, case)
        except (ImportError, RuntimeError, ValueError) as error:  # not all backends take all pages
            result = str(error).partition("\n")[0]
        print(f"{case!s:42} {name:8} {result}", flush=True)


def measure_decode(attention: Attention, case: Case) -> str:
    seconds = decode_s(attention, case)
    return f"{seconds * 1e6:8.1f} µs {case.kv_bytes / seconds / 1e12:7.2f} TB/s"


def measure_prefill(attention: Attention, case: Case) -> str:
    seconds = prefill_s(attention, case)
    pairs = case.num_rows * case.context * (case.context + 1) / 2
    flops = 4 * pairs * case.heads.num_heads * case.heads.head_dim
    return f"{seconds * 1e6:8.1f} µs {flops / seconds / 1e12:7.0f} TFLOP/s"


# -- tuning ----------------------------------------------------------------------------------------


def tune() -> None:
    """First the tiles, then, with the best of them, how far rows are split."""
    from minisgl.attention.triton_backend import PROGRAMS_PER_SM

    for case in TUNED_CASES:
        tiles = [(tiles, PROGRAMS_PER_SM) for tiles in candidate_tiles(case.heads)]
        best_tiles, _ = try_all(case, tiles)
        try_all(
            case,
            [
                (replace(best_tiles, min_share=min_share), programs_per_sm)
                for min_share in (64, 128, 256, 512)
                for programs_per_sm in (4, 8, 16, 32, 64)
            ],
        )


def candidate_tiles(heads: Heads) -> list[DecodeTiles]:
    from minisgl.kernels.triton_attention import DecodeTiles

    tiles = [
        DecodeTiles(block_n, num_warps, num_stages, use_dot=True, min_share=128)
        for block_n in (32, 64, 128)
        for num_warps in (2, 4, 8)
        for num_stages in (2, 3, 4)
    ]
    if heads.num_heads <= 2 * heads.num_kv_heads:
        tiles += [
            DecodeTiles(block_n, num_warps, num_stages, use_dot=False, min_share=128)
            for block_n in (16, 32)
            for num_warps in (2, 4)
            for num_stages in (3, 4, 5)
        ]
    return tiles


def try_all(case: Case, candidates: list[tuple[DecodeTiles, int]]) -> tuple[DecodeTiles, int]:
    """Prints the three fastest, and returns the first."""
    from triton.runtime.errors import OutOfResources

    from minisgl.attention.triton_backend import TritonAttention

    times: list[tuple[float, DecodeTiles, int]] = []
    for tiles, programs_per_sm in candidates:
        backend = TritonAttention(tiles, programs_per_sm)
        with contextlib.suppress(OutOfResources):
            seconds = decode_s(Attention(backend, backend), case)
            times.append((seconds, tiles, programs_per_sm))
    times.sort(key=lambda entry: entry[0])
    print(case)
    for seconds, tiles, programs_per_sm in times[:3]:
        bandwidth = case.kv_bytes / seconds / 1e12
        print(
            f"  {seconds * 1e6:8.1f} µs {bandwidth:6.2f} TB/s  {tiles}, {programs_per_sm=}",
            flush=True,
        )
    return times[0][1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backends", nargs="*", default=["triton"], help="as --attn names them")
    parser.add_argument("--only", choices=["decode", "prefill"], help="one of the two tables")
    parser.add_argument("--tune", action="store_true", help="try the tiles of Triton's decode")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune:
        tune()
        return
    if options.only != "prefill":
        report(DECODE_CASES, options.backends, measure_decode)
    if options.only != "decode":
        report(PREFILL_CASES, options.backends, measure_prefill)


if __name__ == "__main__":
    main()
