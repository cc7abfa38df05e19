"""Latents at random, and what the kernel that norms, rotates and stores them makes of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from support.layer_cases import assert_rounded_alike, norm_weight, random, seeded, send

from minisgl.kernels.elementwise import latents
from minisgl.kernels.elementwise.latents import LatentNorm
from minisgl.kernels.elementwise.latents_kernel import store_latents
from minisgl.layers.rope import RotaryEmbedding

SCALE = 0.02  # of a cache in FP8
PAGE_SIZE = 4


class Latents(NamedTuple):
    """The widths of a layer."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    rank: int


# Small ones that are no powers of two, and those of GLM-4.7-Flash.
LATENTS = [Latents(1, 8, 2, 24), Latents(37, 24, 12, 40), Latents(20, 192, 64, 512)]


def check_store_latents(
    num_rows: int, sizes: Latents, dtype: torch.dtype, device: torch.device, *, fp8: bool
) -> None:
    """kv and q are columns of one wider tensor, and the cache has rows of others."""
    generator = seeded(num_rows, sizes.rank)
    width, head_dim = sizes.rank + sizes.rope_dim, sizes.nope_dim + sizes.rope_dim
    both = random((num_rows, sizes.num_heads * head_dim + width), dtype, generator)
    frequencies = 1e2 ** -torch.linspace(0, 1, sizes.rope_dim // 2)
    table = RotaryEmbedding(frequencies, 64, scale=1.1).table
    weight = norm_weight(sizes.rank, dtype, generator)
    positions = torch.randint(64, (num_rows,), generator=generator)
    num_pages = 2 + -(-num_rows // PAGE_SIZE)  # the first is scratch
    slots = PAGE_SIZE + torch.randperm(PAGE_SIZE * (num_pages - 1), generator=generator)[:num_rows]
    cache = random((num_pages, PAGE_SIZE, 1, width), dtype, generator)
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    on_device = send(device, both, positions, slots, cache, table, weight)

    def run(function, both, positions, slots, cache, table, weight):
        q, kv = both.split((sizes.num_heads * head_dim, width), dim=1)
        q = q.unflatten(1, (sizes.num_heads, head_dim))
        norm = LatentNorm(table, weight, 1e-6)
        return function(kv, q, positions, slots, cache, norm, SCALE if fp8 else 1.0)

    out = run(store_latents, *on_device)
    kept = cache.clone()
    wanted = run(latents.store_latents, both, positions, slots, kept, table, weight)
    assert out.shape == (num_rows, sizes.num_heads, width)
    rotated = (out[..., sizes.rank :], wanted[..., sizes.rank :])
    assert_rounded_alike(rotated[0].contiguous(), rotated[1].contiguous())
    assert_rounded_alike(on_device[3], kept)
