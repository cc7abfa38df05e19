"""Layers of products that round their inputs, whose launches overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct, share_kernels
from minisgl.kernels.residual import Residual


def check_overlap(layers: Sequence[Mapping[str, TensorCoreProduct]], x: Tensor) -> None:
    """Launches that overlap in a graph give to the bit what they give one at a time. layers: their
    products by the names qkv, gate_up and down. x: [rows, size], overwritten."""
    share_kernels([product for products in layers for product in products.values()])
    weight = SimpleNamespace(weight=torch.randn_like(x[0]), eps=1e-6)

    def run(x: Tensor, *, calm: bool) -> Tensor:
        def wait() -> None:
            if calm:
                torch.cuda.synchronize()

        residual = Residual(x.clone())
        wait()
        for products in layers:
            y, rows = products["qkv"].of_norm(residual, weight)
            wait()
            residual = Residual(rows, delta=y)
            hidden, rows = products["gate_up"].gated_mul_of_norm(residual, weight, products["down"])
            wait()
            residual = products["down"].add_to(hidden, rows)
            wait()
        assert residual.delta is not None
        return residual.rows + residual.delta

    run(x, calm=True)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, calm=False)
    for _ in range(20):
        x.normal_()
        expected = run(x, calm=True)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
