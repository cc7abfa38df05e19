"""The parity tests can fail: each mistake below is far over their tolerance.

A mistake is made in a loaded model, or in what drives it, and the comparison of test_models.py is
run on the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import TOLERANCE, Case, make_case, relative_error, spec_named
from support.paged import PagedModel, PagedSequence
from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.models.config import ModelConfig, RopeConfig
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

# How far over the tolerance a mistake must be, so that no parity test can miss it by luck.
GROSS = 1000 * TOLERANCE

Change = Callable[[ModelConfig], ModelConfig]


@dataclass(frozen=True)
class WrongHeadMap(TorchAttention):
    """Query head h reads KV head h % num_kv_heads instead of h // group."""

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        return self._unmix(super().decode(self._mixed(call), batch), call.kv)

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        return self._unmix(super().prefill(self._mixed(call), batch), call.kv)

    def _mixed(self, call: AttentionCall) -> AttentionCall:
        heads = torch.unflatten(call.q, 1, (-1, call.kv.k.shape[2]))
        return replace(call, q=heads.transpose(1, 2).flatten(1, 2))

    def _unmix(self, out: Tensor, kv: PagedKV) -> Tensor:
        num_kv_heads = kv.k.shape[2]
        return torch.unflatten(out, 1, (num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    names = ("llama", "llama3", "llama-yarn", "llama-linear", "qwen2", "qwen3")
    return {name: make_case(spec_named(name), tmp_path_factory.mktemp(name)) for name in names}


def paged_model(
    folder: Path,
    change: Change = lambda config: config,
    backend: AttentionBackend | None = None,
) -> PagedModel:
    """The model of `folder`, its weights right, its config changed once they are loaded."""
    config = read_model_config(folder)
    cpu = torch.device("cpu")

    def load(config: ModelConfig) -> CausalLM:
        return load_model(
            config,
            folder,
            dtype=torch.float32,
            device=cpu,
            load_format="safetensors",
            max_seq_len=256,
        )

    model, changed = load(config), change(config)
    model.rotary_tables = load(changed).rotary_tables
    return PagedModel(model, config, page_size=16, backend=backend)


def error(paged: PagedModel, case: Case) -> float:
    """The error over the prompt in chunks and 8 decoded tokens, as in the shortest parity test."""
    num_tokens = len(case.prompt) + 8
    logits = paged.run(case.token_ids[:num_tokens], prefill=len(case.prompt), chunk=20)
    return relative_error(logits, case.logits[:num_tokens])


def test_unmodified_models_are_within_the_tolerance(cases: dict[str, Case]) -> None:
    for case in cases.values():
        assert error(paged_model(case.folder), case) < TOLERANCE


@pytest.mark.parametrize("dropped", [("q_norm",), ("k_norm",), ("q_norm", "k_norm")])
def test_a_dropped_qk_norm_is_detected(
    cases: dict[str, Case], dropped: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    qk_norm_rope_store_kv = dispatch.qk_norm_rope_store_kv

    def without_norm(*args: Any) -> Tensor:
        """The queries are those of a call with or without norm, the keys those of the last call."""
        *given, norm_rope, scales = args
        bare = NormRope(norm_rope.table)
        bare_q, q = qk_norm_rope_store_kv(*given, bare, scales), qk_norm_rope_store_kv(*args)
        if "k_norm" in dropped:
            qk_norm_rope_store_kv(*given, bare, scales)
        return bare_q if "q_norm" in dropped else q

    monkeypatch.setattr(dispatch, "qk_norm_rope_store_kv", without_norm)
    paged = paged_model(cases["qwen3"].folder)
    assert error(paged, cases["qwen3"]) > GROSS


@pytest.mark.parametrize("name", ["llama3", "llama-yarn", "llama-linear"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda rope: RopeConfig(theta=rope.theta), id="unscaled"),
        pytest.param(lambda rope: dataclasses.replace(rope, factor=2 * rope.factor), id="factor"),
        pytest.param(lambda rope: dataclasses.replace(rope, theta=500_000.0), id="theta"),
    ],
)
def test_a_wrong_rope_is_detected(
    cases: dict[str, Case], name: str, wrong: Callable[[RopeConfig], RopeConfig]
) -> None:
    def change(config: ModelConfig) -> ModelConfig:
        return dataclasses.replace(config, rope=wrong(config.rope))

    assert error(paged_model(cases[name].folder, change), cases[name]) > GROSS


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_wrong_head_map_is_detected(cases: dict[str, Case], name: str) -> None:
    paged = paged_model(cases[name].folder, backend=WrongHeadMap())
    assert error(paged, cases[name]) > GROSS


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_positions_shifted_between_prompt_and_decode_are_detected(
    cases: dict[str, Case], name: str
) -> None:
    """Rope only sees differences, so a shift must begin in the middle to matter at all."""
    case, sequence = cases[name], PagedSequence()
    paged = paged_model(case.folder)
    paged.step(chunks=[(sequence, case.prompt)])
    paged.position_offset = 1
    start = len(case.prompt)
    [logits] = paged.step(decodes=[(sequence, case.token_ids[start])])
    assert relative_error(logits, case.logits[start : start + 1]) > GROSS


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_pages_swapped_between_sequences_are_detected(cases: dict[str, Case], name: str) -> None:
    case, sequence, other = cases[name], PagedSequence(), PagedSequence()
    paged = paged_model(case.folder)
    start = len(case.prompt)
    paged.step(chunks=[(sequence, case.prompt), (other, case.prompt[::-1])])
    sequence.pages[1], other.pages[1] = other.pages[1], sequence.pages[1]
    [logits] = paged.step(decodes=[(sequence, case.token_ids[start])])
    assert relative_error(logits, case.logits[start : start + 1]) > GROSS


def test_pages_swapped_within_a_sequence_are_detected(cases: dict[str, Case]) -> None:
    """Keys carry their position with them, so the order of full pages is nothing to attention.

    It shows where a page is not full: what is read in its place was never written, and is NaN here.
    """
    case, sequence = cases["llama"], PagedSequence()
    paged = paged_model(case.folder)
    start = len(case.prompt)
    paged.step(chunks=[(sequence, case.prompt)])
    sequence.pages[-2:] = reversed(sequence.pages[-2:])
    [logits] = paged.step(decodes=[(sequence, case.token_ids[start])])
    assert not relative_error(logits, case.logits[start : start + 1]) < TOLERANCE
