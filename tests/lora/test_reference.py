"""Steps with several adapters and none: each row's logits are those that PEFT computes with the
adapter of its request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import ALL, STACKED, Base, Trained, base_of, train, train_on
from support.checkpoints import (
    TOLERANCE,
    Spec,
    load_reference,
    random_prompt,
    reference_logits,
    relative_error,
)
from support.mxfp4_checkpoints import quantised
from support.native_models import load_in_float32
from support.paged import PagedModel, PagedSequence
from support.quantized import FORMATS, load_plain, quantize, round_inputs
from torch import Tensor
from transformers import AutoModelForCausalLM

from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.lora import reference
from minisgl.lora.files import AdapterError, Pair, read_adapter
from minisgl.lora.maps import Maps, maps_of
from minisgl.lora.reference import AdaptedProduct, Stacks
from minisgl.models.registry import read_model_config

RANK, NUM_SLOTS = 16, 4
QUANTIZED_TOLERANCE = 1e-4
NAMES = (
    *("llama", "llama-patterns", "qwen3", "moe-stacked", "moe-router", "moe-apart", "gpt-oss"),
    *("deepseek-v2", "deepseek-v3", "gemma4"),
    *("phi3", "gemma2", "mixtral", "qwen3-moe-adopted", "gpt-neox"),
)


def load(trained: Trained) -> tuple[Any, Any, Maps, Stacks]:
    """The model of an adapter, with room for two of them."""
    base = trained.base
    config = read_model_config(base.folder, model_impl="adopted" if base.is_adopted else "auto")
    model = load_in_float32(config, base.folder)
    model.prepare()
    maps = maps_of(model, config)
    stacks = Stacks.allocate(
        maps, 2, RANK, NUM_SLOTS, dtype=torch.float32, device=torch.device("cpu")
    )
    stacks.attach(maps)
    return model, config, maps, stacks


def steps_of(model: Any, config: Any, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of three requests, whose slots are 0, 1 and 2 in each step: chunks of all, decode
    rows beside a chunk, and decode rows of all."""
    paged = PagedModel(model, config, page_size=4)
    one, two, three = sequences = [PagedSequence() for _ in tokens]
    found = [
        paged.step(chunks=[(each, of[:9]) for each, of in zip(sequences, tokens, strict=True)]),
        paged.step(
            decodes=[(one, tokens[0][9]), (two, tokens[1][9])], chunks=[(three, tokens[2][9:29])]
        ),
        paged.step(
            decodes=[(one, tokens[0][10]), (two, tokens[1][10]), (three, tokens[2][29])],
        ),
    ]
    return [torch.cat([*of_request]) for of_request in zip(*found, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_each_row_has_the_adapter_of_its_slot(name: str, tmp_path: Path) -> None:
    both = [train(name, tmp_path / str(seed), seed) for seed in (1, 2)]
    model, config, maps, stacks = load(both[0])
    for number, trained in enumerate(both, start=1):
        stacks.fill(number, maps.fit(read_adapter(trained.folder), RANK))
    vocab_size = 90
    generator = torch.Generator().manual_seed(2)
    tokens = [
        torch.randint(vocab_size, (length,), generator=generator).tolist()
        for length in (11, 11, 30)
    ]
    plain = load_reference(both[0].base.folder, both[0].base.architecture)
    of_numbers = [plain, both[0].model, both[1].model]
    alone = [[reference_logits(model, of) for of in tokens] for model in of_numbers]
    for numbers in ((2, 0, 1), (0, 1, 2), (1, 1, 0), (0, 0, 0)):
        stacks.numbers[:3] = torch.tensor(numbers)
        for request, found in enumerate(steps_of(model, config, tokens)):
            wanted = alone[numbers[request]][request]
            assert relative_error(found, wanted) < TOLERANCE
            others = [of[request] for place, of in enumerate(alone) if place != numbers[request]]
            assert all(relative_error(wanted, other) > 1000 * TOLERANCE for other in others)


DENSE = Spec("dense", "Qwen3ForCausalLM", hidden_size=256, tied=True)
MOE = Spec(
    "moe",
    "Qwen3MoeForCausalLM",
    extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
)


@pytest.mark.parametrize(
    ("spec", "format"),
    [
        *((DENSE, format) for format in ("fp8-block", "ct-fp8-channel", "ct-fp8-static", "awq")),
        *((MOE, format) for format in ("ct-fp8-weights", "awq")),
    ],
    ids=str,
)
def test_a_quantised_base_rounds_its_rows_and_not_those_of_the_adapter(
    spec: Spec, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transformers, the weights are dequantised, and only their inputs rounded."""
    case = quantize(spec, FORMATS[format], tmp_path)
    plain = load_plain(case)
    round_inputs(case, plain, monkeypatch)
    options = ALL | (STACKED if spec is MOE else {})
    base = Base(case.folder, AutoModelForCausalLM)
    trained = train_on(base, plain, options, tmp_path / "adapter")
    tokens = random_prompt(spec, 12)
    wanted = reference_logits(trained.model, tokens)
    monkeypatch.undo()
    model, config, maps, stacks = load(trained)
    unadapted = PagedModel(model, config, page_size=4).run(tokens)
    stacks.fill(1, maps.fit(read_adapter(trained.folder), RANK))
    stacks.numbers[:] = 1
    found = PagedModel(model, config, page_size=4).run(tokens)
    assert relative_error(found, wanted) < QUANTIZED_TOLERANCE
    assert relative_error(unadapted, wanted) > 0.1


def test_a_part_without_an_adapter_is_cleared(tmp_path: Path) -> None:
    """Filling a number forgets the adapter that had it, also where the new one adapts less."""
    more, less = (train(name, tmp_path / name) for name in ("moe-stacked", "moe-down"))
    model, config, maps, stacks = load(more)
    stacks.numbers[:] = 1
    for trained in (more, less):
        stacks.fill(1, maps.fit(read_adapter(trained.folder), RANK))
    tokens = [*range(3, 40)]
    found = PagedModel(model, config, page_size=4).run(tokens)
    assert relative_error(found, reference_logits(less.model, tokens)) < TOLERANCE
    stacks.fill(1, {})
    base = load_reference(more.base.folder)
    found = PagedModel(model, config, page_size=4).run(tokens)
    assert relative_error(found, reference_logits(base, tokens)) < TOLERANCE


class Rounding(Product):
    """A product that takes what only it understands from norms and activations, as FP8 on a GPU."""

    def __init__(self, base: Product) -> None:
        self.base = base

    @property
    def weights(self) -> Any:
        return self.base.weights

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.base(x.round(decimals=1), rows)

    def gated_mul(self, gate_up: Tensor, gelu: bool = False) -> Any:
        raise AssertionError("asked for rounded rows, which an adapter cannot read")

    def of_norm(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("asked for the norm in one kernel, without the adapter")

    gated_mul_of_norm = add_to = of_kept_norm = of_norm


def test_an_adapter_multiplies_rows_that_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    numbers = torch.tensor([0, 1], dtype=torch.int32)
    rows = Rows.of(torch.tensor([1, 0, 1]), torch.arange(3))
    up = AdaptedProduct(
        Rounding(DenseProduct(drawn(12, 8))),
        [Pair(drawn(1, 2, 8), drawn(1, 6, 2)) for _ in range(2)],
        numbers,
    )
    down = AdaptedProduct(
        Rounding(DenseProduct(drawn(8, 6))), [Pair(drawn(1, 2, 6), drawn(1, 8, 2))], numbers
    )
    stream = drawn(3, 8)
    inner, kept = up.gated_mul_of_norm(
        Residual(stream.clone()), _Weights(torch.ones(8), 1e-6), down, rows
    )
    y = down.add_to(inner, kept, rows)
    assert y.delta is not None
    normed = stream / (stream.square().mean(1, keepdim=True) + 1e-6).sqrt()

    def product(of: AdaptedProduct, x: Tensor) -> Tensor:
        added = [p.b[0] @ p.a[0] for p in of._parts]
        adapted = rows.slots[:, None] * (x @ torch.cat(added).mT)
        return x.round(decimals=1) @ of.weights["weight"].mT + adapted

    gate, other = product(up, normed).chunk(2, 1)
    wanted = product(down, torch.nn.functional.silu(gate) * other)
    torch.testing.assert_close(y.delta, wanted)


class _Weights:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps


@pytest.mark.parametrize("mistake", ["slots", "order", "rank"])
def test_mistakes_change_logits(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train("llama", tmp_path)
    model, config, maps, stacks = load(trained)
    stacks.fill(1, maps.fit(read_adapter(trained.folder), RANK))
    stacks.numbers[0] = 1
    plain = reference._delta

    def delta(x: Tensor, parts: Sequence[Pair], number: int) -> Tensor:
        if mistake == "order" and len(parts) == 3:
            parts = [parts[0], parts[2], parts[1]]
        if mistake == "rank":
            parts = [Pair(part.a[:, :3], part.b[..., :3]) for part in parts]
        return plain(x, parts, number)

    monkeypatch.setattr(reference, "_delta", delta)
    if mistake == "slots":
        stacks.numbers[0] = 0
    tokens = [*range(3, 15)]
    found = PagedModel(model, config, page_size=4).run(tokens)
    assert relative_error(found, reference_logits(trained.model, tokens)) > 1000 * TOLERANCE


def test_attention_beside_experts_in_mxfp4_is_adapted_and_these_are_refused(
    tmp_path: Path,
) -> None:
    quantised(base_of("gpt-oss").folder, tmp_path / "exact", tmp_path / "mxfp4")
    base = Base(tmp_path / "mxfp4", AutoModelForCausalLM)
    refused, taken = (
        train_on(base, load_reference(tmp_path / "exact"), options, tmp_path / str(number))
        for number, options in enumerate((ALL | STACKED, ALL))
    )
    model, config, maps, stacks = load(taken)
    with pytest.raises(AdapterError, match=r"mlp\.experts.*, which is no map of this model"):
        maps.fit(read_adapter(refused.folder), RANK)
    stacks.fill(1, maps.fit(read_adapter(taken.folder), RANK))
    stacks.numbers[:] = 1
    tokens = [*range(3, 30)]
    found = PagedModel(model, config, page_size=4).run(tokens)
    assert relative_error(found, reference_logits(taken.model, tokens)) < TOLERANCE
