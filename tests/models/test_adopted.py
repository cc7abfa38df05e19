"""Architectures that run with transformers' code: the engine's tokens against transformers'.

Twelve of different kinds run here; ARCHITECTURES=all runs all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import capturable
from support.adopted_cases import SHARED, case_of, check, config_of
from support.adopted_checkpoints import found_in, full_config, small_config, write_checkpoint
from support.checkpoints import Spec, load_reference, make_checkpoint
from support.parity import check as check_tokens
from support.parity import load_engine, three_prompts

from minisgl.config import EngineConfig
from minisgl.engine.startup import load
from minisgl.errors import CheckpointError, ConfigError, MinisglError, UnsupportedModelError
from minisgl.kernels.elementwise import reference
from minisgl.models import registry
from minisgl.models.adopted import attend, known, own_rows, swap
from minisgl.models.adopted import load as load_blueprint
from minisgl.models.adopted.architectures import ADOPTED, REFUSED, TOWERS
from minisgl.models.adopted.attend import Call, Recorder
from minisgl.models.adopted.config import AdoptedConfig
from minisgl.models.adopted.discover import Discovered, discover
from minisgl.models.adopted.modules import NormOf
from minisgl.models.adopted.proof import Small, prove, prove_parts
from minisgl.models.adopted.reader import model_class, transformers_config
from minisgl.models.adopted.stages import OtherStages
from minisgl.models.adopted.swap import Way
from minisgl.models.config import NativeConfig
from minisgl.models.registry import FAMILIES, read_model_config
from minisgl.shards import Shard

# Windows in some layers or of a mask alone, soft caps, sinks, values of another width, scales of
# embedding, residual and logits, positions from a table, norms with 1 + w, parallel blocks,
# mixtures of experts.
IN_CI = (
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "MiMoV2FlashForCausalLM"),
    *("GraniteForCausalLM", "Cohere2ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"),
    *("Olmo3ForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM", "LlamaForCausalLM"),
    *("Gemma4ForCausalLM", "PhimoeForCausalLM"),
)
# Text parts with the names of weights that published checkpoints have.
TOWERS_IN_CI = (
    *("Gemma3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    "Emu3ForConditionalGeneration",  # whose text part transformers has under no model_type
)
ALL = os.environ.get("ARCHITECTURES") == "all"
TESTED = sorted(ADOPTED) if ALL else IN_CI
TESTED_TOWERS = sorted(TOWERS) if ALL else TOWERS_IN_CI


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as made:
        yield Path(made)
    case_of.cache_clear()
    config_of.cache_clear()


@pytest.mark.parametrize("architecture", TESTED)
def test_tokens_equal_those_of_transformers(architecture: str, folder: Path) -> None:
    case = case_of(architecture, folder)
    check(case, alone=False, page_size=16, max_prefill_length=7)
    cached = check(case, alone=True, page_size=1)
    assert cached[1] >= SHARED  # of the prompt before it


# Maps that are split by outputs and inputs, experts, packed maps, sinks, and one KV head that two
# ranks share.
DIVIDED_IN_CI = ("Gemma3ForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Olmo3ForCausalLM")
# Layers of two kinds, whose norms and scales are unlike those of others.
STAGED = TESTED if ALL else ("Gemma3ForCausalLM",)


@pytest.mark.parametrize("architecture", TESTED if ALL else DIVIDED_IN_CI)
def test_ranks_and_stages_give_the_same_tokens(architecture: str, folder: Path) -> None:
    case = case_of(architecture, folder)
    config = config_of(case, "adopted")
    assert isinstance(config, AdoptedConfig)
    if config.divides.one_rank is None:
        check(case, alone=False, tp=2, page_size=4, max_prefill_length=7)
    if config.divides.one_stage is None and architecture in STAGED:
        check(case, alone=False, pp=2, page_size=4, max_prefill_length=7)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_ranks_divide_the_heads_of_one_map(num_kv_heads: int, tmp_path: Path) -> None:
    """Queries, keys and values are one map of Phi-3. A single KV head is that of both ranks."""
    spec = Spec(
        *("phi3", "Phi3ForCausalLM"),
        num_kv_heads=num_kv_heads,
        num_layers=2,
        extra={"pad_token_id": None},
    )
    folder = make_checkpoint(spec, tmp_path)
    facts = read_model_config(folder).facts()
    assert facts.divides_heads and facts.can_divide(2) and facts.num_whole_weights == 0
    check_tokens(three_prompts(spec, folder, load_reference(folder)), tp=2, page_size=4)


BY_REQUEST_IN_CI: list[tuple[str, dict[str, Any]]] = [
    ("MixtralForCausalLM", {"ep": True, "padded": 4})
]


@pytest.mark.parametrize(
    ("architecture", "options"), [(name, {}) for name in TESTED] if ALL else BY_REQUEST_IN_CI
)
def test_ranks_that_divide_requests_give_the_same_tokens(
    architecture: str, options: dict[str, Any], folder: Path
) -> None:
    case = case_of(architecture, folder)
    config = config_of(case, "adopted")
    assert isinstance(config, AdoptedConfig)
    if config.divides.one_rank is None and not config.found.has_position_table:
        given = {"tp": 2, "dp_attention": True, "page_size": 4, "max_prefill_length": 7}
        check(case, alone=False, **given, **options)


def test_requests_are_not_divided_where_a_table_has_the_positions(folder: Path) -> None:
    """For its rows are added to those of all ranks."""
    config = read_model_config(write_checkpoint("GPT2LMHeadModel", folder / "gpt2"))
    with pytest.raises(ConfigError, match=r"^--dp-attention: in this model rows of a table"):
        config.by_request()


@pytest.mark.parametrize("architecture", TESTED_TOWERS)
def test_the_text_part_gives_the_tokens_of_the_whole_model(architecture: str, folder: Path) -> None:
    case = case_of(architecture, folder)
    check(case, alone=False, page_size=16, max_prefill_length=7, model_impl="auto")
    note = config_of(case, "auto").notes[0]
    assert note.startswith(f"model: the text part of {architecture}; left out: ")
    assert note.endswith(("vision", "vq"))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_is_found_by_either_spelling_and_must_fit(
    tmp_path: Path, folder: Path, prefix: str
) -> None:
    case = case_of("Gemma3ForConditionalGeneration", folder)
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    stored = load_file(case.folder / "model.safetensors")
    tensors = {
        re.sub(r"^(model\.language_model|language_model\.model)\.", prefix, name): tensor
        for name, tensor in stored.items()
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    check(replace(case, folder=tmp_path), alone=False)

    norm = tensors.pop(f"{prefix}norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights: norm\.weight"):
        load_engine(tmp_path)
    tensors |= {f"{prefix}norm.weight": norm, f"{prefix}norm.other": norm.clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"does not take: .*norm\.other"):
        load_engine(tmp_path)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GptOssForCausalLM"])
def test_retraction_and_other_prefixes_leave_the_tokens_as_they_are(
    architecture: str, folder: Path
) -> None:
    case = case_of(architecture, folder)
    few = {"num_pages": 28, "page_size": 4, "max_seq_len_override": 90}
    check(case, alone=False, schedule_conservativeness=0.02, **few)
    check(case, alone=False, cache_type="naive", page_size=4)


def test_auto_takes_our_own_code_where_there_is_some(folder: Path) -> None:
    made = case_of("LlamaForCausalLM", folder).folder
    assert isinstance(read_model_config(made), NativeConfig)
    assert isinstance(read_model_config(made, model_impl="adopted"), AdoptedConfig)


def test_a_native_family_gives_the_same_tokens_either_way(folder: Path) -> None:
    case = case_of("LlamaForCausalLM", folder)
    check(case, alone=False, model_impl="native")
    check(case, alone=False, model_impl="adopted")


# -- what is captured ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", TESTED)
def test_a_step_can_be_captured(architecture: str, folder: Path) -> None:
    config = config_of(case_of(architecture, folder), "adopted")
    assert isinstance(config, AdoptedConfig)
    capturable.check(config)


def test_experts_of_transformers_are_not_taken_for_ones_that_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    config = config_of(case_of("GptOssForCausalLM", folder), "adopted")
    assert isinstance(config, AdoptedConfig)
    monkeypatch.setattr(swap, "expert_kind", lambda module: None)
    with pytest.raises(capturable.CaptureRefusedError, match="_grouped_mm reads numbers"):
        capturable.check(config)


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def set_at(rows: torch.Tensor, at: Any) -> None:
    rows[at] = 1.0


@pytest.mark.parametrize(
    "code",
    [
        lambda rows: torch.tensor([1.0, 2.0], device="meta"),
        lambda rows: torch.as_tensor([1.0, 2.0], device="meta"),
        lambda rows: rows.new_tensor(1.0),
        lambda rows: torch.arange(5).to(rows.device),
        lambda rows: rows.copy_(torch.zeros(5, 4)),
        lambda rows: rows[torch.arange(5)],
        lambda rows: rows[rows > 0],
        lambda rows: set_at(rows, on_meta(3, dtype=torch.int64)),
        lambda rows: rows[0, 0].item(),
        lambda rows: rows.nonzero(),
        lambda rows: rows.repeat_interleave(on_meta(5, dtype=torch.int64), dim=0),
    ],
)
def test_what_torch_refuses_in_a_capture_is_found(code: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(capturable.CaptureRefusedError), capturable.Capturing():
        code(on_meta(5, 4))


@pytest.mark.parametrize(
    "code",
    [
        lambda rows: torch.full((3,), 1.0, device=rows.device) + torch.arange(3, device="meta"),
        lambda rows: rows * torch.tensor(2.0),
        lambda rows: torch.where(rows > 0, rows, 0.0).masked_fill(rows > 0, float("-inf")),
        lambda rows: set_at(rows, (slice(None), 0)),
        lambda rows: rows[on_meta(3, dtype=torch.int64)].repeat_interleave(2, dim=0),
        lambda rows: torch.arange(5) + 1,
    ],
)
def test_what_torch_captures_is_let_through(code: Callable[[torch.Tensor], Any]) -> None:
    with capturable.Capturing():
        code(on_meta(5, 4))


# -- the proof ------------------------------------------------------------------------------------


def _first_part(size: int, rank: int, num_ranks: int) -> Shard:
    return Shard(0, size // num_ranks, size)


def _from_the_start(first: int, size: int, whole: int) -> Shard:
    return Shard(first // size * size % whole // 2, size, whole)


def _own_part(self: Any, part: torch.Tensor) -> torch.Tensor:
    return part


def proves(architecture: str) -> None:
    prove(model_class(architecture), full_config(architecture), found_in(architecture))


@cache
def proven(architecture: str) -> tuple[Any, Any, Discovered, Way]:
    """The model of an architecture, its config, and what is found in them, which proves right."""
    config, model = full_config(architecture), model_class(architecture)
    found = found_in(architecture)
    return model, config, found, prove(model, config, found)[1]


def changed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let every call of the attention be computed with another spec."""
    as_it_is = Call.of

    def of(*args: Any) -> Call:
        call = as_it_is(*args)
        values = {
            name: change(getattr(call.spec, name))
            for name, change in changes.items()
            if getattr(call.spec, name) is not None
        }
        return Call(replace(call.spec, **values), call.sinks)

    monkeypatch.setattr(Call, "of", of)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("Gemma3ForCausalLM", {"window": lambda window: window + 1}),
        ("Gemma3ForCausalLM", {"window": lambda window: window - 1}),
        ("Gemma3ForCausalLM", {"window": lambda window: None}),
        ("Gemma3ForCausalLM", {"scale": lambda scale: scale * 1.01}),
        ("Gemma2ForCausalLM", {"softcap": lambda softcap: None}),
    ],
)
def test_the_proof_finds_another_attention(
    monkeypatch: pytest.MonkeyPatch, architecture: str, change: dict[str, Any]
) -> None:
    model, config, found, _ = proven(architecture)
    changed(monkeypatch, **change)
    with pytest.raises(UnsupportedModelError, match="first in the attention of layer 0"):
        prove(model, config, found)


