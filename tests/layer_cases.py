"""The Triton kernels of the layers against the layers themselves, on any device.

The reference always runs on the CPU, whatever the layers do on a GPU. Rounding is part of what is
checked: in half precision a result may differ by a unit in the last place, and only where a value
lay at the border between two, which is rare; a rounding left out would show in every tenth place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.attention.base import Attention, ChunkRows, DecodeRows, LayerKV, StepInputs
from minisgl.kernels.triton_activation import silu_mul
from minisgl.kernels.triton_heads import turn_and_store
from minisgl.kernels.triton_norm import add_rms_norm, rms_norm
from minisgl.layers import mlp
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rope import RotaryEmbedding

MAX_SEQ_LEN = 4096
MAX_FLIPPED = 0.005  # of the elements in half precision; one is always allowed


class Heads(NamedTuple):
    """The heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    normed: bool


def check_rms_norm(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, size)
    norm, x = random_norm(size, dtype, generator), random((num_rows, size), dtype, generator)
    x_there, weight = send(device, x, norm.weight)
    out = rms_norm(x_there, weight, norm.eps)
    assert_rounded_alike(out, norm(x))
    assert torch.equal(x_there.cpu(), x)


def check_add_rms_norm(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, size)
    norm = random_norm(size, dtype, generator)
    delta, residual = (random((num_rows, size), dtype, generator) for _ in range(2))
    delta_there, residual_there, weight = send(device, delta, residual, norm.weight)
    out, sum_there = add_rms_norm(delta_there, residual_there, weight, norm.eps)
    normed, sum_here = norm.add(delta, residual)
    assert_rounded_alike(out, normed)
    assert torch.equal(sum_there.cpu(), sum_here)
    assert sum_there is residual_there
    assert torch.equal(delta_there.cpu(), delta)


def check_silu_mul(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = random((num_rows, 2 * size), dtype, seeded(num_rows, size))
    gate_up[0, 0], gate_up[-1, size - 1] = -200, 200  # where exp leaves float32
    assert_rounded_alike(silu_mul(*send(device, gate_up)), mlp.silu_mul(gate_up))


def check_heads(
    num_rows: int, heads: Heads, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Without norm to the bit; a quarter of the rows is padding, which writes to the scratch page.

    The page is left out of the comparison; all else of the caches must be as the reference left it.
    """
    num_heads, num_kv_heads, head_dim, normed = heads
    generator = seeded(num_rows, head_dim)
    total = num_heads + 2 * num_kv_heads
    qkv = random((num_rows, total * head_dim), dtype, generator)
    num_padded = num_rows // 4
    positions = torch.randint(MAX_SEQ_LEN, (num_rows,), generator=generator)
    num_slots = (num_rows // page_size + 3) * page_size
    slots = page_size + torch.randperm(num_slots - page_size, generator=generator)[:num_rows]
    for rows in (positions, slots):
        rows[num_rows - num_padded :] = 0
    shape = (num_slots // page_size, page_size, num_kv_heads, head_dim)
    kv = LayerKV(random(shape, dtype, generator), random(shape, dtype, generator))
    q_norm, k_norm = (random_norm(head_dim, dtype, generator) for _ in range(2))
    rope = RotaryEmbedding(1e4 ** -torch.linspace(0, 1, head_dim // 2), MAX_SEQ_LEN, scale=1.1)

    # Positions and slots are passed without their first element, so that they are not aligned.
    k_there, v_there, q_weight, k_weight = send(device, kv.k, kv.v, q_norm.weight, k_norm.weight)
    padded = [torch.cat((torch.zeros(1, dtype=torch.int64), rows)) for rows in (positions, slots)]
    positions_there, slots_there, qkv_there, table = send(device, *padded, qkv, rope.table)
    q_there = turn_and_store(
        qkv_there,
        positions_there[1:],
        table,
        slots_there[1:],
        k_there,
        v_there,
        q_weight if normed else None,
        k_weight if normed else None,
        q_norm.eps,
    )

    q, k, v = qkv.view(num_rows, total, head_dim).split(
        (num_heads, num_kv_heads, num_kv_heads), dim=1
    )
    if normed:
        q, k = q_norm(q), k_norm(k)
    rotation = rope(positions)
    decodes = DecodeRows(torch.empty((num_rows, 0)), torch.empty(num_rows), longest=0)
    chunks = ChunkRows(torch.empty((0, 0)), (), ())
    inputs = StepInputs(positions, positions, slots, decodes, chunks)
    attention = Attention(Echo(), Echo())
    q = attention(rotation.apply(q), rotation.apply(k), v, kv, inputs, 1.0)

    assert torch.equal(v_there[1:].cpu(), kv.v[1:])
    assert torch.equal(qkv_there.cpu(), qkv)
    assert q_there.is_contiguous()
    if normed:
        assert_rounded_alike(q_there, q)
        assert_rounded_alike(k_there[1:], kv.k[1:])
    else:
        assert torch.equal(q_there.cpu(), q)
        assert torch.equal(k_there[1:].cpu(), kv.k[1:])


class Echo:
    """Attention that returns its queries: what is left of Attention is the write to the cache."""

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        return q

    def prefill(self, q: Tensor, kv: LayerKV, rows: ChunkRows, scale: float) -> Tensor:
        raise AssertionError("there are no chunks")


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers))


def random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 2).to(dtype)


def random_norm(size: int, dtype: torch.dtype, generator: torch.Generator) -> RMSNorm:
    norm = RMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.copy_(1 + 0.3 * torch.randn(size, generator=generator))
    return norm


def send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copies on the device, complete: the kernels take some of their inputs for older than the
    launch before (triton_launch.py)."""
    sent = [tensor.detach().clone().to(device) for tensor in tensors]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sent


def assert_rounded_alike(got: Tensor, wanted: Tensor) -> None:
    got = got.cpu()
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert got.isfinite().all()
    if wanted.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=3e-6, atol=3e-6)
        return
    eps = torch.finfo(wanted.dtype).eps
    # Turning mixes two elements: the larger one's last place may be many of the smaller one's.
    torch.testing.assert_close(got, wanted, rtol=2 * eps, atol=eps * float(wanted.abs().max()))
    assert int((got != wanted).sum()) <= 1 + MAX_FLIPPED * wanted.numel()
