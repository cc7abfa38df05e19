"""Models with the kernels of --batch-invariant, in Triton's interpreter: logits are equal in bits
whatever rows are computed beside a row, and whether as part of a chunk or by itself.

Engines in bfloat16, with CUDA graphs, are in tests/gpu.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.attention_cases import Shape, paged_cache
from support.checkpoints import make_checkpoint, random_prompt, spec_named
from support.interpreter import sum_exactly
from support.paged import UNDEFINED_PAGE, PagedModel, PagedSequence

from minisgl.attention.base import Attention, AttentionBackend, DecodeBatch
from minisgl.attention.invariant_attention import InvariantAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config.resolve import MOST_INVARIANT_ROWS
from minisgl.kernels import dispatch
from minisgl.kernels.launch_options import tile_of_rows
from minisgl.kernels.linear import invariant_product
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.invariant_product import InvariantProduct
from minisgl.kernels.linear.tiles import LinearTiles
from minisgl.kernels.tuning import H200
from minisgl.layers.experts import FusedExperts
from minisgl.models.invariant import make_invariant
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs engines there")

NUM_TOKENS, NUM_DECODED = 22, 2
SMALL = {"num_layers": 1, "vocab_size": 131}
SPECS = {name: replace(spec_named(name), **SMALL) for name in ("qwen3", "moe")}
GPU = torch.device("cuda")
Make = Callable[[], PagedModel]


@pytest.fixture(autouse=True)
def _exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_exactly(monkeypatch.setattr)


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a pinned model with an empty cache. All have the same weights."""
    kernels = dispatch.triton_kernels()
    monkeypatch.setattr(dispatch, "_kernels_for", lambda device: kernels)
    folder = make_checkpoint(SPECS[request.param], tmp_path)
    config = read_model_config(folder)
    model = load_model(
        config,
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=128,
    )
    assert isinstance(model, CausalLM) and make_invariant(model, GPU) is model

    def of() -> PagedModel:
        paged = PagedModel(model, config, page_size=4)
        paged.attention = attention(InvariantAttention())
        return paged

    return of


def attention(backend: AttentionBackend) -> Attention:
    return Attention(backend, backend)


def in_bits(logits: Tensor) -> list[list[int]]:
    return logits.view(torch.int32).tolist()


def beside_others(paged: PagedModel, token_ids: list[int]) -> Tensor:
    """The logits of a sequence, in a step with a chunk of another one, then with decode rows."""
    own, other, third = PagedSequence(), PagedSequence(), PagedSequence()
    first = len(token_ids) - NUM_DECODED
    paged.step(chunks=[(third, token_ids[:9])])
    (_, found) = paged.step(chunks=[(other, token_ids[5:16]), (own, token_ids[:first])])
    parts = [found]
    for token in token_ids[first:]:
        _, found, _ = paged.step(
            decodes=[(other, 3), (own, token)], chunks=[(third, token_ids[2:19])]
        )
        parts.append(found)
    return torch.cat(parts)


def num_apart(make: Make) -> int:
    """How many of a sequence's logits are other ones than in one chunk."""
    token_ids = random_prompt(SPECS["qwen3"], NUM_TOKENS)
    in_chunks = make().run(token_ids, chunk=7, prefill=NUM_TOKENS - NUM_DECODED)
    whole = in_bits(make().run(token_ids))
    ways = (in_bits(in_chunks), in_bits(beside_others(make(), token_ids)))
    return sum(one != other for way in ways for one, other in zip(whole, way, strict=True))


@pytest.mark.parametrize("make", SPECS, indirect=True)
def test_bits_depend_on_no_other_row(make: Make) -> None:
    assert num_apart(make) == 0


@pytest.mark.parametrize("make", ["qwen3"], indirect=True)
def test_attention_that_is_not_pinned_shows(make: Make) -> None:
    def of() -> PagedModel:
        paged = make()
        paged.attention = attention(TritonAttention())
        return paged

    assert num_apart(of) > 0


@pytest.mark.parametrize("make", ["qwen3"], indirect=True)
def test_products_that_are_not_pinned_show(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles of k that depend on the number of rows."""

    def of(num_rows: int, tuning: object) -> LinearTiles:
        return LinearTiles(64, 16, 16 if num_rows < NUM_TOKENS else 128)

    monkeypatch.setattr(invariant_product, "tiles_of", of)
    assert num_apart(make) > 0


@pytest.mark.parametrize("make", ["moe"], indirect=True)
def test_experts_that_are_not_pinned_show(make: Make) -> None:
    for module in make().model.modules():
        if isinstance(module, FusedExperts):
            module.product.tiles = None
    assert num_apart(make) > 0


@pytest.mark.parametrize("dtype", [torch.float32, None], ids=["wide", "same"])
def test_each_row_of_a_product_is_that_of_the_row_alone(dtype: torch.dtype | None) -> None:
    weight, bias = torch.randn(150, 100).half(), torch.randn(150).half()
    x = torch.randn(140, 100).half()
    product = InvariantProduct(DenseProduct(weight, bias), dtype)
    whole = product(x)
    assert whole.dtype == (dtype or torch.float16)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=2e-3, atol=2e-3)
    for first, stop in ((0, 1), (5, 6), (3, 19), (2, 20), (10, 74), (1, 70), (139, 140)):
        assert torch.equal(product(x[first:stop]), whole[first:stop])


def test_rows_of_padding_attend_to_nothing() -> None:
    """Their keys are undefined, and so are their pages."""
    shape = Shape(2, 64, 4)
    kv, table = paged_cache(shape, [5, 33])
    lengths, q = torch.tensor([5, 33, 0, 0], dtype=torch.int32), shape.queries(4)
    padded = torch.cat((table, torch.full_like(table, UNDEFINED_PAGE)))
    backend = InvariantAttention()
    found = backend.decode(shape.call(q, kv), DecodeBatch(padded, lengths, 33))
    expected = backend.decode(shape.call(q[:2], kv), DecodeBatch(table, lengths[:2], 33))
    assert torch.equal(found[:2], expected) and not found[2:].any()


def test_norms_of_a_step_have_one_order() -> None:
    """Of as many rows as --batch-invariant lets a step have, padded rows included."""
    most = MOST_INVARIANT_ROWS + MOST_INVARIANT_ROWS + 1
    for size in (64, 2048, 4096, 5120):
        assert tile_of_rows(1, size, H200) == tile_of_rows(most, size, H200)
    assert tile_of_rows(1, 2048, H200) != tile_of_rows(most + 1, 2048, H200)
