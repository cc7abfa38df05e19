"""Muon, an optimizer for weight matrices: momentum with orthogonalized updates.

Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.01
MOMENTUM = 0.95


def orthogonalized(stack: Tensor) -> Tensor:
    """Bring the singular values of each wide matrix near 1 by five Newton-Schulz steps."""
    x = stack.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


class Muon:
    """The optimizer of stacks of matrices, [num_layers, rows, columns].

    Stacks of equal shape (tall matrices are transposed) are orthogonalized in one call, which is
    much faster than one call each.
    """

    def __init__(self, stacks: Sequence[nn.Parameter]) -> None:
        self.stacks = stacks
        self.momenta = [torch.zeros_like(stack) for stack in stacks]
        self.same_shape: dict[tuple[int, ...], list[int]] = {}
        for number, stack in enumerate(stacks):
            self.same_shape.setdefault(tuple(sorted(stack.shape[1:])), []).append(number)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights and drop their gradients."""
        for numbers in self.same_shape.values():
            updates = orthogonalized(torch.cat([self.wide_update(number) for number in numbers]))
            sizes = [len(self.stacks[number]) for number in numbers]
            for number, update in zip(numbers, updates.split(sizes), strict=True):
                stack = self.stacks[number]
                _, rows, columns = stack.shape
                stack.mul_(1 - lr * WEIGHT_DECAY)
                stack.add_(
                    update.mT if rows > columns else update,
                    alpha=-lr * max(1.0, rows / columns) ** 0.5,
                )
                stack.grad = None

    def wide_update(self, number: int) -> Tensor:
        """The Nesterov momentum of a stack, transposed if its matrices are tall."""
        gradient, momentum = self.stacks[number].grad, self.momenta[number]
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(momentum, MOMENTUM)
        return update.mT if update.shape[1] > update.shape[2] else update
