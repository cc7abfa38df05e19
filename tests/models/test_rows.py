"""What a step says of its rows reaches every product, so that a product may have an adapter for
each request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import adopted_checkpoints, gemma_checkpoints
from support.checkpoints import TOLERANCE, make_checkpoint, relative_error, spec_named
from support.native_models import load_in_float32
from support.paged import PagedModel, PagedSequence
from support.parity import batch, case_of, greedy, load_engine
from torch import Tensor

from minisgl.engine import AsyncEngine
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.rows import Rows
from minisgl.layers.latent_attention import linears_in
from minisgl.layers.linear import Linear
from minisgl.models.registry import read_model_config

ADOPTED = ("Gemma2ForCausalLM", "Qwen3MoeForCausalLM")
VOCAB_SIZE = 100  # all of the models below have more tokens


class Adapted(Product):
    """A product that adds another matrix to W for each slot. The other methods are the defaults,
    which hand the rows to `__call__`."""

    def __init__(self, base: Product, added: Tensor) -> None:
        """added: [num_slots, n, k]."""
        self._base, self._added = base, added

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._base.weights

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        y = self._base(x)
        return y if rows is None else y + torch.einsum("rk,rnk->rn", x, self._added[rows.slots])


def folder_of(name: str, folder: Path) -> Path:
    if name in ADOPTED:
        return adopted_checkpoints.write_checkpoint(name, folder)
    if name == "gemma4":
        return gemma_checkpoints.checkpoint_of("experts")[0]
    return make_checkpoint(spec_named(name), folder)


def load(name: str, folder: Path) -> tuple[Any, Any, list[tuple[Linear, Tensor]]]:
    """A model, its config, and its linear maps with what two adapters add to each."""
    config = read_model_config(folder, model_impl="adopted" if name in ADOPTED else "auto")
    model = load_in_float32(config, folder)
    generator, found = torch.Generator().manual_seed(1), []
    for linear in linears_in(model._body if name in ADOPTED else model.layers):
        n, k = linear.product.weights["weight"].shape
        added = torch.randn((2, n, k), generator=generator) * 0.3 * k**-0.5
        found.append((linear, added))
    return model, config, found


@pytest.mark.parametrize("name", ["llama3", "moe", "gpt-oss", "deepseek-v2", "gemma4", *ADOPTED])
@torch.no_grad()
def test_an_adapter_of_each_slot_is_its_sum_with_the_weights(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    tokens = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = []
    for slot in range(2):
        model, config, maps = load(name, folder)
        for linear, added in maps:
            linear.product.weights["weight"].add_(added[slot])
        wanted.append(PagedModel(model, config, page_size=4).run(tokens))
    assert relative_error(wanted[0], wanted[1]) > 100 * TOLERANCE
    model, config, maps = load(name, folder)
    for linear, added in maps:
        linear.replace_product(Adapted(linear.product, added))
    paged, sequences = PagedModel(model, config, page_size=4), (PagedSequence(), PagedSequence())
    one, other = sequences
    steps = [
        paged.step(chunks=[(one, tokens[:9]), (other, tokens[:4])]),
        paged.step(decodes=[(one, tokens[9])], chunks=[(other, tokens[4:11])]),
        paged.step(decodes=[(one, tokens[10]), (other, tokens[11])]),
    ]
    for sequence, found, expected in zip(sequences, zip(*steps, strict=True), wanted, strict=True):
        logits = torch.cat([*found])
        assert relative_error(logits, expected[: sequence.length]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama3", {"tp": 2, "dp_attention": True}), ("qwen3", {"speculative": "ngram"})],
    ids=str,
)
def test_products_get_the_rows_that_they_multiply(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all ranks; only the head gets none."""
    case, plain = case_of(name), DenseProduct.__call__

    def checked(self: DenseProduct, x: Tensor, rows: Rows | None = None) -> Tensor:
        may_be_head = len(self.weight) >= case.spec.vocab_size // options.get("tp", 1)
        assert may_be_head if rows is None else len(rows.slots) == len(x)
        return plain(self, x, rows)

    monkeypatch.setattr(DenseProduct, "__call__", checked)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, max_prefill_length=7, **options)) as engine:
            outputs = await batch(engine, case.prompts[:3], [greedy(8)] * 3)
        for output, expected in zip(outputs, case.runs, strict=False):
            assert output.token_ids == expected.token_ids[:8]

    asyncio.run(run())
