"""Weights that are filled again, where they are: the same numbers as those of a fresh model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adopted_checkpoints import write_checkpoint
from support.checkpoints import Spec, make_checkpoint, spec_named
from support.draft_networks import hybrid
from support.image_cases import QWEN, image_case, tower_of
from support.quantized import FORMATS, edit_tensors, quantize
from torch import Tensor, nn

from minisgl.device.lanes import Lanes
from minisgl.errors import CheckpointError, DeviceMemoryError, UnsupportedModelError
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.layers.linear import Linear
from minisgl.lora.products import AdaptedProduct
from minisgl.models import sleeping
from minisgl.models.filling import InMemory
from minisgl.models.loader import load_model
from minisgl.models.refilling import Refilling, TensorInfo
from minisgl.models.registry import read_model_config
from minisgl.models.sleeping import Sleep
from minisgl.models.transformer import CausalLM

CPU = torch.device("cpu")
# By transformers' code: norms that add one, joined maps, experts.
ADOPTED = ["GemmaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"]
NATIVE = ["Lfm2ForCausalLM", "LlamaForCausalLM"]
STATES = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
SPECS = ["deepseek-v2", "glm-flash", "gpt-oss", "qwen2", "qwen3-biased", "moe"]
QUANTIZED = [
    "fp8-block",
    "fp8-static",
    "fp8-transformers",
    "ct-fp8-channel",
    "ct-int4-zeros",
    "awq",
]
DENSE = Spec("dense", "Qwen3ForCausalLM", hidden_size=256, num_layers=1)
Tensors = dict[str, Tensor]


def checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """One, and another of the same model."""
    first, second = folder / "first", folder / "second"
    if name in SPECS:
        spec = spec_named(name)
        return make_checkpoint(spec, first), make_checkpoint(replace(spec, seed=1), second)
    if name in QUANTIZED:
        specs = ((DENSE, first), (replace(DENSE, seed=1), second))
        one, other = (quantize(spec, FORMATS[name], path).folder for spec, path in specs)
        return one, other
    first = hybrid(name)[1] if name in STATES else write_checkpoint(name, first)
    shutil.copytree(first, second)
    for path in second.glob("*.safetensors"):
        changed = {name: 1 - 1.25 * tensor for name, tensor in load_file(path).items()}
        save_file(changed, path, metadata={"format": "pt"})
    return first, second


def tensors_of(folder: Path) -> Tensors:
    return {
        name: each
        for path in folder.glob("*.safetensors")
        for name, each in load_file(path).items()
    }


def loaded(folder: Path, **options: str) -> tuple[Any, Refilling]:
    config = read_model_config(folder, **options)
    model = load_model(
        config,
        folder,
        dtype=torch.float32,
        device=CPU,
        load_format="safetensors",
        max_seq_len=64,
    )
    model.prepare()
    return model, Refilling(model, config, Lanes(CPU), rank=0)


def numbers(model: Any) -> Iterator[tuple[str, Tensor]]:
    module: nn.Module = model if isinstance(model, CausalLM) else model.module
    yield from module.state_dict().items()
    for path, part in module.named_modules():
        if (weights := getattr(part, "_weights", None)) is not None:  # what a norm has made of it
            yield f"{path} (made)", weights.weight


def infos(tensors: Tensors) -> list[TensorInfo]:
    return [TensorInfo.of(name, InMemory(tensor)) for name, tensor in tensors.items()]


def refill(refilling: Refilling, tensors: Tensors, *, partial: bool = False) -> None:
    refilling.begin(infos(tensors), partial)
    refilling.take(tensors.items())
    refilling.end()


def assert_same(one: Any, other: Any) -> None:
    for (name, number), (_, expected) in zip(numbers(one), numbers(other), strict=True):
        assert torch.equal(number, expected), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((each, {}) for each in (*NATIVE, *STATES, *SPECS, *QUANTIZED)),
        *((each, {"model_impl": "adopted"}) for each in ADOPTED),
        ("LlamaForCausalLM", {"quantization": "fp8"}),
        ("moe", {"quantization": "fp8"}),
    ],
    ids=str,
)
def test_refilled_weights_are_those_of_a_fresh_model(
    name: str, options: dict[str, str], tmp_path: Path
) -> None:
    first, second = checkpoints(name, tmp_path)
    model, refilling = loaded(first, **options)
    places = [number.data_ptr() for _, number in numbers(model)]
    fresh, _ = loaded(second, **options)
    refill(refilling, tensors_of(second))
    assert_same(model, fresh)
    assert [number.data_ptr() for _, number in numbers(model)] == places
    refill(refilling, tensors_of(first))
    original = loaded(first, **options)[0]
    assert_same(model, original)
    refilling.memory = Sleep([model], [], Lanes(CPU), lambda again: None)
    refilling.sleep(drops_weights=False)
    assert all(number.untyped_storage().nbytes() == 0 for _, number in numbers(model))
    refilling.wake(["weights"])
    assert_same(model, original)
    refilling.sleep(drops_weights=True)
    refilling.wake(["weights"])
    embeddings = [each for name, each in numbers(model) if name.endswith("embed_tokens.weight")]
    assert embeddings and not any(each.any() for each in embeddings)
    refill(refilling, tensors_of(second))
    assert_same(model, fresh)


def test_a_sleep_that_the_host_has_no_room_for_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, refilling = loaded(checkpoints("qwen2", tmp_path)[0])
    before = {name: number.clone() for name, number in numbers(model)}
    last, copied = torch.ones(1), sleeping._copied  # no update brings it

    def copied_but_the_last(storage: torch.UntypedStorage) -> list[Tensor]:
        if storage.data_ptr() == last.data_ptr():
            raise RuntimeError("no room")
        return copied(storage)

    refilling.memory = Sleep([[last], model], [], Lanes(CPU), lambda again: None)
    monkeypatch.setattr(sleeping, "_copied", copied_but_the_last)
    for drops_weights in (False, True):
        with pytest.raises(DeviceMemoryError, match="The host has no room"):
            refilling.sleep(drops_weights)
        for name, number in numbers(model):
            assert torch.equal(number, before[name]), name
    assert not refilling.lacks()


def test_what_has_no_room_to_wake_takes_none(tmp_path: Path) -> None:
    model, refilling = loaded(checkpoints("qwen2", tmp_path)[0])
    before = {name: number.clone() for name, number in numbers(model)}
    storage = mock.Mock(**{"nbytes.return_value": 1})
    cache: Any = SimpleNamespace(device=CPU, untyped_storage=lambda: storage)
    state: Any = SimpleNamespace(tensors=[cache])
    refilling.memory = Sleep([model], [state], Lanes(CPU), lambda again: None)
    refilling.sleep(drops_weights=False)
    storage.resize_.side_effect = [torch.OutOfMemoryError, None] * 2
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="Too little memory"):
            refilling.wake(["weights", "kv_cache"])
        assert not any(number.untyped_storage().nbytes() for _, number in numbers(model))
    refilling.wake(["weights"])
    for name, number in numbers(model):
        assert torch.equal(number, before[name]), name


def test_products_behind_adapters_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = checkpoints("qwen2", tmp_path)
    model, refilling = loaded(first)
    products, made = set[Product](), set[Product]()
    for module in model.modules():
        if isinstance(module, Linear):
            products.add(module.product)
            adapters: Any = None  # of no rows
            module.replace_product(AdaptedProduct(module.product, adapters, adapters))
    monkeypatch.setattr(DenseProduct, "refresh", lambda product: made.add(product))
    refill(refilling, tensors_of(second))
    assert products == made


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    first, second = checkpoints("LlamaForCausalLM", tmp_path)
    model, refilling = loaded(first)
    before = {name: number.clone() for name, number in numbers(model)}
    tensors = tensors_of(second)
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    wrong: list[tuple[Tensors, str]] = [
        ({norm: tensors[norm]}, "The update lacks weights: embed_tokens.weight, "),
        (tensors | {norm: tensors[norm][1:]}, f"The update: {norm} has the shape "),
        (tensors | {norm: tensors[norm].double()}, f"{norm} has the dtype torch.float64; expected"),
        (tensors | {"model.other": tensors[norm]}, r"does not take: model.other \(F32\)"),
    ]
    for given, said in wrong:
        with pytest.raises(CheckpointError, match=said):
            refill(refilling, given)
    for name, number in numbers(model):
        assert torch.equal(number, before[name])
    refill(refilling, {embedding: tensors[embedding]}, partial=True)
    changed = [name for name, number in numbers(model) if not torch.equal(number, before[name])]
    assert changed == ["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=f"{norm} has NaN or infinities"):
        refill(refilling, tensors | {norm: tensors[norm] / 0})
    refill(refilling, tensors)
    assert_same(model, loaded(second)[0])


def test_a_group_that_sends_a_wrong_number_first_changes_nothing(tmp_path: Path) -> None:
    """Its other tensors are received, for which the others in the group wait."""
    first, second = checkpoints("qwen2", tmp_path)
    model, refilling = loaded(first)
    tensors = tensors_of(second)
    wrong, *others = tensors
    sent = iter([tensors[wrong] / 0, *(tensors[name] for name in others)])
    group: Any = SimpleNamespace(packed=False, receive=lambda expected, packed: sent)
    refilling._groups["weights"] = group
    refilling.begin(infos(tensors), partial=False)
    with pytest.raises(CheckpointError, match=f"{wrong} has NaN or infinities"):
        refilling.take_group("weights", infos(tensors), packed=False)
    assert not [*sent] and not refilling.lacks()
    assert_same(model, loaded(first)[0])


def test_a_head_that_is_the_embedding_must_stay_it(tmp_path: Path) -> None:
    first, second = checkpoints("qwen2", tmp_path)
    model, refilling = loaded(first)
    tensors = tensors_of(second)
    head = tensors["model.embed_tokens.weight"]
    before = {name: number.clone() for name, number in numbers(model)}
    wrong = [(head[1:], "the shape"), (head[0], "the shape"), (head.double(), "the dtype")]
    for given, said in wrong:
        with pytest.raises(CheckpointError, match=f"The update: lm_head.weight has {said}"):
            refill(refilling, tensors | {"lm_head.weight": given})
    for name, number in numbers(model):
        assert torch.equal(number, before[name])
    refill(refilling, tensors | {"lm_head.weight": head.clone()})
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        refill(refilling, tensors | {"lm_head.weight": head + 1})


def test_what_cannot_be_filled_again_is_refused(tmp_path: Path) -> None:
    first, second = checkpoints("fp8-static", tmp_path)
    _, refilling = loaded(first)
    with pytest.raises(UnsupportedModelError, match="its scales of inputs cannot be known"):
        refill(refilling, tensors_of(second), partial=True)
    _, refilling = loaded(checkpoints("glm-flash", tmp_path / "latents")[0], quantization="fp8")
    with pytest.raises(UnsupportedModelError, match="latent attention keeps a quantised map"):
        refill(refilling, {})


def test_a_tower_is_updated_beside_layers_that_draft(tmp_path: Path) -> None:
    folder = shutil.copytree(image_case(QWEN).folder, tmp_path / "copy")
    drafts = {"mtp.fc.weight": torch.randn(64, 128)}
    edit_tensors(folder, lambda tensors: tensors.update(drafts))
    _, refilling = loaded(folder)
    tower = tower_of(QWEN)
    refilling.tower = tower.places
    tensors = {name: 1 - tensor for name, tensor in tensors_of(folder).items()}
    before = {name: weight.clone() for name, weight in tower.module.named_parameters()}
    refilling.begin(infos(tensors), partial=False)
    refilling.take(tensors.items())
    refilling.end()
    assert not refilling.lacks()
    for name, weight in tower.module.named_parameters():
        assert torch.equal(weight, 1 - before[name]), name
