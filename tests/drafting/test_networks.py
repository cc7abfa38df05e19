"""The networks that draft, token by token as in plain torch, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    LATENT_64,
    TOLERANCE,
    Spec,
    load_reference,
    make_checkpoint,
    random_prompt,
    relative_error,
)
from support.draft_networks import (
    Head,
    HeadReference,
    Mtp,
    drafts_after,
    drafts_of_model,
    head_tensors,
    hybrid,
    latent,
    let_last_layer_draft,
    logits_after,
    save_head,
)
from support.native_models import leave_inputs
from support.quantized import FORMATS, edit_tensors, load_plain, quantize
from torch import Tensor
from transformers import PreTrainedModel

from minisgl.attention.base import (
    Attention,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import KVSpec
from minisgl.drafting.networks.loading import NetworkConfig, load_network, read_mtp, read_network
from minisgl.drafting.networks.network import DraftNetwork
from minisgl.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.residual import Residual, joined
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Taps
from minisgl.models.formats.fp8 import Fp8
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

_FOLDER = TemporaryDirectory()
PATH = Path(_FOLDER.name)
CPU = torch.device("cpu")
NUM_DRAFTS = 5
LENGTHS = (2, 9, 24)
TARGET = Spec("target", "LlamaForCausalLM", num_layers=4)
SMALL = Spec("small", "LlamaForCausalLM", num_layers=1, hidden_size=64, num_heads=2, seed=3)
HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
LATENTS = ("deepseek-v3", "glm-flash")

HEADS = {
    "specforge": Head(TARGET, taps=(1, 2, 3)),
    "speculators": Head(TARGET, taps=(0, 2, 3), speculators=True, own_embedding=True),
    # As of Qwen2.5-VL.
    "whole-vocabulary": Head(
        TARGET,
        taps=(1, 2, 3),
        draft_vocab_size=499,
        num_kv_heads=4,
        values={"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    ),
    # As of Qwen3.5.
    "share-of-heads": Head(
        TARGET,
        taps=(1, 2, 3),
        rotary_share=0.25,
        seed=6,
        values={
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 10_000,
                "rope_type": "default",
            },
        },
    ),
    "norms": Head(
        TARGET,
        taps=(1, 2, 3),
        speculators=True,
        norms=frozenset(("norm_before_residual", "norm_before_fc", "norm_output")),
    ),
    "norm-of-each": Head(TARGET, taps=(1, 3, 2), norms=frozenset(("fc_norm",))),
}


@cache
def target() -> tuple[PreTrainedModel, ModelConfig, CausalLM]:
    return loaded(make_checkpoint(TARGET, PATH / "target"))


def loaded(folder: Path) -> tuple[PreTrainedModel, ModelConfig, CausalLM]:
    config = read_model_config(folder)
    model = load_model(config, folder, **options())
    assert isinstance(model, CausalLM)
    model.prepare()
    return load_reference(folder), config, model


def options() -> dict[str, Any]:
    kinds = {"dtype": torch.float32, "device": CPU, "load_format": "auto"}
    return kinds | {"max_seq_len": 128}


def network_of(config: NetworkConfig, model: CausalLM) -> DraftNetwork:
    network = load_network(config, model, **options())
    network.prepare()
    return network


def drafted(
    network: DraftNetwork, token_ids: Sequence[int], hidden: Tensor | None, num: int
) -> list[int]:
    """Greedy drafts."""
    drafts: list[int] = drafted_logits(network, token_ids, hidden, num).argmax(-1).tolist()
    return drafts


@torch.inference_mode()
def drafted_logits(
    network: DraftNetwork, token_ids: Sequence[int], hidden: Tensor | None, num: int
) -> Tensor:
    """Those of greedy drafts: the rows of all tokens at once, then row by row."""
    attention = Attention(TorchAttention(), TorchAttention())
    states = [
        PagedKV.of(spec, *(torch.full((8, 8, *shape), torch.nan) for shape in spec.shapes))
        for spec in network.layer_specs("float32")
        if isinstance(spec, KVSpec)
    ]
    pages = torch.tensor([[5, 2, 7, 1, 6]], dtype=torch.int32)

    def batch(token_ids: Sequence[int], start: int) -> ForwardBatch:
        positions = torch.arange(start, start + len(token_ids))
        nothing, none = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
        decodes = DecodeBatch(pages[:0], nothing, 0)
        chunks = PrefillBatch.of(pages[:0], (), ())
        if start:
            lengths = torch.tensor([start + 1], dtype=torch.int32)
            decodes = DecodeBatch(pages, lengths, start + 1)
        else:
            chunks = PrefillBatch.of(pages, (0,), (len(token_ids),))
        mapping = pages[0].long()[positions // 8] * 8 + positions % 8
        slots = BatchSlots(none, Segments(none, none, nothing))
        rows = Rows.of(torch.zeros_like(positions), positions)
        return ForwardBatch(torch.tensor(token_ids), rows, rows, mapping, decodes, chunks, slots)

    rows = list(token_ids[1:] if network.follows else token_ids)
    found: list[Tensor] = []
    start = 0
    while True:
        result = network(batch(rows, start), hidden, states, attention)
        found.append(network.logits(result.rows)[-1, : TARGET.vocab_size])
        if len(found) == num:
            return torch.stack(found)
        start += len(rows)
        hidden = None if result.hidden is None else result.hidden[-1:]
        rows = [int(found[-1].argmax())]


def prompts() -> list[list[int]]:
    return [random_prompt(TARGET, length, seed=length) for length in LENGTHS]


def taps_of(model: CausalLM, layers: tuple[int, ...], token_ids: Sequence[int]) -> Tensor:
    """What the target of minisgl leaves of these tokens."""
    specs = model.layer_specs("float32")
    states = [
        PagedKV(*(torch.zeros((8, 8, *shape)) for shape in spec.shapes))
        for spec in specs
        if isinstance(spec, KVSpec)
    ]
    positions = torch.arange(len(token_ids))
    pages = torch.tensor([[5, 2, 7, 1, 6]], dtype=torch.int32)
    nothing, none = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    rows = Rows.of(torch.zeros_like(positions), positions)
    batch = ForwardBatch(
        torch.tensor(token_ids),
        *(rows, rows),
        pages[0].long()[positions // 8] * 8 + positions % 8,
        DecodeBatch(pages[:0], nothing, 0),
        PrefillBatch.of(pages, (0,), (len(token_ids),)),
        BatchSlots(none, Segments(none, none, nothing)),
    )
    taps = Taps(layers, torch.empty(len(token_ids), len(layers) * TARGET.hidden_size))
    with torch.inference_mode():
        model(batch, states, Attention(TorchAttention(), TorchAttention()), taps=taps)
    return taps.rows


@pytest.mark.parametrize("name", HEADS)
def test_eagle3_heads_draft_as_in_plain_torch(name: str) -> None:
    reference, config, model = target()
    head = HEADS[name]
    folder = save_head(head, PATH / name)
    network = network_of(read_network(folder, config), model)
    assert network.taps == head.taps
    oracle = HeadReference(head, reference)
    seen: set[int] = set()
    for prompt in prompts():
        hidden = network.combine(taps_of(model, head.taps, prompt[:-1]))
        assert torch.allclose(hidden, oracle.hidden_of(prompt[:-1]), atol=1e-4)
        drafts = drafted(network, prompt, hidden, NUM_DRAFTS)
        assert drafts == drafts_after(oracle, prompt, NUM_DRAFTS)
        seen |= {*drafts}
    assert len(seen) > NUM_DRAFTS, "a head without teeth"


def mtp_of(name: str) -> tuple[Mtp, Path]:
    return hybrid(name) if name in HYBRIDS else latent(name)


def mtp_network(folder: Path) -> DraftNetwork:
    """The layers for drafts in a checkpoint. Inputs of FP8 weights are left as they are."""
    config = read_model_config(folder)
    model = load_model(config, folder, **options())
    assert isinstance(model, CausalLM)
    network: Any = network_of(read_mtp(folder, config), model)
    leave_inputs(network)
    return cast(DraftNetwork, network)


@pytest.mark.parametrize("name", [*HYBRIDS, *LATENTS])
def test_layers_for_multi_token_prediction_draft_as_in_plain_torch(name: str) -> None:
    check_mtp(*mtp_of(name))


@pytest.mark.parametrize("format", ["fp8-block", "fp8-transformers", "ct-int4-64"])
def test_a_quantized_layer_drafts_as_its_dequantized_weights(format: str, tmp_path: Path) -> None:
    case = quantize(LATENT_64, FORMATS[format], tmp_path)
    mtp = let_last_layer_draft(case.folder, load_plain(case))
    network: Any = check_mtp(mtp, case.folder)
    (layer,) = network.layers
    assert not isinstance(layer.mlp.experts.product, DenseExperts)
    assert isinstance(layer.self_attn.kv_b_proj.product, DenseProduct)


def test_scales_of_the_kv_cache_speak_for_no_quantized_layer(tmp_path: Path) -> None:
    """As in a quantised checkpoint whose layers for drafts are not."""
    _, folder = mtp_of(HYBRIDS[0])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    attention = "mtp.layers.0.self_attn"
    scales = {f"{attention}.{kind}_proj.{kind}_scale": torch.tensor(0.5) for kind in "kv"}
    edit_tensors(tmp_path, lambda tensors: tensors.update(scales))
    config = read_model_config(tmp_path)
    model = load_model(config, tmp_path, **options())
    assert isinstance(model, CausalLM)
    read = replace(read_mtp(tmp_path, config), quantization=Fp8())
    network: Any = network_of(read, model)
    assert isinstance(network.layers[0].self_attn.qkv_proj.product, DenseProduct)


def check_mtp(mtp: Mtp, folder: Path) -> DraftNetwork:
    network = mtp_network(folder)
    seen: set[int] = set()
    for prompt in prompts():
        assert mtp_error(network, mtp, prompt) < TOLERANCE
        seen |= {*drafts_after(mtp, prompt, NUM_DRAFTS)}
    assert len(seen) > NUM_DRAFTS
    return network


def mtp_error(network: DraftNetwork, mtp: Mtp, prompt: list[int], shift: int = 0) -> float:
    """Of the logits of drafts. shift: rows by which those of the target are misplaced."""
    hidden = network.combine(mtp.hidden_of(prompt[:-1]).detach().roll(shift, 0))
    logits = drafted_logits(network, prompt, hidden, NUM_DRAFTS)
    return relative_error(logits, logits_after(mtp, prompt, NUM_DRAFTS))


def test_a_small_model_drafts_as_in_transformers() -> None:
    _, config, model = target()
    folder = make_checkpoint(SMALL, PATH / "small")
    network = network_of(read_network(folder, config), model)
    reference = load_reference(folder)
    for prompt in prompts():
        assert drafted(network, prompt, None, NUM_DRAFTS) == drafts_of_model(
            reference, prompt, NUM_DRAFTS
        )


# -- mistakes that must show ----------------------------------------------------------------------


def _ignore_d2t(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    network.d2t.zero_()
    network.prepare()


def _swap_inputs(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    (layer,) = network.layers
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def _feed_norm_back(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    network._norm_output = True


def _add_to_norm(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    network.layers[0]._norm_before_residual = True


@pytest.mark.parametrize("mistake", [_ignore_d2t, _swap_inputs, _feed_norm_back, _add_to_norm])
def test_a_mistake_in_a_head_shows(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch, Any], None]
) -> None:
    reference, config, model = target()
    head = HEADS["specforge"]
    network = network_of(read_network(save_head(head, PATH / "mistaken"), config), model)
    oracle, prompt = HeadReference(head, reference), prompts()[1]
    hidden = oracle.hidden_of(prompt[:-1]).detach()
    assert drafted(network, prompt, hidden.clone(), 5) == drafts_after(oracle, prompt, 5)
    mistake(monkeypatch, network)
    assert drafted(network, prompt, hidden.clone(), 5) != drafts_after(oracle, prompt, 5)


@pytest.mark.parametrize("name", [HYBRIDS[0], LATENTS[0]])
@pytest.mark.parametrize("mistake", ["order", "norms", "no-norm", "hidden", "before-norm"])
def test_a_mistake_in_layers_for_multi_token_prediction_shows(mistake: str, name: str) -> None:
    mtp, folder = mtp_of(name)
    network: Any = mtp_network(folder)
    if mistake == "order":
        weight = network.fc.weight
        weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
    elif mistake == "norms":
        of_token = network.pre_fc_norm_embedding
        network.pre_fc_norm_embedding = network.pre_fc_norm_hidden
        network.pre_fc_norm_hidden = of_token
    elif mistake == "no-norm":
        network.pre_fc_norm_hidden.register_forward_hook(lambda _, given, normed: given[0].rows)
    elif mistake == "before-norm":
        streams = list[Tensor]()

        def keep(norm: Any, given: tuple[Residual, ...]) -> None:
            (residual,) = given
            streams.append(joined(residual._replace(rows=residual.rows.clone()), norm))

        network.norm.register_forward_pre_hook(keep)
        network.register_forward_hook(lambda *call: call[-1]._replace(hidden=streams.pop()))
    shift = 1 if mistake == "hidden" else 0
    assert mtp_error(network, mtp, prompts()[1], shift) > 100 * TOLERANCE


# -- what is refused ------------------------------------------------------------------------------


def rewritten(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 600}, "vocabulary of 600 tokens, the model one of 499"),
        ({"hidden_size": 256, "head_dim": 32}, "hidden_size of 256; the model has 128"),
        ({"target_hidden_size": 64}, "hidden_size, 128, is not its target's, 64"),
        ({"draft_vocab_size": 500}, "draft_vocab_size 500 is more than vocab_size 499"),
        ({"num_hidden_layers": 2}, "2 layers are not supported; allowed: 1"),
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512},
            "attends over latents",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "layers 2, 3, 4"),
        ({"eagle_config": None}, "layers 2, 2, 1"),
    ],
)
def test_a_head_of_another_model_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    _, config, _ = target()
    save_head(HEADS["specforge"], tmp_path)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        read_network(rewritten(tmp_path, **values), config)


def test_a_small_model_of_another_vocabulary_or_with_states_is_refused(tmp_path: Path) -> None:
    _, config, _ = target()
    other = make_checkpoint(Spec("other", "LlamaForCausalLM", vocab_size=300), tmp_path / "other")
    with pytest.raises(UnsupportedModelError, match="of 300 tokens, the model one of 499"):
        read_network(other, config)
    with pytest.raises(UnsupportedModelError, match="whose layers all attend"):
        read_network(hybrid(HYBRIDS[0])[1], config)
    with pytest.raises(ModelNotFoundError, match="no drafter"):
        read_network(tmp_path, config)
    with pytest.raises(UnsupportedModelError, match="no layers that draft tokens"):
        read_mtp(other, config)


def test_a_drafter_that_the_ranks_cannot_divide_is_refused(tmp_path: Path) -> None:
    _, config, _ = target()
    save_head(HEADS["specforge"], tmp_path)
    assert read_network(tmp_path, config, num_ranks=2).kind == "eagle3"
    with pytest.raises(UnsupportedModelError, match="--tp 3"):
        read_network(tmp_path, config, num_ranks=3)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, config, model = target()
    head = save_head(HEADS["specforge"], tmp_path)
    file, tensors = head / "model.safetensors", head_tensors(HEADS["specforge"])
    read = read_network(head, config)

    def load(changed: dict[str, Tensor]) -> None:
        save_file({name: each.contiguous() for name, each in changed.items()}, file)
        network_of(read, model)

    load(tensors)
    with pytest.raises(CheckpointError, match="lacks weights: d2t"):
        load({name: each for name, each in tensors.items() if name != "d2t"})
    with pytest.raises(CheckpointError, match="outside of the vocabulary of 499"):
        load(tensors | {"d2t": tensors["d2t"] + 300})
    with pytest.raises(CheckpointError, match="names a token twice"):
        load(tensors | {"d2t": -torch.arange(300)})
    with pytest.raises(CheckpointError, match=r"does not take: layers\.1"):
        load(tensors | {"layers.1.hidden_norm.weight": torch.ones(128)})
    load(tensors)
    file.unlink()
    torch.save(tensors, head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.* pickle") as refused:
        network_of(read, model)
    given = re.search(r"python -c '(.*)'", str(refused.value))
    assert given is not None
    with contextlib.chdir(head):
        exec(given[1], {})
    network_of(read, model)


@pytest.mark.parametrize(
    ("name", "prefix", "field"),
    [
        (HYBRIDS[0], "mtp.", "mtp_num_hidden_layers"),
        (LATENTS[0], "model.layers.2.", "num_nextn_predict_layers"),
    ],
)
def test_a_checkpoint_without_layers_for_drafts_is_refused(
    name: str, prefix: str, field: str, tmp_path: Path
) -> None:
    _, folder = mtp_of(name)
    config = read_model_config(folder)
    model = load_model(config, folder, **options())
    assert isinstance(model, CausalLM)
    stored = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in stored.items() if not name.startswith(prefix)}
    assert len(kept) < len(stored)
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    read = read_mtp(tmp_path, config)
    with pytest.raises(CheckpointError, match=rf"no tensor is {re.escape(prefix)}\*\. .* as ngram"):
        network_of(read, model)
    config = read_model_config(rewritten(tmp_path, **{field: 2}))
    with pytest.raises(UnsupportedModelError, match=f"{field} is 2; mtp takes 1"):
        read_mtp(tmp_path, config)
    rewritten(tmp_path, **{field: 1})
    with pytest.raises(UnsupportedModelError, match="mtp_use_dedicated_embeddings"):
        read_mtp(rewritten(tmp_path, mtp_use_dedicated_embeddings=True), config)


def test_the_notes_of_a_model_name_its_drafter_or_what_is_left_out(tmp_path: Path) -> None:
    _, folder = latent(LATENTS[1])
    config = read_model_config(folder)
    assert config.notes == ("layers that draft tokens, left out: 1",)
    noted = read_mtp(folder, config).noted_in(config)
    assert noted.notes == ("tokens are drafted by mtp, a layer of the checkpoint",)
    _, config, _ = target()
    noted = read_network(save_head(HEADS["specforge"], tmp_path), config).noted_in(config)
    assert noted.notes[-1] == f"tokens are drafted by eagle3 in {tmp_path}"


def test_weights_can_be_made_up(tmp_path: Path) -> None:
    _, config, model = target()
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    save_head(HEADS["specforge"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    network = load_network(
        read_network(tmp_path, config), model, **options() | {"load_format": "dummy"}
    )
    network.prepare()
    prompt = prompts()[1]
    hidden = torch.randn(len(prompt) - 1, TARGET.hidden_size)
    assert all(0 <= token < 300 for token in drafted(network, prompt, hidden, 3))
