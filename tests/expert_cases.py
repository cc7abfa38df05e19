"""Checks of the experts' kernels that run in the interpreter and on a GPU alike."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels import experts, triton_experts

TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 2e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
}


def random_experts(
    num_experts: int, hidden_size: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(num_experts, 2 * size, hidden_size, device=device) / hidden_size**0.5
    down = torch.randn(num_experts, hidden_size, size, device=device) / size**0.5
    return gate_up.to(dtype), down.to(dtype)


def check_choose(
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    *,
    normalize: bool,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
) -> None:
    # No two alike, in any dtype here: which of equals comes first is left open.
    order = torch.stack([torch.randperm(num_experts) for _ in range(num_rows)])
    logits = (order.float() / 16 - 3).to(dtype).to(device)
    chosen, weights = triton_experts.choose(logits, num_chosen, normalize=normalize, pdl=pdl)
    wanted, wanted_weights = experts.choose_reference(logits, num_chosen, normalize=normalize)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, wanted_weights, **TOLERANCES[dtype])


def check_nan(
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    *,
    normalize: bool,
    device: torch.device,
    pdl: bool,
) -> None:
    """A row that has gone wrong chooses experts that there are, and harms no other row."""
    hidden_size, size = 48, 24
    gate_up, down = random_experts(num_experts, hidden_size, size, torch.float32, device)
    x = torch.randn(num_rows, hidden_size, device=device)
    logits = torch.randn(num_rows, num_experts, device=device)
    x[1:], logits[1] = float("nan"), float("inf")
    logits[2:] = float("nan")
    chosen, weights = triton_experts.choose(logits, num_chosen, normalize=normalize, pdl=pdl)
    assert int(chosen.min()) >= 0 and int(chosen.max()) < num_experts
    assert all(len(set(row)) == num_chosen for row in chosen.tolist())
    assert weights[1:].isnan().all()
    out = triton_experts.apply(x, gate_up, down, chosen, weights, pdl=pdl)
    wanted = experts.apply_reference(x[:1], gate_up, down, chosen[:1], weights[:1])
    torch.testing.assert_close(out[:1], wanted, **TOLERANCES[torch.float32])
    assert out[1:].isnan().all()


def check_apply(
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    hidden_size: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
    crowded: bool = False,
) -> None:
    """crowded: all rows choose the same experts."""
    gate_up, down = random_experts(num_experts, hidden_size, size, dtype, device)
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    logits = torch.randn(1 if crowded else num_rows, num_experts, device=device)
    chosen, weights = experts.choose_reference(
        logits.expand(num_rows, -1).to(dtype), num_chosen, normalize=True
    )
    out = triton_experts.apply(x, gate_up, down, chosen, weights, pdl=pdl)
    wanted = experts.apply_reference(x, gate_up, down, chosen, weights)
    torch.testing.assert_close(out, wanted, **TOLERANCES[dtype])
    # A row's sum is the same alone, but for the tiles that its experts are worked on in.
    alone = triton_experts.apply(x[:1], gate_up, down, chosen[:1], weights[:1], pdl=pdl)
    torch.testing.assert_close(alone, out[:1], **TOLERANCES[dtype])