@pytest.mark.parametrize(
    ("architecture", "values", "windows"),
    [
        ("PhimoeForCausalLM", {"sliding_window": 2047}, (2047,) * 4),
        ("PhimoeForCausalLM", {"sliding_window": None}, (None,) * 4),
        (
            "Qwen2MoeForCausalLM",
            {
                "sliding_window": 2047,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 2047) * 2,
        ),
        # A window that no layer has.
        ("Dots1ForCausalLM", {"sliding_window": 4096}, (None,) * 4),
    ],
)
def test_windows_that_only_a_mask_has_are_found_and_proven(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    values: dict[str, Any],
    windows: tuple[int | None, ...],
) -> None:
    config, model = full_config(architecture), model_class(architecture)
    for name, value in (values | {"num_hidden_layers": 4}).items():
        setattr(config, name, value)
    found = discover(model, config)
    assert tuple(spec.window for spec in found.attention) == windows
    prove(model, config, found)
    if any(windows):
        monkeypatch.setattr(attend, "_mask", lambda **given: None)
        with pytest.raises(UnsupportedModelError, match="first in the attention of layer"):
            prove(model, config, discover(model, config))


def test_the_proof_finds_sinks_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_is = Call.of

    def without_sinks(*args: Any) -> Call:
        return Call(replace(as_it_is(*args).spec, sinks=False), None)

    monkeypatch.setattr(Call, "of", without_sinks)
    with pytest.raises(UnsupportedModelError, match="first in the attention of layer 0"):
        proves("GptOssForCausalLM")


