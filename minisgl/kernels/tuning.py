"""The measurements behind the choice of tiles and kernels, as data: one `DeviceTuning` a GPU.

The defaults are those measured on an H200. Another GPU takes them with its own number of SMs and
shared memory, until somebody measures there (scripts/bench/bench_kernels.py --tiles) and gives
`tuning_of` its values; where our kernels have not run on its generation, it takes those of
`UNTRIED`. Counts of programs decide how sums are split, and so the rounding of results: they stay
the H200's on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from minisgl.kernels.hardware import kernels_have_run

NO_LIMIT = 1 << 62

# Without a GPU there is Triton's interpreter, which runs the programs one after the other.
_INTERPRETED_SMS = 4


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How one GEMM over experts is tiled. Sizes of blocks are powers of two."""

    block_n: int  # rows of W in a program; of the gated GEMM, rows of either half
    block_m: int  # token-expert pairs
    block_k: int
    num_warps: int
    num_stages: int  # tiles in flight, the one at work included
    places: int = 1  # programs that share an expert's pairs


@dataclass(frozen=True, slots=True)
class FewTiles:
    """How the experts' GEMMs of few rows are tiled: the gated one with a program for each pair, and
    the second one."""

    inner: ExpertTiles = ExpertTiles(32, 16, 128, num_warps=4, num_stages=4)
    block_n: int = 8  # outputs in a program
    block_k: int = 256
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class ManyTiles:
    """How the experts' GEMMs of many rows are tiled: the gated one and the second one."""

    inner: ExpertTiles
    outer: ExpertTiles


@dataclass(frozen=True, slots=True)
class PairTiles:
    """How the experts' GEMMs of few rows are tiled where both have a program for each pair: the
    gated one and the second one."""

    inner: ExpertTiles
    outer: ExpertTiles


@dataclass(frozen=True, slots=True)
class WeightOnlyTiles:
    """How a linear map with quantised weights and plain x is tiled, and over how many programs its
    k is split."""

    block_n: int  # rows of W in a program, of a gated map those of both halves
    block_m: int  # rows of x at most
    block_k: int
    num_warps: int
    num_stages: int  # tiles in flight, the one at work included
    programs_per_sm: int  # that the splits of k aim to have running at once
    # Elements of k to fetch into L2 before the wait, if the programs run at once.
    prefetch: int = 512


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a program of decode attention works, and over how many programs the keys are split."""

    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int  # tiles in flight, the one at work included
    programs_per_sm: int  # over which the keys of all rows are split, if there are enough keys
    min_split: int  # keys; a row is not split into fewer


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How a program of prefill attention works, and over how many programs the keys are split."""

    block_m: int  # pairs of a token and a head
    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1  # over which the keys of few chunks are split; 0: never
    min_split: int = 256  # keys; a chunk is not split into fewer


@dataclass(frozen=True, slots=True)
class LatentMapTiles:
    """How the maps of heads to latents and from them are tiled: a program has some outputs of a
    head, and all of its W in registers."""

    to_latents: int = 64  # outputs in a program
    nope_k: int = 64  # of a tile of that W
    to_values: int = 32
    rank_k: int = 128
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class DeltaDecodeTiles:
    """How a program of the gated delta rule works on a row of a slot."""

    block_v: int  # values of a head; all keys
    num_warps: int


