"""The linear maps of a network that drafts, of which a CausalLM sees to its own."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.kernels.linear import select_product
from minisgl.kernels.linear.product import Product
from minisgl.layers.latent_attention import linears_in, prepare_latents


def share_products(network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give the maps of a new network, whose activations have `dtype`, their kernels."""
    select_product.share_kernels(_products(network), dtype, device)


def prepare_products(network: nn.Module, dtype: torch.dtype) -> None:
    """Prepare the kernels for the weights that were filled in."""
    prepare_latents(network)
    select_product.prepare(_products(network), dtype)
    for linear in linears_in(network):
        linear.register_weights()


def _products(network: nn.Module) -> list[Product]:
    return [linear.product for linear in linears_in(network)]