def test_the_proof_finds_norms_without_their_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NormOf, "prepare", lambda self: None)
    with pytest.raises(UnsupportedModelError, match="something else"):
        proves("Gemma3ForCausalLM")


def test_the_proof_finds_a_layer_that_reads_the_keys_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_it_is = Recorder.attend

    def attend_to_the_first(self: Recorder, *args: Any) -> Any:
        out = as_it_is(self, *args)
        if self.sources[-1] != len(self.sources) - 1:
            self.sources[-1] = 1 - self.sources[-1]  # the copy has two layers with keys
        return out

    found_in("Gemma4ForCausalLM")  # as it is
    monkeypatch.setattr(Recorder, "attend", attend_to_the_first)
    with pytest.raises(UnsupportedModelError, match=r"something else|does not run"):
        proves("Gemma4ForCausalLM")


def test_a_router_that_normalises_otherwise_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong guess is found by the proof, too."""
    monkeypatch.setattr(
        known, "_normalizes", lambda each: False if "Router" in type(each).__name__ else None
    )
    with pytest.raises(UnsupportedModelError, match=r"something else|other logits"):
        proves("MixtralForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "mistake"),
    [
        # A part of the outputs that is another rank's.
        ("LlamaForCausalLM", ("minisgl.models.adopted.swap.even_shard", _first_part)),
        ("Phi3ForCausalLM", ("minisgl.models.adopted.swap.Shard", _from_the_start)),
        # A sum that is left out.
        ("MixtralForCausalLM", ("minisgl.models.adopted.proof._ThreadRank.all_reduce", _own_part)),
    ],
)
def test_the_proof_of_ranks_finds_mistakes(
    monkeypatch: pytest.MonkeyPatch, architecture: str, mistake: tuple[str, Any]
) -> None:
    model, config, found, way = proven(architecture)
    prove_parts(model, config, found, way, ranks=True, stages=True)
    monkeypatch.setattr(*mistake)
    with pytest.raises(UnsupportedModelError, match="cannot be divided over ranks"):
        prove_parts(model, config, found, way, ranks=True, stages=False)


def test_the_proof_of_ranks_that_divide_requests_finds_mistakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of one rank for those of the other, and a rank without its own."""
    model, config, found, way = proven("LlamaForCausalLM")
    parts: dict[str, Any] = {"ranks": True, "stages": False, "by_request": True}
    prove_parts(model, config, found, way, **parts)
    whole = own_rows.of_all

    def swapped(own: torch.Tensor, shares: Sequence[int], ranks: Any) -> torch.Tensor:
        return torch.cat(whole(own, shares, ranks).split([*shares])[::-1])

    def without(own: torch.Tensor, shares: Sequence[int], ranks: Any) -> torch.Tensor:
        return whole(own if ranks.rank else torch.zeros_like(own), shares, ranks)

    for mistake in (swapped, without):
        monkeypatch.setattr(own_rows, "of_all", mistake)
        with pytest.raises(UnsupportedModelError, match="cannot be divided over ranks"):
            prove_parts(model, config, found, way, **parts)


