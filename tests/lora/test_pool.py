"""Steps with several adapters and none: each row's logits are those that PEFT computes with the
adapter of its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.adapters import ALL, COMPUTED, STACKED, Base, Trained, base_of, train, train_on
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
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from minisgl.errors import UnsupportedModelError
from minisgl.lora.files import AdapterError, Pair, read_adapter
from minisgl.lora.pool import AdapterPool
from minisgl.models.registry import read_model_config

RANK, NUM_SLOTS = 48, 4
QUANTIZED_TOLERANCE = 1e-4


class Adapted:
    """The model of an adapter, with room for two."""

    def __init__(
        self, base: Base, dtype: torch.dtype = torch.float32, *, experts: bool = True
    ) -> None:
        impl = "adopted" if base.is_adopted else "auto"
        self.config = read_model_config(base.folder, model_impl=impl)
        self.model: Any = load_in_float32(self.config, base.folder)
        self.model.prepare()
        self.pool = AdapterPool.attach(
            self.model,
            self.config,
            num_loras=2,
            max_rank=RANK,
            num_slots=NUM_SLOTS,
            experts=experts,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    def load(self, place: int, trained: Trained) -> None:
        self.pool.load(place, self.pool.pack(read_adapter(trained.folder)))

    def paged(self) -> PagedModel:
        return PagedModel(self.model, self.config, page_size=4, adapted=self.pool.rows)

    def run(self, tokens: Sequence[int], number: int) -> Tensor:
        """The logits of a request with this adapter."""
        self.pool.numbers[0] = number
        return self.paged().run(tokens)


def steps_of(adapted: Adapted, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of three requests, whose slots are 0, 1 and 2 in each step: chunks of all, decode
    rows beside a chunk, and decode rows of all."""
    paged = adapted.paged()
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


@pytest.mark.parametrize("name", COMPUTED)
def test_each_row_has_the_adapter_of_its_slot(name: str, tmp_path: Path) -> None:
    both = [train(name, tmp_path / str(seed), seed) for seed in (1, 2)]
    adapted = Adapted(both[0].base)
    for place, trained in enumerate(both):
        adapted.load(place, trained)
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
        adapted.pool.numbers[:3] = torch.tensor(numbers)
        for request, found in enumerate(steps_of(adapted, tokens)):
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
    adapted = Adapted(base)
    adapted.load(0, trained)
    assert relative_error(adapted.run(tokens, 1), wanted) < QUANTIZED_TOLERANCE
    assert relative_error(adapted.run(tokens, 0), wanted) > 0.1


def test_a_slot_forgets_the_adapter_that_it_had(tmp_path: Path) -> None:
    """Also where the new one adapts less, at a lower rank."""
    base, tokens = base_of("moe"), [*range(3, 40)]
    some = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.down_proj"]}
    more, less = (
        train_on(base, load_reference(base.folder), options, tmp_path / str(options["r"]))
        for options in (ALL | STACKED | {"r": 20}, some | {"r": 4})
    )
    adapted = Adapted(base)
    for trained in (more, less):
        adapted.load(0, trained)
        found, wanted = adapted.run(tokens, 1), reference_logits(trained.model, tokens)
        assert relative_error(found, wanted) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "moe-stacked"])
def test_adapters_that_add_nothing_leave_the_bits_of_the_base(name: str, tmp_path: Path) -> None:
    trained = train(name, tmp_path)
    adapter = read_adapter(trained.folder)
    nothing = {path: Pair(pair.a, 0 * pair.b) for path, pair in adapter.pairs.items()}
    adapted, tokens = Adapted(trained.base), [*range(3, 15)]
    adapted.pool.load(1, adapted.pool.pack(replace(adapter, pairs=nothing)))
    plain = PagedModel(adapted.model, adapted.config, page_size=4).run(tokens)
    assert torch.equal(adapted.run(tokens, 2), plain)
    assert torch.equal(adapted.run(tokens, 0), plain)


def test_numbers_that_the_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    adapter = read_adapter(train("llama", tmp_path).folder)
    adapted = Adapted(base_of("llama3"), torch.float16)
    adapted.pool.pack(adapter)
    with pytest.raises(AdapterError, match=r"numbers that torch\.float16 cannot hold; allowed: sm"):
        adapted.pool.pack(replace(adapter, alpha=1e7))


def test_code_that_multiplies_itself_cannot_have_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of("GPTNeoXForCausalLM")
    Adapted(base)

    def forward(mlp: Any, x: Tensor) -> Tensor:
        inner = mlp.act(mlp.dense_h_to_4h(x))
        return mlp.dense_4h_to_h(inner) + F.linear(inner, mlp.dense_4h_to_h.weight)

    monkeypatch.setattr(GPTNeoXMLP, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="GPTNeoXForCausalLM cannot have adapters"):
        Adapted(base)


def test_experts_without_room_are_refused_and_take_none(tmp_path: Path) -> None:
    refused, taken = (train(name, tmp_path / name) for name in ("moe-stacked", "moe-router"))
    adapted = Adapted(taken.base, experts=False)
    with pytest.raises(AdapterError, match=r"experts have no room .*; allowed: .* --lora-experts"):
        adapted.load(0, refused)
    adapted.load(0, taken)
    assert adapted.pool._matrices.nbytes < Adapted(taken.base).pool._matrices.nbytes / 2
    tokens = [*range(3, 30)]
    found = adapted.run(tokens, 1)
    assert relative_error(found, reference_logits(taken.model, tokens)) < TOLERANCE


def test_experts_in_mxfp4_are_adapted(tmp_path: Path) -> None:
    quantised(base_of("gpt-oss").folder, tmp_path / "exact", tmp_path / "mxfp4")
    base = Base(tmp_path / "mxfp4", AutoModelForCausalLM)
    exact = load_reference(tmp_path / "exact")
    trained = train_on(base, exact, ALL | STACKED, tmp_path / "adapter")
    adapted = Adapted(base)
    adapted.load(0, trained)
    tokens = [*range(3, 30)]
    found = adapted.run(tokens, 1)
    assert relative_error(found, reference_logits(trained.model, tokens)) < TOLERANCE
