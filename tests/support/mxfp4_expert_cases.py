"""Checks of the kernels for experts in MXFP4 and NVFP4, for the interpreter and for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.expert_cases import CLAMPED, random_logits
from support.weight_only_cases import nvfp4_weights

from minisgl.kernels.linear.nvfp4 import Nvfp4Weights
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.mxfp4 import EXPONENT_BIAS, Mxfp4Experts, Mxfp4Weights, packed_scales
from minisgl.kernels.moe.quantized_experts import Nvfp4Experts
from minisgl.kernels.moe.reference import ByRouter, Chosen, ExpertBiases, Routing
from minisgl.kernels.moe.routing import topk_softmax
from minisgl.kernels.tuning import tuning_of

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a row


def random_experts(
    num_experts: int,
    hidden_size: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    plain: bool = False,
) -> Mxfp4Experts:
    """Of any bits, with scales from 1/16 to 1 of what keeps the size of x. plain: without biases,
    and with silu."""

    def weights(n: int, k: int) -> Mxfp4Weights:
        words = torch.randint(-(1 << 15), 1 << 15, (num_experts, n, k // 4), dtype=torch.int16)
        exponents = torch.randint(-4, 1, (num_experts, n, k // 32)) - k.bit_length() // 2
        scales = packed_scales((exponents + EXPONENT_BIAS).to(torch.uint8))
        return Mxfp4Weights(words.to(device), scales.to(device))

    biases = ExpertBiases.allocate(num_experts, hidden_size, size, dtype)
    for bias in biases:
        bias.normal_()
    biases = ExpertBiases(*(bias.to(device) for bias in biases))
    gate_up, down = weights(2 * size, hidden_size), weights(hidden_size, size)
    return Mxfp4Experts(gate_up, down, *(() if plain else (biases, CLAMPED)))


def random_nvfp4_experts(
    num_experts: int,
    hidden_size: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    plain: bool = False,
) -> Nvfp4Experts:
    """As random_experts, with gelu if not plain."""

    def weights(n: int, k: int) -> Nvfp4Weights:
        made, exact = nvfp4_weights(num_experts, n, k, device=device, is_tiled=True)
        made.factor.mul_(k**-0.5 / float(exact.std()))  # keeps the size of x
        return made

    return Nvfp4Experts(weights(2 * size, hidden_size), weights(hidden_size, size), gelu=not plain)


def check(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
    plain: bool = False,
    make: Callable[..., Mxfp4Experts | Nvfp4Experts] = random_experts,
) -> None:
    """The tiles for these rows and for many give what the reference gives, a row alone the same
    bits, and added to a stream the rounded sum."""
    routing = Routing(top_k, normalize=True)
    experts = make(num_experts, hidden_size, size, dtype=dtype, device=device, plain=plain)
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    logits = random_logits(num_rows, num_experts, dtype, device)
    stream = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    choice, first = ByRouter(logits, routing), ByRouter(logits[:1], routing)
    wanted = experts.reference(x, choice)
    tuning = tuning_of(device)
    hows = [choose_tiles(rows, experts, top_k, dtype, tuning) for rows in (1, num_rows, 5000)]
    for how in dict.fromkeys(hows):
        out, squares = fused_experts(x, choice, experts, tiles=how, pdl=pdl)
        assert squares is None and out.dtype == dtype
        error = (out - wanted).double().norm(dim=1) / wanted.double().norm(dim=1)
        assert float(error.max()) <= TOLERANCES[dtype], (how, float(error.max()))
        if num_rows > 1:
            alone, _ = fused_experts(x[:1], first, experts, tiles=how, pdl=pdl)
            assert torch.equal(alone, out[:1])

        # The same experts, given.
        given = Chosen(*topk_softmax(logits, routing, pdl=pdl))
        again, _ = fused_experts(x, given, experts, tiles=how, pdl=pdl)
        assert torch.equal(again, out)

        rows = stream.clone()
        added, squares = fused_experts(x, choice, experts, rows, tiles=how, pdl=pdl)
        assert added is rows and torch.equal(rows, (stream.float() + out.float()).to(dtype))
        assert squares is not None and len(squares) == num_rows
        torch.testing.assert_close(squares.sum(1), rows.float().square().sum(1))