def test_the_proof_of_stages_finds_rows_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, found, way = proven("Gemma3ForCausalLM")
    as_it_is = OtherStages.begin
    monkeypatch.setattr(
        OtherStages,
        "begin",
        lambda self, rows: as_it_is(self, None if rows is None else rows.flip(0)),
    )
    with pytest.raises(UnsupportedModelError, match="cannot be divided over stages"):
        prove_parts(model, config, found, way, ranks=False, stages=True)


def test_the_proof_finds_keys_and_values_that_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attend, "_store", lambda k, v, kv, slots: None)
    monkeypatch.setattr(reference, "store", lambda k, slots, cache, scale: None)
    with pytest.raises(UnsupportedModelError, match="something else"):
        proves("LlamaForCausalLM")


def test_the_proof_finds_logits_without_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl.models.adopted.model import AdoptedModel

    as_they_are = AdoptedModel.logits
    monkeypatch.setattr(
        AdoptedModel, "logits", lambda self, hidden: as_they_are(self, hidden) * 1.01
    )
    with pytest.raises(UnsupportedModelError, match="other logits"):
        proves("GraniteForCausalLM")


def test_the_proof_finds_a_module_that_computes_something_else_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_it_is = Small.part

    def swapped(self: Small, *args: Any, **options: Any) -> Any:
        part = as_it_is(self, *args, **options)
        layer = part.module.model.layers[0].self_attn
        layer.q_proj, layer.k_proj = layer.k_proj, layer.q_proj
        return part

    monkeypatch.setattr(Small, "part", swapped)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(model.layers.0.self_attn"):
        proves("LlamaForCausalLM")


def test_an_argument_that_is_not_known_is_refused() -> None:
    rows = torch.zeros(1, 2, 3, 8)
    Call.of("X", rows, rows, rows, None, {"scaling": 1.0, "position_ids": rows})
    for arguments in ({"bias": rows}, {"is_causal": False}, {"dropout": 0.1}):
        with pytest.raises(UnsupportedModelError, match=r"^X "):
            Call.of("X", rows, rows, rows, None, arguments)
    with pytest.raises(UnsupportedModelError, match="mask of its own"):
        Call.of("X", rows, rows, rows, rows, {})


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks weights: norm.weight"),
        (
            lambda tensors: tensors.update({"model.norm.other": torch.zeros(3)}),
            "does not take: model.norm.other",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"has the shape \[3\]",
        ),
    ],
)
def test_a_checkpoint_must_fit_exactly(
    tmp_path: Path, folder: Path, change: Any, message: str
) -> None:
    made = case_of("GraniteForCausalLM", folder).folder
    (tmp_path / "config.json").write_bytes((made / "config.json").read_bytes())
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_engine(tmp_path)


