"""The Triton kernels of the layers against their references, on any device.

The reference always runs on the CPU. Rounding is part of what is
checked: in half precision a result may differ by a unit in the last place, and only where a value
lay at the border between two, which is rare; a rounding left out would show in every tenth place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.config import UNSCALED, KVScales
from minisgl.kernels.elementwise import reference
from minisgl.kernels.elementwise.activation import gated_mul
from minisgl.kernels.elementwise.embedding import embed
from minisgl.kernels.elementwise.heads import qk_norm_rope_store_kv
from minisgl.kernels.elementwise.norm import add_rms_norm, rms_norm
from minisgl.kernels.elementwise.post_norm import add_post_norm
from minisgl.kernels.elementwise.reference import NormRope, PostNorm
from minisgl.kernels.elementwise.soft_cap import soft_cap
from minisgl.layers.rope import rotary_table

MAX_SEQ_LEN = 4096
EPS = 1e-5
MAX_FLIPPED = 0.005  # of the elements in half precision; one is always allowed


class Heads(NamedTuple):
    """The heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    normed: bool
    norms_v: bool = False
    v_is_k: bool = False


def check_embed(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compares bitwise. The ids lack their first element, so that they are not aligned."""
    generator = seeded(num_rows, size)
    weight = random((1000, size), dtype, generator)
    token_ids = torch.randint(1000, (num_rows + 1,), generator=generator)
    token_ids[-1] = 999
    ids_there, weight_there = send(device, token_ids, weight)
    out = embed(ids_there[1:], weight_there)
    assert out.dtype == dtype
    assert torch.equal(out.cpu(), reference.embed(token_ids[1:], weight))


def check_rms_norm(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, size)
    weight, x = norm_weight(size, dtype, generator), random((num_rows, size), dtype, generator)
    x_there, weight_there = send(device, x, weight)
    out = rms_norm(x_there, weight_there, EPS)
    assert_rounded_alike(out, reference.rms_norm(x, weight, EPS))
    assert torch.equal(x_there.cpu(), x)


def check_add_rms_norm(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, size)
    weight = norm_weight(size, dtype, generator)
    delta, residual = (random((num_rows, size), dtype, generator) for _ in range(2))
    delta_there, residual_there, weight_there = send(device, delta, residual, weight)
    out, sum_there = add_rms_norm(delta_there, residual_there, weight_there, EPS)
    normed, sum_here = reference.add_rms_norm(delta, residual, weight, EPS)
    assert_rounded_alike(out, normed)
    assert torch.equal(sum_there.cpu(), sum_here)
    assert sum_there is residual_there
    assert torch.equal(delta_there.cpu(), delta)


def check_add_post_norm(
    num_rows: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_norms: int,
    inner: bool,
    scaled: bool,
) -> None:
    """The second and third norm of the stream have weights in float32."""
    generator = seeded(num_rows, size)
    inner_weights, post_weight = (
        [norm_weight(size, dtype, generator) for _ in range(2)],
        norm_weight(size, dtype, generator),
    )
    scale = torch.tensor([0.6]).to(dtype)
    weights = [
        norm_weight(size, dtype if at == 0 else torch.float32, generator) for at in range(num_norms)
    ]
    *summands, residual = (random((num_rows, size), dtype, generator) for _ in range(2 + inner))

    def found(kernel: Any, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        one, other, post_weight, scale, *rest = tensors
        post = PostNorm(
            post_weight, EPS, (one, other) if inner else None, scale if scaled else None
        )
        weights, (*summands, residual) = rest[:num_norms], rest[num_norms:]
        normed, stream = kernel(tuple(summands), residual, post, tuple(weights))
        return normed, stream

    tensors = (*inner_weights, post_weight, scale, *weights, *summands, residual)
    sent = send(device, *tensors)
    normed_there, stream_there = found(add_post_norm, *sent)
    normed, stream = found(reference.add_post_norm, *tensors)
    assert stream_there is sent[-1]
    for got, wanted in zip((stream_there, *normed_there), (stream, *normed), strict=True):
        assert_rounded_alike(got, wanted)
    for there, here in zip(sent[:-1], tensors[:-1], strict=True):
        assert torch.equal(there.cpu(), here)


def check_soft_cap(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random((num_rows, size), dtype, seeded(num_rows, size)) * 20
    x[0, 0], x[-1, -1] = -1e4, 1e4
    x[0, size // 2 :] /= 1e3
    [x_there] = send(device, x)
    assert soft_cap(x_there, 30.0) is x_there
    assert_rounded_alike(x_there, reference.soft_cap(x, 30.0))


def check_gated_mul(
    num_rows: int, size: int, dtype: torch.dtype, device: torch.device, *, gelu: bool = False
) -> None:
    gate_up = random((num_rows, 2 * size), dtype, seeded(num_rows, size))
    gate_up[0, 0], gate_up[-1, size - 1] = -200, 200  # where exp leaves float32
    found = gated_mul(*send(device, gate_up), gelu)
    assert_rounded_alike(found, reference.gated_mul(gate_up, gelu))


def check_heads(
    num_rows: int,
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: KVScales | None = None,
) -> None:
    """Bitwise without norm; a quarter of the rows is padding, which writes to the scratch page.

    The page is left out of the comparison; all else of the caches must be as the reference left it.
    scales: of caches in FP8.
    """
    num_heads, num_kv_heads, head_dim, normed, norms_v, v_is_k = heads
    generator = seeded(num_rows, head_dim)
    total = num_heads + (1 if v_is_k else 2) * num_kv_heads
    qkv = random((num_rows, total * head_dim), dtype, generator)
    num_padded = num_rows // 4
    positions = torch.randint(MAX_SEQ_LEN, (num_rows,), generator=generator)
    num_slots = (num_rows // page_size + 3) * page_size
    slots = page_size + torch.randperm(num_slots - page_size, generator=generator)[:num_rows]
    for rows in (positions, slots):
        rows[num_rows - num_padded :] = 0
    shape = (num_slots // page_size, page_size, num_kv_heads, head_dim)
    kv_dtype = dtype if scales is None else torch.float8_e4m3fn
    k_cache, v_cache = (random(shape, dtype, generator).to(kv_dtype) for _ in range(2))
    weights = [norm_weight(head_dim, dtype, generator) for _ in range(2)] if normed else []
    table = rotary_table(1e4 ** -torch.linspace(0, 1, head_dim // 2), MAX_SEQ_LEN, scale=1.1)

    of_values: dict[str, Any] = {"eps": EPS, "norms_v": norms_v, "v_is_k": v_is_k}

    # Positions and slots are passed without their first element, so that they are not aligned.
    padded = [torch.cat((torch.zeros(1, dtype=torch.int64), rows)) for rows in (positions, slots)]
    positions_there, slots_there, qkv_there, table_there = send(device, *padded, qkv, table)
    k_there, v_there, *weights_there = send(device, k_cache, v_cache, *weights)
    q_there = qk_norm_rope_store_kv(
        qkv_there,
        positions_there[1:],
        slots_there[1:],
        k_there,
        v_there,
        NormRope(table_there, *weights_there, **of_values),
        scales or UNSCALED,
    )
    norm_rope = NormRope(table, *weights, **of_values)
    q = reference.qk_norm_rope_store_kv(
        qkv, positions, slots, k_cache, v_cache, norm_rope, scales or UNSCALED
    )

    if norms_v:
        assert_rounded_alike(v_there[1:], v_cache[1:])
    else:
        assert same_bits(v_there[1:], v_cache[1:])
    assert torch.equal(qkv_there.cpu(), qkv)
    assert q_there.is_contiguous()
    if normed:
        assert_rounded_alike(q_there, q)
        assert_rounded_alike(k_there[1:], k_cache[1:])
    else:
        assert torch.equal(q_there.cpu(), q)
        assert same_bits(k_there[1:], k_cache[1:])


def same_bits(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(*(tensor.cpu().view(torch.uint8) for tensor in (got, wanted)))


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers))


def random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 2).to(dtype)


def norm_weight(size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (1 + 0.3 * torch.randn(size, generator=generator)).to(dtype)


def send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copies on the device, complete: the kernels take some of their inputs for older than the
    launch before (launch_options.py)."""
    sent = [tensor.detach().clone().to(device) for tensor in tensors]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sent


def assert_rounded_alike(got: Tensor, wanted: Tensor) -> None:
    got = got.cpu()
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    eps = torch.finfo(wanted.dtype).eps
    if wanted.dtype == torch.float8_e4m3fn:
        got, wanted = got.half(), wanted.half()
    assert got.isfinite().all()
    if wanted.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=3e-6, atol=3e-6)
        return
    # Turning mixes two elements: the larger one's last place may be many of the smaller one's.
    torch.testing.assert_close(got, wanted, rtol=2 * eps, atol=eps * float(wanted.abs().max()))
    assert int((got != wanted).sum()) <= 1 + MAX_FLIPPED * wanted.numel()
