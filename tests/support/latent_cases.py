"""Latents at random, and what the kernels before and after attention over them make of these."""

from __future__ import annotations

from typing import NamedTuple

import torch
from support.layer_cases import assert_rounded_alike, norm_weight, random, seeded, send
from torch import Tensor

from minisgl.kernels.elementwise import latents
from minisgl.kernels.elementwise.latents import LatentNorm
from minisgl.kernels.elementwise.latents_kernel import store_latents, values_of_latents
from minisgl.kernels.tuning import LatentMapTiles
from minisgl.layers.rope import rotary_table

SCALE = 0.02  # of a cache in FP8
PAGE_SIZE = 4


class Latents(NamedTuple):
    """The widths of a layer."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    rank: int
    value_dim: int


# Small ones that are no powers of two, and those of GLM-4.7-Flash.
LATENTS = [Latents(1, 8, 2, 24, 40), Latents(37, 24, 12, 40, 8), Latents(20, 192, 64, 512, 256)]


def maps_of(sizes: Latents, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[num_heads, nope_dim + value_dim, rank], for results about as large as what is mapped."""
    shape = (sizes.num_heads, sizes.nope_dim + sizes.value_dim, sizes.rank)
    return (random(shape, torch.float32, generator) * 0.2 * sizes.nope_dim**-0.5).to(dtype)


def check_store_latents(
    num_rows: int,
    sizes: Latents,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool,
    tiles: LatentMapTiles | None = None,
) -> None:
    """kv and q are columns of one wider tensor, the maps rows of one, and the cache has rows of
    others. tiles: None for those of the device, if it maps so many rows itself."""
    generator = seeded(num_rows, sizes.rank)
    width, head_dim = sizes.rank + sizes.rope_dim, sizes.nope_dim + sizes.rope_dim
    both = random((num_rows, sizes.num_heads * head_dim + width), dtype, generator)
    frequencies = 1e2 ** -torch.linspace(0, 1, sizes.rope_dim // 2)
    table = rotary_table(frequencies, 64, scale=1.1)
    weight = norm_weight(sizes.rank, dtype, generator)
    positions = torch.randint(64, (num_rows,), generator=generator)
    num_pages = 2 + -(-num_rows // PAGE_SIZE)  # the first is scratch
    slots = PAGE_SIZE + torch.randperm(PAGE_SIZE * (num_pages - 1), generator=generator)[:num_rows]
    cache = random((num_pages, PAGE_SIZE, 1, width), dtype, generator)
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    maps = maps_of(sizes, dtype, generator)
    on_device = send(device, both, positions, slots, cache, table, weight, maps)

    def run(function, both, positions, slots, cache, table, weight, maps, **options):
        q, kv = both.split((sizes.num_heads * head_dim, width), dim=1)
        q = q.unflatten(1, (sizes.num_heads, head_dim))
        norm, to_keys = LatentNorm(table, weight, 1e-6), maps[:, : sizes.nope_dim]
        scale = SCALE if fp8 else 1.0
        return function(kv, q, positions, slots, cache, norm, to_keys, scale, **options)

    out = run(store_latents, *on_device, tiles=tiles)
    kept = cache.clone()
    wanted = run(latents.store_latents, both, positions, slots, kept, table, weight, maps)
    assert out.shape == (num_rows, sizes.num_heads, width)
    rotated = (out[..., sizes.rank :], wanted[..., sizes.rank :])
    assert_rounded_alike(rotated[0].contiguous(), rotated[1].contiguous())
    assert_rounded_alike(on_device[3], kept)
    q = both[:, : sizes.num_heads * head_dim].unflatten(1, (sizes.num_heads, head_dim))
    exact = torch.einsum(
        "rhk,hkn->rhn", q[..., : sizes.nope_dim].double(), maps[:, : sizes.nope_dim].double()
    )
    assert_rounded_alike(out[..., : sizes.rank].contiguous(), exact.to(dtype))


def check_values_of_latents(
    num_rows: int,
    sizes: Latents,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tiles: LatentMapTiles | None = None,
) -> None:
    """tiles: as of check_store_latents."""
    generator = seeded(num_rows, sizes.value_dim)
    attended = random((num_rows, sizes.num_heads, sizes.rank), dtype, generator)
    maps = maps_of(sizes, dtype, generator)
    attended_there, maps_there = send(device, attended, maps)
    out = values_of_latents(attended_there, maps_there[:, sizes.nope_dim :], tiles=tiles)
    to_values = maps[:, sizes.nope_dim :]
    exact = torch.einsum("rhk,hnk->rhn", attended.double(), to_values.double())
    for got in (out, latents.values_of_latents(attended, to_values)):
        if dtype == torch.float32:  # sums of `rank` products, in any order
            torch.testing.assert_close(got.cpu(), exact.float(), rtol=2e-5, atol=2e-5)
        else:
            assert_rounded_alike(got, exact.to(dtype))