def test_layers_that_draft_are_left_out_and_no_others(tmp_path: Path, folder: Path) -> None:
    made = case_of("GraniteForCausalLM", folder).folder
    config = json.loads((made / "config.json").read_text())
    number = config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors, file = load_file(made / "model.safetensors"), tmp_path / "model.safetensors"
    tensors[f"model.layers.{number}.enorm.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    read = read_model_config(tmp_path)
    load_engine(tmp_path, model_config=read)
    assert "layers that draft tokens, left out: 1" in read.notes

    tensors[f"model.layers.{number + 1}.enorm.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"does not take: model.layers.{number + 1}.enorm"):
        load_engine(tmp_path, model_config=read)


@pytest.mark.parametrize(
    ("renamed", "mistake", "message"),
    [
        (r"\.block_sparse_moe\.", None, "does not take: .*block_sparse_moe"),
        (r"w1", "w3", "twice|lacks weights"),
    ],
)
def test_a_renaming_that_is_missing_or_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, renamed: str, mistake: str | None, message: str
) -> None:
    """Of Mixtral, whose checkpoints call experts otherwise than its code does."""
    made = case_of("MixtralForCausalLM", folder).folder
    as_it_is = load_blueprint.names_of

    def names_of(model: Any, **options: Any) -> Any:
        right = as_it_is(model, **options)
        if mistake is None:
            return lambda name: name.removeprefix("model.")
        return lambda name: right(re.sub(renamed, mistake, name))

    monkeypatch.setattr(load_blueprint, "names_of", names_of)
    with pytest.raises(CheckpointError, match=message):
        load_engine(made, model_impl="adopted")


def test_weights_that_change_places_change_tokens(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    case = case_of("MixtralForCausalLM", folder)
    as_it_is = load_blueprint.names_of
    swapped = {"w1": "w3", "w3": "w1"}

    def names_of(model: Any, **options: Any) -> Any:
        right = as_it_is(model, **options)
        return lambda name: right(re.sub("w[13]", lambda found: swapped[found[0]], name))

    monkeypatch.setattr(load_blueprint, "names_of", names_of)
    with pytest.raises(AssertionError):
        check(case, alone=False)


def config_folder(folder: Path, architecture: str, **values: Any) -> Path:
    config = small_config(architecture).to_dict() | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        ({"quantization_config": {"bits": 4}}, {}, UnsupportedModelError, "supported are FP8"),
        ({"architectures": ["XForCausalLM"]}, {}, UnsupportedModelError, "minisgl models"),
        (
            {"architectures": ["XForCausalLM"]},
            {"model_impl": "adopted"},
            UnsupportedModelError,
            "no code that comes with a checkpoint",
        ),
        ({}, {"model_impl": "native"}, UnsupportedModelError, "leave --model-impl native out"),
    ],
)
def test_what_does_not_run_is_refused_with_the_reason(
    tmp_path: Path,
    values: dict[str, Any],
    options: dict[str, Any],
    error: type[MinisglError],
    message: str,
) -> None:
    made = config_folder(tmp_path, "GraniteForCausalLM", **values)
    with pytest.raises(error, match=message):
        load_engine(made, load_format="dummy", **options)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            "BloomForCausalLM",
            "of its 2 layers, 0 have .* attend in a way of their own",
        ),
        ("FalconForCausalLM", "its attention has implementations of its own"),
        ("MegatronBertForCausalLM", "depends on numbers that it reads on the host"),
        ("MptForCausalLM", "its code stops with AttributeError"),
    ],
)
def test_code_that_does_not_run_is_refused_in_a_sentence(architecture: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{architecture} .*{message}"):
        discover(model_class(architecture), full_config(architecture))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("GraniteMoeHybridForCausalLM", "its layers keep a state"),
        ("Mistral4ForCausalLM", "it attends over latents"),
        ("GPTNeoForCausalLM", "its attention has implementations of its own"),
        ("MiniMaxM3ForCausalLM", "its attention chooses the tokens that it reads"),
        ("MiniMaxM3VLForCausalLM", "its attention chooses the tokens that it reads"),
        ("Phi4MMForCausalLM", "its weights are stored among those of adapters"),
    ],
)
def test_an_architecture_that_is_known_not_to_run_is_refused_by_name(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    """Before anything else of its config.json is read."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(UnsupportedModelError, match=f"^Architecture {architecture} .*{reason}"):
        read_model_config(tmp_path)


def test_experts_of_any_size_are_discovered() -> None:
    """Of 72 bytes a row, which grouped products of bfloat16 do not take."""
    config = full_config("Dots1ForCausalLM")
    config.moe_intermediate_size, config.num_hidden_layers = 36, 4
    found = discover(model_class("Dots1ForCausalLM"), config)
    assert (72, config.hidden_size) in found.expert_sizes


def test_an_architecture_is_known_by_its_published_name(tmp_path: Path) -> None:
    made = config_folder(tmp_path, "PhimoeForCausalLM", architectures=["PhiMoEForCausalLM"])
    assert read_model_config(made).architecture == "PhimoeForCausalLM"


IMPLEMENTATION = "kernels-community/flash-attn3"


CHOOSING = ("attn_implementation", "_attn_implementation", "experts_implementation")


def chosen_by(config: Any) -> tuple[Any, Any]:
    return config._attn_implementation, config._experts_implementation


@pytest.mark.parametrize("value", [IMPLEMENTATION, {"": IMPLEMENTATION}, "flash_attention_2"])
@pytest.mark.parametrize("name", CHOOSING)
def test_no_field_of_a_config_chooses_code(name: str, value: Any) -> None:
    plain = {"model_type": "mixtral", name: value}
    assert chosen_by(transformers_config(plain, "MixtralForCausalLM")) == (None, None)
    towers = {"model_type": "gemma3", "text_config": {name: value}, "vision_config": {name: value}}
    with_towers = transformers_config(towers, "Gemma3ForConditionalGeneration")
    for part in (with_towers, with_towers.text_config, with_towers.vision_config):
        assert chosen_by(part) == (None, None)


def test_no_field_of_a_checkpoint_chooses_code(tmp_path: Path) -> None:
    made = config_folder(tmp_path, "MixtralForCausalLM", **dict.fromkeys(CHOOSING, IMPLEMENTATION))
    config = read_model_config(made)
    assert isinstance(config, AdoptedConfig)
    assert chosen_by(transformers_config(config.values, config.architecture)) == (None, None)


def test_an_architecture_that_attends_in_chunks_is_refused_by_the_proof(tmp_path: Path) -> None:
    made = config_folder(tmp_path, "Llama4ForCausalLM")
    with pytest.raises(UnsupportedModelError, match="it attends in chunks"):
        read_model_config(made)
    with pytest.raises(UnsupportedModelError, match="something else here than in transformers"):
        read_model_config(made, model_impl="adopted")


def test_a_text_part_that_does_not_run_is_refused_with_the_reason(
    tmp_path: Path, folder: Path
) -> None:
    made = case_of("SmolVLMForConditionalGeneration", folder).folder
    values = json.loads((made / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"text_config": {"model_type": "mamba"}}))
    with pytest.raises(UnsupportedModelError, match=r"^The text part of this model, Mamba"):
        read_model_config(tmp_path)
    names = {"architectures": ["Llama4ForConditionalGeneration"]}
    path.write_text(json.dumps(values | names))
    with pytest.raises(UnsupportedModelError, match="it attends in chunks"):
        read_model_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="leave --model-impl native out"):
        read_model_config(made, model_impl="native")


def test_dummy_weights_run_and_the_log_tells_of_windows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = config_folder(tmp_path, "Gemma2ForCausalLM")
    options = {"device": "cpu", "dtype": "float32", "num_pages": 20, "max_seq_len_override": 40}
    engine = load(EngineConfig(model=str(made), load_format="dummy", **options))
    engine.runner.close()
    # One layer of two sees 5 of 40 tokens.
    assert "1 of 2 layers have sliding windows: a request of 40 tokens reads 56 %" in caplog.text
    assert engine.model.attention[0].extras() == ("sliding windows", "soft caps")


def test_the_documents_list_the_architectures() -> None:
    page = (Path(registry.__file__).parent / "README.md").read_text()
    listed = {*re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", page)}
    assert listed == ADOPTED
    assert {*re.findall(r"`(\w+ForConditionalGeneration)`", page)} == TOWERS
    others = len(ADOPTED - FAMILIES.keys())
    front = (Path(registry.__file__).parents[2] / "README.md").read_text()
    assert f"[{others} other decoders](minisgl/models/README.md#adopted-models)" in front


def test_the_lists_do_not_overlap_and_are_names_of_transformers() -> None:
    assert not ADOPTED & REFUSED.keys()
    assert not FAMILIES.keys() & REFUSED.keys()
    for architecture in ADOPTED:
        model_class(architecture)