@dataclass(frozen=True, slots=True)
class DeltaPrefillTiles:
    """How programs of the gated delta rule work on chunks of 64 rows: those that prepare one, and
    those that go through them with a part of the state."""

    prepare_warps: int
    block_v: int  # values of a head; all keys
    num_warps: int
    num_stages: int  # chunks in flight, the one at work included


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTuning:
    """Tables are read from the top: the first entry whose limit is not exceeded counts."""

    # -- the device ----------------------------------------------------------------------------
    num_sms: int = 132
    # Shared memory of a program, in bytes: on GPUs of compute capability 8.6, 8.9 and 12.0 99 KiB,
    # of 8.0 163, of 9.0 and 10.0 227. With more, a launch fails.
    shared_bytes: int = 227 << 10

    # -- elementwise kernels -------------------------------------------------------------------
    # Rows from which the bandwidth counts, and a program takes more of them; with fewer the latency
    # counts, and the work is spread over as many programs as there are.
    many_rows: int = 1024

    # -- linear maps of few rows ---------------------------------------------------------------
    # (rows, most elements of W) up to which our kernels beat the best of cuBLAS's algorithms, by
    # the time of whole decode steps of Qwen3-0.6B and 14B.
    linear_weights: tuple[tuple[int, int], ...] = ((16, 1 << 26), (32, 1 << 24), (128, 1 << 22))
    # The same where adapters add to the result, for which cuBLAS takes a launch more. Not measured
    # yet.
    delta_weights: tuple[tuple[int, int], ...] = ((32, NO_LIMIT), (128, 1 << 22))
    # Rows from which on only ungated maps count, and up to 64 rows only those with k > n.
    linear_gated_rows: int = 32
    # Rows and k up to which a GEMM norms its own input: where x is long, that holds up reading W.
    norm_rows: int = 32
    norm_k: int = 3072
    # k up to which it also sums up the squares of its input. Not measured yet.
    summed_k: int = 1536
    # Programs that the tiles of a GEMM aim to have running at once: one on each SM.
    linear_programs: int = 132
    # Elements of k, a multiple of 128, that a program has fetched into L2 before it waits.
    linear_prefetch: int = 256
    # Bytes of W that all programs have fetched if they add a delta: as many as are read while its
    # shrink runs. Not measured yet.
    delta_prefetch: int = 24 << 20
    # Programs of the burst kernel on each SM, up to which it is taken.
    burst_programs: int = 2
    # Rows, a power of two, up to which the small kernel takes its place.
    small_rows: int = 2

    # -- linear maps in FP8 --------------------------------------------------------------------
    # Rows up to which our kernel is taken, with scales of rows and of groups; then torch's.
    fp8_rows: int = 64
    fp8_group_rows: int = 64

    # Rows up to which the largest value of a long row is found by several programs, in a launch of
    # its own; with more, one program has all of it.
    fp8_spread_rows: int = 32
    # -- linear maps with quantised weights and plain x ----------------------------------------
    # By rows, and by the elements of W. With more rows than all but the last entries have, twice
    # the rows of x where that fills the device better.
    weight_only_tiles: tuple[tuple[int, int, WeightOnlyTiles], ...] = (
        (8, 1 << 26, WeightOnlyTiles(128, 8, 128, 4, 4, programs_per_sm=2, prefetch=0)),
        (8, 1 << 27, WeightOnlyTiles(128, 8, 256, 4, 3, programs_per_sm=2, prefetch=0)),
        (8, NO_LIMIT, WeightOnlyTiles(128, 8, 256, 4, 3, programs_per_sm=5)),
        (16, 1 << 27, WeightOnlyTiles(128, 16, 256, 4, 3, programs_per_sm=2)),
        (16, NO_LIMIT, WeightOnlyTiles(128, 16, 256, 4, 3, programs_per_sm=5)),
        (32, 1 << 27, WeightOnlyTiles(64, 32, 128, 4, 4, programs_per_sm=4)),
        (32, NO_LIMIT, WeightOnlyTiles(128, 32, 128, 4, 3, programs_per_sm=5)),
        (64, 1 << 27, WeightOnlyTiles(128, 64, 128, 8, 4, programs_per_sm=2)),
        (64, NO_LIMIT, WeightOnlyTiles(128, 64, 128, 4, 3, programs_per_sm=3)),
        (
            NO_LIMIT,
            NO_LIMIT,
            WeightOnlyTiles(128, 128, 128, 8, 4, programs_per_sm=1),
        ),
    )
    # Rows from which on W is dequantised into memory, once for all products, for cuBLAS.
    weight_only_rows: int = 2048
    # Rows up to which the weights are dequantised in registers where there is a dense copy of them,
    # too: at most `weight_only_rows`. The products of a layer of Qwen3-14B take 143 µs with 64 rows
    # and 231 with 96 in INT4, 188 and 191 dense.
    weight_only_dense_rows: int = 64
    # Rows up to which the activation of a gated MLP is part of its first GEMM, and up to which the
    # addition to the residual stream is part of a GEMM.
    weight_only_gated_rows: int = 64
    weight_only_add_rows: int = 128

    # -- experts -------------------------------------------------------------------------------
    few_tiles: FewTiles = FewTiles()
    few_pairs: int = 8  # token-expert pairs up to which FewTiles are taken
    few_weights: int = 48 << 10  # elements of W in the registers of such a program at most
    # Rows up to which an expert that every row takes is one more of the others, which saves two
    # launches. With more, it has many more pairs than each of them: 32 rows of GLM-4.7-Flash were
    # no faster on an H100.
    shared_expert_rows: int = 16
    # By the pairs that an expert has, if they spread evenly.
    many_tiles: tuple[tuple[float, ManyTiles], ...] = (
        (8, ManyTiles(ExpertTiles(64, 16, 128, 4, 3), ExpertTiles(64, 16, 128, 4, 3))),
        (24, ManyTiles(ExpertTiles(64, 32, 64, 4, 3), ExpertTiles(128, 32, 64, 4, 4))),
        (48, ManyTiles(ExpertTiles(64, 64, 64, 4, 3, 2), ExpertTiles(128, 64, 64, 4, 4, 2))),
        (384, ManyTiles(ExpertTiles(64, 128, 64, 4, 3, 4), ExpertTiles(128, 64, 64, 4, 4, 8))),
        (
            NO_LIMIT,
            ManyTiles(ExpertTiles(128, 128, 64, 8, 4, 8), ExpertTiles(128, 256, 64, 8, 3, 4)),
        ),
    )
    # The same in FP8, with the k of a tile where the weights have no blocks; one way for any number
    # of rows: two launches as of FewTiles took 32 microseconds of a row, and these take 30.
    fp8_many_tiles: tuple[tuple[float, ManyTiles], ...] = (
        (8, ManyTiles(ExpertTiles(128, 16, 128, 4, 6), ExpertTiles(128, 16, 128, 4, 4))),
        (24, ManyTiles(ExpertTiles(128, 32, 128, 4, 3), ExpertTiles(128, 16, 128, 4, 4))),
        (48, ManyTiles(ExpertTiles(64, 64, 128, 4, 4, 2), ExpertTiles(128, 64, 128, 8, 4, 2))),
        (384, ManyTiles(ExpertTiles(64, 128, 128, 4, 3, 4), ExpertTiles(128, 128, 128, 8, 4, 4))),
        (
            NO_LIMIT,
            ManyTiles(ExpertTiles(64, 128, 128, 4, 3, 8), ExpertTiles(128, 128, 128, 8, 4, 8)),
        ),
    )
    # The same with INT4 weights, whose groups give the k of a tile. Not measured yet.
    int4_many_tiles: tuple[tuple[float, ManyTiles], ...] = (
        (8, ManyTiles(ExpertTiles(64, 16, 128, 4, 6), ExpertTiles(64, 16, 128, 4, 6))),
        (24, ManyTiles(ExpertTiles(64, 32, 128, 4, 5), ExpertTiles(64, 32, 128, 4, 5))),
        (
            NO_LIMIT,
            ManyTiles(ExpertTiles(64, 64, 128, 4, 3, 4), ExpertTiles(128, 64, 128, 8, 3, 4)),
        ),
    )
    # The same with MXFP4 weights, and the first for up to `few_pairs`; measured with the sizes of
    # gpt-oss-20b. Of up to 16 pairs each warp takes chunks of k of its own.
    mxfp4_pair_tiles: PairTiles = PairTiles(
        ExpertTiles(16, 8, 128, 2, 4), ExpertTiles(16, 8, 256, 2, 4)
    )
    mxfp4_many_tiles: tuple[tuple[float, ManyTiles], ...] = (
        (2, ManyTiles(ExpertTiles(32, 8, 128, 2, 4), ExpertTiles(32, 8, 256, 2, 3))),
        (4, ManyTiles(ExpertTiles(32, 8, 128, 2, 5), ExpertTiles(32, 8, 128, 2, 5))),
        (12, ManyTiles(ExpertTiles(32, 16, 64, 1, 3), ExpertTiles(32, 16, 128, 1, 3))),
        (24, ManyTiles(ExpertTiles(64, 32, 64, 4, 4), ExpertTiles(64, 32, 64, 4, 5))),
        (48, ManyTiles(ExpertTiles(64, 64, 64, 4, 4, 2), ExpertTiles(128, 64, 64, 4, 4, 2))),
        (192, ManyTiles(ExpertTiles(64, 64, 64, 4, 3, 4), ExpertTiles(128, 64, 64, 4, 3, 4))),
        (1024, ManyTiles(ExpertTiles(64, 128, 64, 4, 3, 4), ExpertTiles(128, 128, 64, 4, 3, 4))),
        (
            NO_LIMIT,
            ManyTiles(ExpertTiles(64, 128, 64, 4, 4, 16), ExpertTiles(128, 256, 64, 8, 3, 16)),
        ),
    )
    # In float32, for tests.
    float32_tiles: ManyTiles = ManyTiles(
        ExpertTiles(32, 16, 32, num_warps=4, num_stages=2, places=2),
        ExpertTiles(32, 16, 32, num_warps=4, num_stages=2, places=2),
    )

    # -- attention -----------------------------------------------------------------------------
    # By the number of pairs of a row and a KV head, for half precision and heads of up to 128;
    # measured with head_dim 128 (bench_kernels.py attention-decode). Few are split over as many
    # programs as there are SMs, or twice as many, each long enough to be worth the work at its
    # ends. Many fill the device by themselves, and are split so that no long row is left alone at
    # the end. Two warps read as fast as four, but with them a step of 8 rows whose programs all
    # rotate their row's heads (FusedDecode) was slower than one that left this to a kernel of its
    # own. With a cache in FP8 none is measured yet (bench_kernels.py attention-decode --only fp8):
    # compiled for sm_90, a warp reads a byte with 1.8 times the instructions that it takes for one
    # of bfloat16 in the same tile, and with 1.5 times in tiles of 128 keys, of which only two fit
    # into the registers of an SM.
    decode_tiles: tuple[tuple[int, DecodeTiles], ...] = (
        (16, DecodeTiles(64, num_warps=4, num_stages=3, programs_per_sm=1, min_split=128)),
        (128, DecodeTiles(64, num_warps=4, num_stages=3, programs_per_sm=2, min_split=256)),
        (512, DecodeTiles(64, num_warps=4, num_stages=3, programs_per_sm=2, min_split=64)),
        (NO_LIMIT, DecodeTiles(64, num_warps=4, num_stages=3, programs_per_sm=8, min_split=64)),
    )
    # The same for wider heads, by head_dim, with a cache of any dtype. 64 rows of 8,192 tokens in
    # bfloat16 are read at 4.0 TB/s with values of 128 beside keys of 192, and at 4.3 and 4.4 TB/s
    # with heads of 256 and 512. All fit into the 99 KiB of shared memory of the smaller GPUs.
    wide_decode_tiles: tuple[tuple[int, DecodeTiles], ...] = (
        (192, DecodeTiles(32, 4, 2, programs_per_sm=3, min_split=64)),
        (256, DecodeTiles(16, 4, 3, programs_per_sm=3, min_split=64)),
        (NO_LIMIT, DecodeTiles(16, 4, 3, programs_per_sm=1, min_split=64)),
    )
    # float32 is multiplied on CUDA cores, exactly, where larger tiles do not keep their registers.
    float32_decode_tiles: DecodeTiles = DecodeTiles(16, 4, 3, programs_per_sm=4, min_split=128)
    # By head_dim. Those for up to 128 are not measured yet (bench_kernels.py attention-prefill):
    # they keep their registers on sm_90. A prompt of 8,192 tokens takes 3.7 ms with 64 query heads
    # of 192, 3.7 ms (two prompts) with 24 of 256, and 11.5 ms with 32 of 512; the tiles of UNTRIED
    # take 5.0, 11.2 and 39.7 ms. Those of 256 and 512 are faster although they spill registers. The
    # splits are measured (attention-chunks): on an H200 others are slower for most chunks on 512 to
    # 32k tokens.
    prefill_tiles: tuple[tuple[int, PrefillTiles], ...] = (
        (128, PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        (192, PrefillTiles(block_m=128, block_n=32, num_warps=8, num_stages=2)),
        (256, PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=2)),
        (NO_LIMIT, PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=2)),
    )
    # The same for a cache in FP8, whose conversion takes registers. Of those for more than 128,
    # only those of 256 are measured: 6.6 ms instead of 21.5.
    fp8_prefill_tiles: tuple[tuple[int, PrefillTiles], ...] = (
        (128, PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        (192, PrefillTiles(block_m=128, block_n=32, num_warps=8, num_stages=2)),
        (256, PrefillTiles(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        (NO_LIMIT, PrefillTiles(block_m=32, block_n=16, num_warps=8, num_stages=2)),
    )
    float32_prefill_tiles: tuple[tuple[int, PrefillTiles], ...] = (
        (128, PrefillTiles(block_m=32, block_n=16, num_warps=8, num_stages=2)),
        (NO_LIMIT, PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=2)),
    )

    # Over keys that hold the values, for latents of 512 numbers and 64 behind them; a program has
    # up to 32 heads of a row, or their pairs with tokens. Those of decode by the number of pairs of
    # a row and such a group. Measured on an H200 with 20 heads (attention-latent-decode): 1, 8 and
    # 32 rows of 1,024 tokens take 9.7, 12.3 and 26 µs, and 1 and 64 of 8,192 take 13 and 235 µs. In
    # tiles of 32 keys, a row of 1,024 takes 8.2 µs, and one of 32,768 takes 37 instead of 27. An SM
    # has room for one program: with more of them, what each does once is done for nothing. Chunks
    # of 8,192 tokens take 5.3 ms in tiles of 64 keys, although they spill registers, and 7.1 in
    # those of 32.
    latent_decode_tiles: tuple[tuple[int, DecodeTiles], ...] = (
        (4, DecodeTiles(64, 8, 2, programs_per_sm=1, min_split=64)),
        (NO_LIMIT, DecodeTiles(64, 8, 3, programs_per_sm=1, min_split=64)),
    )
    latent_prefill_tiles: PrefillTiles = PrefillTiles(
        block_m=64, block_n=64, num_warps=8, num_stages=2
    )
    fp8_latent_prefill_tiles: PrefillTiles = PrefillTiles(
        block_m=32, block_n=32, num_warps=8, num_stages=2
    )
    float32_latent_prefill_tiles: PrefillTiles = PrefillTiles(
        block_m=32, block_n=16, num_warps=8, num_stages=2
    )

    # Rows up to which the maps between heads and latents are our kernels, and with more cuBLAS's:
    # of GLM-4.7-Flash, both together are faster with 32 on an H100, and as fast with 64
    # (bench_kernels.py latents).
    latent_map_rows: int = 32
    latent_maps: LatentMapTiles = LatentMapTiles()

    # -- gated delta net -----------------------------------------------------------------------
    # Not measured yet. A decode program has 16 KiB of state in flight, and an SM seven of them; a
    # part of 32 values is a line of memory for each key. The tiles of prefill keep their registers
    # on sm_90, and with 32 values do not.
    delta_decode: DeltaDecodeTiles = DeltaDecodeTiles(block_v=32, num_warps=4)
    delta_prefill: DeltaPrefillTiles = DeltaPrefillTiles(
        prepare_warps=4, block_v=16, num_warps=4, num_stages=2
    )

    # -- sampling ------------------------------------------------------------------------------
    sampling_programs: int = 1056  # that the rows of logits are split over: about eight on each SM

    # -- collectives ---------------------------------------------------------------------------
    # A rank's rows, in bytes, that two ranks add up in one shot. Between more, one shot sends each
    # row more often than two shots do, and wins with fewer: measured with two and four.
    one_shot_bytes: int = 1600 << 10
    collective_programs: int = 264  # of a sum: two on each SM


H200 = DeviceTuning()

# cuBLAS and torch multiply, at every number of rows, wherever they can. The tiles of attention, of
# gated delta nets and of experts in MXFP4 keep their registers on sm_80 and sm_100, except that
# preparing a chunk spills 112 bytes on sm_80, and fit into 99 KiB of shared memory.
UNTRIED = replace(
    H200,
    linear_weights=(),
    delta_weights=(),
    fp8_rows=0,
    fp8_group_rows=0,
    mxfp4_many_tiles=(
        *H200.mxfp4_many_tiles[:4],
        (
            NO_LIMIT,
            ManyTiles(ExpertTiles(128, 64, 64, 8, 4, 2), ExpertTiles(128, 32, 64, 4, 4, 2)),
        ),
    ),
    prefill_tiles=(
        (128, PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        (192, PrefillTiles(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        (256, PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        (NO_LIMIT, PrefillTiles(block_m=32, block_n=16, num_warps=8, num_stages=2)),
    ),
    fp8_prefill_tiles=(
        (128, PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        (256, PrefillTiles(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        (NO_LIMIT, PrefillTiles(block_m=32, block_n=16, num_warps=8, num_stages=2)),
    ),
    latent_map_rows=0,
    latent_decode_tiles=((NO_LIMIT, DecodeTiles(32, 8, 2, programs_per_sm=4, min_split=64)),),
    latent_prefill_tiles=PrefillTiles(block_m=32, block_n=32, num_warps=8, num_stages=2),
    delta_prefill=DeltaPrefillTiles(prepare_warps=8, block_v=16, num_warps=8, num_stages=1),
)


@cache
def tuning_of(device: torch.device) -> DeviceTuning:
    """The tuning of a CUDA device; of any other, that of Triton's interpreter, which has no limit
    of shared memory."""
    if device.type != "cuda":
        return replace(H200, num_sms=_INTERPRETED_SMS)
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return replace(
        H200 if kernels_have_run(torch.cuda.get_device_capability(index)) else UNTRIED,
        num_sms=torch.cuda.get_device_properties(index).multi_processor_count,
        # What Triton itself compares with.
        shared_bytes=int(driver.active.utils.get_device_properties(index)["max_shared_mem"]),
    )


def fitting_stages(
    num_stages: int, stage_bytes: int, shared_bytes: int, steps: int = NO_LIMIT
) -> int:
    """`num_stages`, or as many tiles in flight as there is shared memory for, and steps of the
    loop, where the compiler knows their number.

    The tile at work counts: wgmma reads it from shared memory. Without wgmma it is in registers,
    and there is room to spare. In a loop known to be shorter than its pipeline, Triton 3.6 let a
    tile be overwritten while it was multiplied.
    """
    return min(num_stages, shared_bytes // stage_bytes, steps)
