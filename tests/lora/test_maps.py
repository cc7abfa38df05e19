"""Adapters of PEFT on the products of a model: the weights with B·A added to them are those of the
checkpoint into which PEFT has merged the adapter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import ADAPTERS, COMPUTED, Base, base_of, train
from support.ranks import Rank
from torch import Tensor

from minisgl.lora import files, maps
from minisgl.lora.files import CONFIG_FILE, TENSORS_FILE, Adapter, AdapterError, Pair, read_adapter
from minisgl.lora.maps import Maps, maps_of
from minisgl.lora.pool import AdapterPool
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config

RANK = 16
TOLERANCE = 2e-6  # of the largest weight of a product
PARTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "first-rank": {"ranks": Rank(0, 2)},
    "last-rank": {"ranks": Rank(1, 2)},
    "last-stage": {"last_layers": 1},
    "experts-of-last-rank": {"ranks": Rank(1, 2), "changes": {"experts_by_rank": True}},
}
SOME = ("llama", "moe-stacked", "qwen3.5", "phi3", "deepseek-v2", "qwen3-moe-adopted", "gpt-oss")
WITH_EXPERTS = ("moe-stacked", "moe-apart", "deepseek-v2", "lfm2-moe", "qwen3-moe-adopted")
CASES = [
    *((name, "whole") for name in ADAPTERS if name not in COMPUTED),
    *((name, "first-rank") for name in ("llama", "gpt-oss")),
    *((name, "last-rank") for name in SOME),
    *((name, "last-rank") for name in ("qwen3-next", "gemma4", "lfm2", "glm4-moe")),
    *((name, "last-stage") for name in ("llama", "moe-stacked", "phi3")),
    *((name, "experts-of-last-rank") for name in WITH_EXPERTS),
]


def load(
    base: Base, folder: Path, *, last_layers: int = 0, changes: Any = None, **options: Any
) -> Maps:
    """The maps of a part of a model with the weights in `folder`. changes: of fields of its
    config."""
    impl = "adopted" if base.is_adopted else "auto"
    config = replace(read_model_config(folder, model_impl=impl), **changes or {})
    if last_layers:
        options["layers"] = range(config.num_layers - last_layers, config.num_layers)
    model = load_model(
        config,
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=256,
        **options,
    )
    return maps_of(model, config)  # type: ignore[arg-type]


def weights_of(found: Maps) -> dict[str, list[Tensor]]:
    """The weights of each part of each product."""
    weights = {}
    for path, site in found.sites.items():
        tensors = site.module.product.weights
        if site.num_experts is None:
            sizes = [part.outputs.size for part in site.parts]
            weights[path] = [*tensors["weight"].split(sizes)]
        else:
            of_rank = slice(site.num_experts)  # one that every row takes may stand behind them
            gate_up, down = (tensors[name][of_rank] for name in ("gate_up_proj", "down_proj"))
            weights[path] = [*gate_up.chunk(2, dim=1), down]
    return weights


def check(base: Base, adapter: Path, merged: Path, **part: Any) -> None:
    found = load(base, base.folder, **part)
    fitted = found.fit(read_adapter(adapter), RANK)
    wanted, num_adapted = weights_of(load(base, merged, **part)), 0
    for path, weights in weights_of(found).items():
        pairs = fitted.get(path, [None] * len(weights))
        for weight, pair, want in zip(weights, pairs, wanted[path], strict=True):
            sum_ = weight if pair is None else weight + pair.b @ pair.a
            num_adapted += pair is not None and not torch.equal(want, weight)
            assert (sum_ - want).abs().max() <= TOLERANCE * want.abs().max(), path
    assert num_adapted == sum(pair is not None for pairs in fitted.values() for pair in pairs) > 0


@pytest.mark.parametrize(("name", "part"), CASES)
def test_weights_with_an_adapter_are_those_that_peft_merges(
    name: str, part: str, tmp_path: Path
) -> None:
    trained = train(name, tmp_path / "adapter")
    merged = trained.merged(tmp_path / "merged")
    check(trained.base, trained.folder, merged, **PARTS[part])


def pairs_of_experts(folder: Path, num_experts: int) -> None:
    """Spell stacked pairs as those of each expert, as older adapters have them."""
    stored, apart = load_file(folder / TENSORS_FILE), {}
    for key, matrix in stored.items():
        found = re.fullmatch(r"(.*\.experts)(\.base_layer)?\.lora_A\.weight", key)
        if found is None:
            if ".experts." not in key:
                apart[key] = matrix
            continue
        both = stored[key.replace("lora_A", "lora_B")]
        for expert in range(num_experts):
            a = matrix.chunk(num_experts)[expert].clone()
            b = both[:, expert::num_experts]
            names = ["gate_proj", "up_proj"] if found[2] else ["down_proj"]
            for name, rows in zip(names, b.chunk(len(names)), strict=True):
                apart[f"{found[1]}.{expert}.{name}.lora_A.weight"] = a.clone()
                apart[f"{found[1]}.{expert}.{name}.lora_B.weight"] = rows.clone()
    save_file(apart, folder / TENSORS_FILE)
    config = (folder / CONFIG_FILE).read_text()
    (folder / CONFIG_FILE).write_text(config.replace("gate_up_proj", "(gate|up)_proj"))


@pytest.mark.parametrize("part", ["whole", "last-rank", "experts-of-last-rank"])
@pytest.mark.parametrize("name", ["moe-stacked", "deepseek-v2"])
def test_experts_may_have_pairs_of_their_own(name: str, part: str, tmp_path: Path) -> None:
    trained = train(name, tmp_path / "adapter")
    merged = trained.merged(tmp_path / "merged")
    pairs_of_experts(trained.folder, 8)
    check(trained.base, trained.folder, merged, **PARTS[part])


@pytest.mark.parametrize(
    "rename",
    [lambda key: key, lambda key: key.replace(".language_model.", ".")],
    ids=["new", "old"],
)
def test_a_text_part_has_two_names(rename: Callable[[str], str], tmp_path: Path) -> None:
    trained = train("qwen3.5-towers", tmp_path / "adapter")
    merged = trained.merged(tmp_path / "merged")
    stored = load_file(trained.folder / TENSORS_FILE)
    save_file({rename(key): value for key, value in stored.items()}, trained.folder / TENSORS_FILE)
    check(trained.base, trained.folder, merged)


@pytest.mark.parametrize("part", ["first-rank", "last-stage", "experts-of-last-rank"])
def test_a_rank_keeps_its_part_alone_in_host_memory(part: str, tmp_path: Path) -> None:
    trained = train("moe-stacked", tmp_path)

    def packed(**options: Any) -> Tensor:
        found = load(trained.base, trained.base.folder, **options)
        cpu, adapter = torch.device("cpu"), read_adapter(trained.folder)
        pool = AdapterPool(found, 1, RANK, 1, experts=True, dtype=torch.float32, device=cpu)
        return pool.pack(adapter).matrices

    own = packed(**PARTS[part])
    assert own.untyped_storage().nbytes() == own.nbytes < 0.8 * packed().nbytes


# -- mistakes show --------------------------------------------------------------------------------


def _scale_by_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "scale", lambda self, path, rank: self.alpha)


def _ignore_alpha_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_alpha_patterns", lambda config: [])


def _exchange_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Maps._placed

    def placed(self: Any, adapter: Any, path: str, *given: Any) -> Iterator[Any]:
        for place, pair in plain(self, adapter, path, *given):
            exchanged = {"k_proj": 2, "v_proj": 1}.get(path.rpartition(".")[2], place.part)
            yield replace(place, part=exchanged), pair

    monkeypatch.setattr(Maps, "_placed", placed)


def _order_b_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = maps._stacked

    def stacked(adapter: Any, path: str, pair: Pair, most: int, name: str, module: Any) -> Any:
        b = pair.b.unflatten(1, (module.num_experts, -1)).mT.flatten(1)
        return plain(adapter, path, Pair(pair.a, b), most, name, module)

    monkeypatch.setattr(maps, "_stacked", stacked)


def _exchange_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Maps._placed

    def placed(self: Any, *given: Any) -> Iterator[Any]:
        for place, pair in plain(self, *given):
            expert = None if place.expert is None else place.expert ^ 1
            yield replace(place, expert=expert), pair

    monkeypatch.setattr(Maps, "_placed", placed)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("llama", _scale_by_alpha),
        ("llama-patterns", _ignore_alpha_pattern),
        ("moe-apart", _ignore_alpha_pattern),
        ("llama", _exchange_k_and_v),
        ("moe-stacked", _order_b_by_expert),
        ("moe-stacked", _exchange_experts),
    ],
)
def test_mistakes_change_weights(
    name: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = train(name, tmp_path / "adapter")
    merged = trained.merged(tmp_path / "merged")
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check(trained.base, trained.folder, merged)


# -- what does not fit ----------------------------------------------------------------------------


def an_adapter(path: str, a: tuple[int, int], b: tuple[int, int], **others: Pair) -> Adapter:
    pairs = {path: Pair(torch.zeros(a), torch.zeros(b)), **others}
    return Adapter(pairs, None, 8.0, (), False)


Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (an_adapter(Q, (4, 64), (256, 4)), r"has A \[4, 64\].*allowed: \[r, 128\] and \[256, r\]"),
        (an_adapter(Q, (4, 128), (128, 4)), "shapes of this model"),
        (an_adapter(Q, (17, 128), (256, 17)), "the rank 17; allowed: up to 16"),
        (an_adapter(EXPERTS, (12, 128), (192, 12)), r"allowed: \[8 · r, 128\] and \[192, 8 · r\]"),
        (an_adapter(EXPERTS, (136, 128), (192, 136)), "the rank 17; allowed: up to 16"),
        (an_adapter("lm_head", (4, 128), (499, 4)), "lm_head.*allowed: down_proj"),
        (an_adapter("model.embed_tokens", (4, 499), (128, 4)), "is no map of this model"),
        (an_adapter(Q.replace("0", "2"), (4, 128), (256, 4)), "is no map of this model"),
        (an_adapter(Q.replace("0", "00"), (4, 128), (256, 4)), r"layers\.00.*is no map"),
        (an_adapter(f"{EXPERTS}.03.up_proj", (4, 128), (96, 4)), "is no map of this model"),
        (an_adapter(f"{EXPERTS}.8.up_proj", (4, 128), (96, 4)), "is no map of this model"),
        (an_adapter("model.layers.0.input_layernorm", (4, 8), (8, 4)), "is no map"),
        (an_adapter("../../etc/passwd", (4, 8), (8, 4)), "is no map"),
        (
            an_adapter(
                EXPERTS,
                *((8, 128), (192, 8)),
                **{f"{EXPERTS}.3.up_proj": Pair(torch.zeros(4, 128), torch.zeros(96, 4))},
            ),
            "twice, under two names",
        ),
    ],
)
def test_what_does_not_fit_is_named(adapter: Adapter, message: str) -> None:
    base = base_of("moe")
    with pytest.raises(AdapterError, match=message):
        load(base, base.folder).fit(adapter, RANK)


def test_an_adapter_of_a_layer_that_drafts_is_refused() -> None:
    """A checkpoint's tensors of this layer are left aside; an adapter's would be skipped."""
    base, path = base_of("moe"), Q.replace("0", "2")
    with pytest.raises(AdapterError, match="is no map of this model"):
        load(base, base.folder, changes={"num_drafting_layers": 1}).fit(
            an_adapter(path, (4, 128), (256, 4)), RANK
        )


STRANGERS = (
    *("layers.00.self_attn.q_proj", "layers.1.self_attn.z_proj", "layers.1.self_attn", "layers.1"),
    *("layers", "layers.2.mlp.up_proj", "layers.1.mlp.experts.07.up_proj", "embed_tokens", "norm"),
    *("layers.1.mlp.experts.8.up_proj", "layers.1.mlp.experts.7.z_proj", "mtp.layers.0.fc"),
)


@pytest.mark.parametrize("of_rank", ["stages", "experts"])
@pytest.mark.parametrize("name", ["moe", "Qwen3MoeForCausalLM"])
def test_what_no_rank_has_is_refused_by_one_of_them(name: str, of_rank: str) -> None:
    """Though each leaves to the others what they have."""
    base, number = base_of(name), 2
    given: Callable[[int], dict[str, Any]] = {
        "stages": lambda rank: {"layers": range(rank, rank + 1)},
        "experts": lambda rank: {
            "ranks": Rank(rank, number),
            "changes": {"experts_by_rank": True},
        },
    }[of_rank]
    ranks = [load(base, base.folder, **given(rank)) for rank in range(number)]
    for path in (*(f"model.{each}" for each in STRANGERS), "lm_head", "visual.layers.0.qkv"):
        refusals = 0
        for maps_of_rank in ranks:
            try:
                assert not maps_of_rank.fit(an_adapter(path, (4, 8), (8, 4)), RANK)
            except AdapterError:
                refusals += 1
        assert refusals, path


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm-flash"])
def test_the_map_from_latents_is_refused(name: str) -> None:
    base = base_of(name)
    path = "model.layers.0.self_attn.kv_b_proj"
    with pytest.raises(AdapterError, match="is no map of this model that can have an adapter"):
        load(base, base.folder).fit(an_adapter(path, (4, 48), (256, 4)), RANK)
