"""Checks of the experts' kernels where a rank has some of them, for the interpreter and a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from support import expert_cases, fp8_expert_cases, int4_expert_cases, mxfp4_expert_cases
from support.fp8_expert_cases import Blocks
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Weights, Int4Weights
from minisgl.kernels.moe import reference, routing
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, InputScales, Int4Experts
from minisgl.kernels.moe.reference import (
    ByRouter,
    Choice,
    Chosen,
    ExpertBiases,
    Routing,
)
from minisgl.shards import Shard

NUM_EXPERTS, HIDDEN, INNER = 5, 128, 64
# Of three experts and of two; and of one, two, one and one.
DIVISIONS = ((0, 3, 5), (0, 1, 3, 4, 5))

Compute = Callable[[Tensor, Choice], Tensor]
# The sum over all experts; the kernels' over those of a part.
Made = tuple[Compute, Callable[[slice], Compute]]


def dense(device: torch.device, *, clamped: bool = False) -> Made:
    experts = expert_cases.random_experts(
        NUM_EXPERTS, HIDDEN, INNER, torch.float32, device, clamped=clamped
    )

    def of(part: slice) -> Compute:
        biases = experts.biases
        cut = None if biases is None else ExpertBiases(*(bias[part] for bias in biases))
        own = experts._replace(gate_up=experts.gate_up[part], down=experts.down[part], biases=cut)
        return lambda x, choice: fused_experts(x, choice, own, pdl=False)[0]

    return lambda x, choice: reference.fused_experts(x, experts, choice), of


def fp8(device: torch.device, blocks: Blocks, activations: Activations) -> Made:
    experts = fp8_expert_cases.random_experts(
        NUM_EXPERTS, HIDDEN, INNER, blocks, activations, device
    )

    def of(part: slice) -> Compute:
        def cut(weights: Fp8Weights) -> Fp8Weights:
            return Fp8Weights(weights.data[part], weights.scale[part], weights.block)

        scales = experts.input_scales
        own = Fp8Experts(
            cut(experts.gate_up),
            cut(experts.down),
            activations=activations,
            input_scales=scales and InputScales(*(scale[part] for scale in scales)),
        )
        return lambda x, choice: fused_experts(x, choice, own, pdl=False)[0]

    return experts.reference, of


def int4(device: torch.device) -> Made:
    experts = int4_expert_cases.random_experts(
        NUM_EXPERTS, HIDDEN, INNER, (64, 32), symmetric=False, device=device
    )

    def of(part: slice) -> Compute:
        def cut(weights: Int4Weights) -> Int4Weights:
            assert weights.zero is not None
            return Int4Weights(weights.data[part], weights.scale[part], weights.zero[part])

        own = Int4Experts(cut(experts.gate_up), cut(experts.down))
        return lambda x, choice: fused_experts(x, choice, own, pdl=False)[0]

    return experts.reference, of


def mxfp4(device: torch.device) -> Made:
    experts = mxfp4_expert_cases.random_experts(
        NUM_EXPERTS, HIDDEN, INNER, dtype=torch.float32, device=device
    )

    def of(part: slice) -> Compute:
        def cut(weights: Mxfp4Weights) -> Mxfp4Weights:
            return Mxfp4Weights(weights.data[part], weights.scale[part])

        assert experts.biases is not None
        biases = ExpertBiases(*(bias[part] for bias in experts.biases))
        own = Mxfp4Experts(cut(experts.gate_up), cut(experts.down), biases, experts.clamped)
        return lambda x, choice: fused_experts(x, choice, own, pdl=False)[0]

    return experts.reference, of


FORMATS: dict[str, Callable[[torch.device], Made]] = {
    "dense": dense,
    "dense, clamped": lambda device: dense(device, clamped=True),
    "fp8, static": lambda device: fp8(device, None, Activations.STATIC),
    "fp8, blocks": lambda device: fp8(device, ((64, 128), (128, 64)), Activations.GROUP),
    "int4": int4,
    "mxfp4": mxfp4,
}


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill what torch.empty makes with NaN, which shows in the result where it is read."""
    torch.use_deterministic_algorithms(True)  # which torch.utils.deterministic says more of
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_parts(made: Made, num_rows: int, *, device: torch.device, tolerance: float) -> None:
    """The sum over the parts is what one product over all experts gives, whoever chooses; a part of
    which no row has chosen an expert gives zeros. tolerance: of a row of that product, beside the
    reference."""
    whole, of = made
    x = torch.randn(num_rows, HIDDEN, device=device)
    logits = expert_cases.random_logits(num_rows, NUM_EXPERTS, torch.float32, device)
    choice = ByRouter(logits, Routing(2, normalize=True))
    given = Chosen(*routing.topk_softmax(*choice, pdl=False))
    undivided, wanted = of(slice(0, NUM_EXPERTS))(x, choice), whole(x, choice)
    error = (undivided - wanted).double().norm(dim=1) / wanted.double().norm(dim=1)
    assert float(error.max()) <= tolerance, float(error.max())
    for bounds in DIVISIONS:
        total = torch.zeros_like(wanted)
        for first, end in itertools.pairwise(bounds):
            share = Shard(first, end - first, NUM_EXPERTS)
            with unwritten_is_nan():
                own = of(slice(first, end))(x, routing.choose_of(choice, share, pdl=False))
                again = of(slice(first, end))(x, routing.choose_of(given, share, pdl=False))
            assert torch.equal(own, again)
            mine = (given.experts >= first) & (given.experts < end)
            assert torch.equal(own.any(dim=1), mine.any(dim=1))
            total += own
        torch.testing.assert_close(total, undivided, rtol=1e-6, atol=1e-6)


def check_choose_of(num_rows: int, *, device: torch.device) -> None:
    """The kernel chooses what the reference does."""
    logits = expert_cases.random_logits(num_rows, 60, torch.float32, device)
    choice = ByRouter(logits, Routing(4, normalize=True))
    for own in (Shard(0, 7, 60), Shard(7, 20, 60), Shard(59, 1, 60)):
        got = routing.choose_of(choice, own, pdl=False)
        wanted = reference.choose_of(choice, own)
        assert torch.equal(got.experts, wanted.experts) and got.experts.dtype == torch.int32
        torch.testing.assert_close(got.weights, wanted.weights)
        assert got.num_experts == 60 and int(got.experts.max()) < own.size
