"""The scales of INT4 weights, which a GPU needs in one form only."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.linear.weight_only.weight_only_product import WeightOnlyInt4Product
from minisgl.kernels.linear.weight_only.weights import values
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.formats.int4 import CompressedInt4
from minisgl.shards import whole

HALF = torch.float16


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_words_have_all_that_is_read_of_the_scales(symmetric: bool) -> None:
    torch.manual_seed(0)
    scheme = CompressedInt4(group_size=128, symmetric=symmetric, scale_dtype=HALF)
    format = WeightFormat(dtype=HALF, scheme=scheme, scheme_of=lambda name: scheme)
    layer = Linear(whole(256), {"map": whole(20)}, format)
    weight = layer.product.weight
    weight.data.random_(-(2**15), 2**15)
    weight.scale.uniform_(0.1, 1)
    if weight.zero is not None:
        weight.zero.random_(0, 16)
    exact = weight.dequantized().to(HALF)

    product = layer.product = WeightOnlyInt4Product(weight)
    words = product._prepared(HALF)
    product.forget_scales()
    layer.register_weights()
    assert torch.equal(values(words, HALF), exact)
    assert (product.span, product.shape) == (128, (20, 256))
    names = {"weight_scale"} if symmetric else {"weight_scale", "weight_zero"}
    assert {name for name, weight in layer.named_parameters() if weight.is_meta} == names
