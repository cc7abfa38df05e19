"""Folders of adapters: what they say, and what is refused of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.errors import CheckpointError
from minisgl.lora import files
from minisgl.lora.files import CONFIG_FILE, TENSORS_FILE, AdapterError, read_adapter
from minisgl.runner.setup import read_setup

PATH = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{PATH}.lora_{{}}.weight"
# As published, with the fields of PEFT 0.18.
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "nvidia/Cosmos-Reason2-2B",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 64,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.18.1",
    "qalora_group_size": 16,
    "r": 32,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def pair(rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        KEY.format("A"): torch.randn((rank, 6), generator=generator),
        KEY.format("B"): torch.randn((4, rank), generator=generator),
    }


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | config))
    save_file(pair() if tensors is None else tensors, folder / TENSORS_FILE)
    return folder


def test_an_adapter_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path))
    assert adapter.base == "nvidia/Cosmos-Reason2-2B"
    assert [*adapter.pairs] == [PATH]
    assert torch.equal(adapter.pairs[PATH].a, pair()[KEY.format("A")])
    assert torch.equal(adapter.pairs[PATH].b, pair()[KEY.format("B")])


@pytest.mark.parametrize(
    ("config", "path", "scale"),
    [
        ({}, PATH, 16),
        ({"use_rslora": True}, PATH, 32),
        ({"alpha_pattern": {"q_proj": 3}}, PATH, 0.75),
        ({"alpha_pattern": {"proj": 3}}, PATH, 16),
        ({"alpha_pattern": {"0.self_attn.q_proj": 3}}, PATH, 0.75),
        ({"alpha_pattern": {"0.self_attn.q_proj": 3}}, PATH.replace("0", "10"), 16),
        ({"alpha_pattern": {r".*\.1\..*": 3, "q_proj": 5}}, PATH, 1.25),
        ({"alpha_pattern": {r"^model\.layers\.(0|1)\..*q_proj": 3, "q_proj": 5}}, PATH, 0.75),
        ({"alpha_pattern": {r"mlp\.experts\.gate_up_proj": 8}}, "a.mlp.experts.gate_up_proj", 2),
    ],
)
def test_the_scale_of_a_module_is_that_of_peft(
    config: dict[str, Any], path: str, scale: float, tmp_path: Path
) -> None:
    assert read_adapter(write(tmp_path, **config)).scale(path, 4) == scale


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, r"'use_dora' \(DoRA\) is not supported; allowed: plain LoRA"),
    ({"bias": "lora_only"}, "bias is 'lora_only': trained biases are not supported"),
    ({"bias": "all"}, "allowed: 'none'"),
    ({"lora_bias": True}, r"'lora_bias' \(biases of B\)"),
    (
        {"modules_to_save": ["lm_head"]},
        r"'modules_to_save' \(modules that are trained as a whole\)",
    ),
    ({"trainable_token_indices": [1]}, r"'trainable_token_indices' \(trained tokens\)"),
    ({"trainable_token_indices": {"embed_tokens": [1]}}, "trained tokens"),
    ({"layer_replication": [[0, 4], [2, 5]]}, "replicated layers"),
    ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
    ({"use_qalora": True}, "QALoRA"),
    ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
    ({"kasa_config": {"beta": 1}}, "'kasa_config' is not supported"),
    ({"a_field_of_tomorrow": 1}, "'a_field_of_tomorrow' is not supported"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: 'LORA'"),
    ({"peft_type": None}, "peft_type is None"),
    ({"init_lora_weights": "pissa_niter_16"}, "may change the weights of the base model"),
    ({"init_lora_weights": "olora"}, "allowed: an adapter that PEFT has converted"),
    ({"init_lora_weights": "a_way_of_tomorrow"}, "may change the weights of the base model"),
    ({"use_rslora": "yes"}, "use_rslora is no flag; allowed: true and false"),
    ({"a\x1b[2Jname": 1}, r"'a\\x1b\[2Jname' is not supported"),
    ({"lora_alpha": "16"}, "lora_alpha is '16'; allowed: a finite number"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"lora_alpha": True}, "lora_alpha is True"),
    ({"lora_alpha": 10**400}, "lora_alpha is 1000.*; allowed: a finite number"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is None; allowed: a finite number"),
    ({"alpha_pattern": [1]}, "alpha_pattern is not a JSON object"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has '\('; allowed: regular expressions"),
    ({"alpha_pattern": {"(?i)q_proj": 1}}, r"alpha_pattern has '\(\?i\)q_proj'; allowed"),
    ({"alpha_pattern": {"q_proj)|(.*": 1}}, "allowed: regular expressions"),
    ({"alpha_pattern": {f"{i}": 1 for i in range(1025)}}, "JSON object of up to 1024 patterns"),
    ({"alpha_pattern": {"(a+)+b": 1}}, "none of a group"),
    ({"alpha_pattern": {"(a|a)*b": 1}}, "none of a group"),
    ({"alpha_pattern": {".*.*.*.*b": 1}}, "3 repetitions"),
    ({"alpha_pattern": {"a" * 257: 1}}, "up to 256 characters"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED_CONFIGS)
def test_what_is_not_computed_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(write(tmp_path, **config))
    assert str(caught.value).count(". ") == 0 and len(str(caught.value)) < 400


A, B = pair()[KEY.format("A")], pair()[KEY.format("B")]
REFUSED_TENSORS: list[tuple[dict[str, Tensor], str]] = [
    ({}, "has no tensors"),
    ({KEY.format("A"): A}, f"has lora_A of {PATH} and not lora_B; allowed: both"),
    ({KEY.format("B"): B}, f"has lora_B of {PATH} and not lora_A; allowed: both"),
    (pair() | {KEY.format("A"): torch.zeros(3, 6)}, "has 3 rows, and lora_B 2 columns"),
    (pair() | {KEY.format("A"): A.log()}, "has NaN or infinities"),
    (pair() | {KEY.format("B"): B / 0}, "has NaN or infinities"),
    (pair() | {KEY.format("A"): A.to(torch.int8)}, "has the dtype I8"),
    (pair() | {KEY.format("A"): A.to(torch.float8_e4m3fn)}, "dtype F8_E4M3; allowed: finite"),
    (pair() | {KEY.format("A"): A[0].clone()}, r"has the shape \[6\]"),
    (pair() | {KEY.format("A"): A[:0].clone(), KEY.format("B"): B[:, :0].clone()}, r"\[0, 6\]"),
    (pair() | {"base_model.model.x.lora_magnitude_vector": B}, "DoRA are not supported"),
    (pair() | {"base_model.model.embed.lora_embedding_A": B}, "adapted embeddings"),
    (pair() | {"base_model.model.lm_head.weight": B}, "tensors beside lora_A.weight"),
    (pair() | {f"base_model.model.{PATH}.lora_B.bias": B}, "trained biases"),
    ({key.replace("q_proj", "q\x1b[2J"): value for key, value in pair().items()}, r"q\\x1b"),
    ({key.removeprefix("base_model."): value for key, value in pair().items()}, "allowed: base_mo"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED_TENSORS)
def test_tensors_that_make_no_pairs_are_refused_by_name(
    tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(write(tmp_path, tensors))


# -- hostile folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG_FILE, b"", "is not JSON"),
        (CONFIG_FILE, b"\xff\xfe", "is not JSON"),
        (CONFIG_FILE, b"[" * 100_000, "is not JSON"),
        (CONFIG_FILE, b"[]", "is not a JSON object"),
        (CONFIG_FILE, b" " * (1 << 20) + b"{}", r"1,048,578 bytes; allowed: up to 1,048,576"),
        (TENSORS_FILE, b"", "cannot be read"),
        (TENSORS_FILE, b"\xff" * 64, "cannot be read"),
        (TENSORS_FILE, (1 << 62).to_bytes(8, "little") + b"{}", "cannot be read"),
        (TENSORS_FILE, b"\x80\x04K\x01.", "cannot be read"),
    ],
)
def test_broken_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path)


@pytest.mark.parametrize("pickle", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_refused_and_not_read(pickle: str, tmp_path: Path) -> None:
    (write(tmp_path) / TENSORS_FILE).rename(tmp_path / pickle)
    with pytest.raises(AdapterError, match=f"{pickle}, a pickle, which can run code; allowed: "):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "circle"])
def test_what_is_no_file_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path) / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":  # a read of it would not end
        os.mkfifo(path)
    elif kind == "circle":
        path.symlink_to(path)
    with pytest.raises(AdapterError, match=f"has no file {name}|{name} cannot be read"):
        read_adapter(tmp_path)


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    for name, value in (("MAX_TENSORS_BYTES", 100), ("memory_bytes", lambda: 800)):
        with monkeypatch.context() as changed:
            changed.setattr(files, name, value)
            with pytest.raises(AdapterError, match="bytes; allowed: up to 100"):
                read_adapter(tmp_path)


@pytest.mark.parametrize("way", ["..", "absolute", "link to a folder", "links to files", "\0"])
def test_nothing_outside_of_the_root_is_read(way: str, tmp_path: Path) -> None:
    inside = write(tmp_path / "root" / "inside")
    outside, root = write(tmp_path / "outside"), tmp_path / "root"
    assert read_adapter(inside, root=root).pairs
    folder = {"..": root / ".." / "outside", "absolute": outside, "\0": root / "\0"}.get(way)
    if folder is None:
        folder = root / "link"
        if way == "link to a folder":
            folder.symlink_to(outside)
        else:
            write(folder)
            (folder / TENSORS_FILE).unlink()
            (folder / TENSORS_FILE).symlink_to(outside / TENSORS_FILE)
    with pytest.raises(AdapterError, match=r"allowed: folders within it|cannot be read"):
        read_adapter(folder, root=root)


# -- the digest -----------------------------------------------------------------------------------


def test_a_file_that_is_cut_after_it_was_read_does_no_harm(tmp_path: Path) -> None:
    """Reading a mapped file beyond its end would end the process."""
    matrices = {KEY.format("A"): torch.ones(4, 1 << 16), KEY.format("B"): torch.ones(1 << 16, 4)}
    write(tmp_path, tensors=matrices)
    adapter = read_adapter(tmp_path)
    os.truncate(tmp_path / TENSORS_FILE, 100)
    assert bool((adapter.pairs[PATH].a == 1).all()) and len(adapter.facts.digest) == 32


def test_the_digest_is_of_the_content_and_not_of_its_name(tmp_path: Path) -> None:
    def digest(tensors: dict[str, Tensor] | None = None, **config: Any) -> bytes:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        return read_adapter(write(folder, tensors, **config)).facts.digest

    first = digest()
    assert digest() == first
    assert digest(dict(reversed(pair().items()))) == first
    assert digest(base_model_name_or_path="another", target_modules="q_proj", r=1) == first
    others = [
        digest(lora_alpha=65),
        digest(use_rslora=True),
        digest(alpha_pattern={"q_proj": 64}),
        digest(alpha_pattern={"q_proj": 1, "k_proj": 2}),
        digest(alpha_pattern={"k_proj": 2, "q_proj": 1}),
        digest(pair(seed=1)),
        digest({key.replace("q_proj", "k_proj"): value for key, value in pair().items()}),
        digest({key: value.bfloat16() for key, value in pair().items()}),
    ]
    assert len({first, *others}) == 1 + len(others)


@given(st.binary(max_size=200))
def test_no_header_makes_another_error(
    tmp_path_factory: pytest.TempPathFactory, header: bytes
) -> None:
    folder = write(tmp_path_factory.mktemp("adapter"))
    (folder / TENSORS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(AdapterError):
        read_adapter(folder)


def test_a_folder_of_an_option_is_looked_at_before_a_model_is_downloaded(tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path / "absent", f"has no file {CONFIG_FILE}"),
        (write(tmp_path / "dora", use_dora=True), "DoRA"),
    ):
        config = EngineConfig(model="nobody/no-such-model", lora=(f"a={folder}",))
        with pytest.raises(CheckpointError, match=f"--lora a: .*{said}"):
            read_setup(config)
