"""`minisgl verify` calls a right model right, and finds each planted mistake on its path.

A mistake is planted in minisgl alone, and the model and its prompts are the demo's: trained, so
that rounding changes as much, and mistakes as little, as in models that people use.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import GPT_OSS, make_checkpoint, spec_named
from support.endless_template_server import ENDLESS
from support.mxfp4_checkpoints import quantised
from support.quantized import FORMATS, quantize
from torch import Tensor
from typer.testing import CliRunner

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.layers.norm import RMSNorm
from minisgl.models.hub import DEMO_FOLDER
from minisgl.runner import load, setup
from minisgl.text.rendering import Renderer
from minisgl.text.tokenizer import Tokenizer
from minisgl.verify import answers, prompts, reference, run, texts
from minisgl.verify.plain import plain_weights
from minisgl.verify.prompts import TEXTS, Prompts
from minisgl.verify.run import Findings, verify
from minisgl.verify.verdict import Distance, PathResult
from minisgl_cli.main import app

Plant = Callable[[pytest.MonkeyPatch], None]
NUM_NEW_TOKENS = 17  # so that answers cross a page


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    of, generate = Prompts.of, answers._generate

    def shorter(*args: Any, **given: Any) -> Any:
        return generate(*args, **{"num_new": NUM_NEW_TOKENS, **given})

    def fewer(*args: Any) -> Prompts:
        prompts = of(*args)
        return Prompts(prompts.short[:2], [ids[:200] for ids in prompts.long[:1]])

    monkeypatch.setattr(run.Prompts, "of", fewer)
    monkeypatch.setattr(answers, "_generate", shorter)


def findings(model: str | Path = "", **options: Any) -> Findings:
    given = {"device": "cpu", "max_prefill_length": 80, **options}
    return verify(EngineConfig(model=str(model), **given), tell=lambda text: None)


def with_tokenizer(folder: Path) -> Path:
    """A checkpoint of random weights with the demo model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_demo_model_is_right(dtype: str) -> None:
    found = findings(dtype=dtype)
    assert found.is_right, found.faults
    assert [each.path for each in found.paths] == [
        "prefill",
        "decode",
        "prefill in chunks",
        "prefill, all at once",
        "decode, all at once",
        "after a cached prefix",
    ]


def test_a_template_that_refuses_a_question_leaves_the_other_prompts() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER, chat_template="{{ raise_exception('not today') }}")
    assert Prompts.of(tokenizer, 2048).short[0] == tokenizer.encode(TEXTS[0])


def test_a_template_that_does_not_end_is_a_fault_and_transformers_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (prompts, texts):
        monkeypatch.setattr(module, "Renderer", partial(Renderer, 0.5))
    tokenizer = Tokenizer.load(DEMO_FOLDER, chat_template=ENDLESS)
    assert Prompts.of(tokenizer, 2048).short[0] == tokenizer.encode(TEXTS[0])
    found = texts.differing_conversations(tokenizer, DEMO_FOLDER, ENDLESS)
    assert len(found) == 1
    assert all("did not end within 0.5 s" in said for said in found.values())


def wrong_theta(patch: pytest.MonkeyPatch) -> None:
    read = setup.read_model_config

    def changed(*args: Any, **given: Any) -> Any:
        config = read(*args, **given)
        return replace(config, rope=replace(config.rope, theta=1.2 * config.rope.theta))

    patch.setattr(setup, "read_model_config", changed)


def wrong_norm(patch: pytest.MonkeyPatch) -> None:
    """One of the 17 norms has the weights of its neighbour."""
    load_model = load.load_model

    def changed(*args: Any, **given: Any) -> Any:
        model = load_model(*args, **given)
        norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
        with torch.no_grad():
            norms[5].weight.copy_(norms[6].weight)
        return model

    patch.setattr(load, "load_model", changed)


def wrong_page_of_decode(patch: pytest.MonkeyPatch) -> None:
    """A row reads its second page in place of its third."""
    decode = TorchAttention.decode

    def changed(self: Any, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        table = batch.page_table.clone()
        if table.shape[1] > 3:
            table[:, 2] = table[:, 1]
        return decode(self, call, replace(batch, page_table=table))

    patch.setattr(TorchAttention, "decode", changed)


def wrong_pages_of_prefix(patch: pytest.MonkeyPatch) -> None:
    """A chunk reads, for each whole page of what comes before it, the page before that one."""
    prefill = TorchAttention.prefill

    def changed(self: Any, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        table = batch.page_table.clone()
        for chunk, start in enumerate(batch.starts):
            last = start // call.kv.k.shape[1]
            table[chunk, 1:last] = batch.page_table[chunk, : max(0, last - 1)]
        return prefill(self, call, replace(batch, page_table=table))

    patch.setattr(TorchAttention, "prefill", changed)


EVERYWHERE = {
    *("prefill", "prefill in chunks", "prefill, all at once"),
    *("decode", "decode, all at once", "after a cached prefix"),
}
MISTAKES: dict[str, tuple[Plant, set[str]]] = {
    "theta": (wrong_theta, EVERYWHERE),
    "norm": (wrong_norm, EVERYWHERE),
    "page of decode": (wrong_page_of_decode, {"decode", "decode, all at once"}),
    "pages of a prefix": (wrong_pages_of_prefix, {"prefill in chunks", "after a cached prefix"}),
}


# Bounds are closest in float32, so that what is found in bfloat16 is found there, too.
@pytest.mark.parametrize(
    ("mistake", "dtype"), [("norm", "float32"), *((mistake, "bfloat16") for mistake in MISTAKES)]
)
def test_a_mistake_is_found(mistake: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, paths = MISTAKES[mistake]
    plant(monkeypatch)
    found = findings(dtype=dtype)
    wrong = {each.path for each in found.paths if not each.is_right}
    assert paths <= wrong
    assert len(found.faults) == len(wrong)
    # No more paths are wrong than those that have the mistake, and those that go on from these.
    assert ("prefill" in wrong) == ("prefill" in paths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["moe", "deepseek-v3", "gpt-oss"])
def test_native_models_are_right(name: str, dtype: str, tmp_path: Path) -> None:
    spec = replace(spec_named(name), dtype=getattr(torch, dtype), vocab_size=2048)
    found = findings(with_tokenizer(make_checkpoint(spec, tmp_path)), dtype=dtype)
    assert found.is_right, found.faults


def test_an_adopted_model_is_right(tmp_path: Path) -> None:
    spec = replace(spec_named("mistral"), vocab_size=2048)
    folder = with_tokenizer(make_checkpoint(spec, tmp_path))
    found = findings(folder, dtype="float32", model_impl="adopted")
    assert found.is_right, found.faults
    assert "transformers" in found.facts[0]


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize(
    "name",
    [
        *("fp8-block", "fp8-static", "ct-int8", "ct-int4-zeros", "awq", "gptq", "nvfp4"),
        "modelopt-mixed",
    ],
)
def test_quantised_models_are_right(name: str, dtype: str, tmp_path: Path) -> None:
    spec = replace(spec_named("llama"), hidden_size=256, vocab_size=2048)
    case = quantize(spec, FORMATS[name], tmp_path, with_head=True)
    found = findings(with_tokenizer(case.folder), dtype=dtype)
    assert found.is_right, found.faults


def test_experts_in_mxfp4_are_right(tmp_path: Path) -> None:
    made = make_checkpoint(replace(GPT_OSS, vocab_size=2048), tmp_path / "made")
    quantised(made, tmp_path / "exact", tmp_path / "stored")
    found = findings(with_tokenizer(tmp_path / "stored"), dtype="bfloat16")
    assert found.is_right, found.faults


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}])
def test_what_options_round_to_fp8_is_no_fault(options: dict[str, str]) -> None:
    found = findings(dtype="bfloat16", **options)
    assert found.is_right, found.faults


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_are_read_as_their_format_says(name: str, tmp_path: Path) -> None:
    spec = replace(spec_named("llama"), hidden_size=256)
    case = quantize(spec, FORMATS[name], tmp_path)
    plain = plain_weights(case.folder, torch.float32)
    assert plain.keys() == load_file(case.plain / "model.safetensors").keys()
    for path, packed in case.packed.items():
        torch.testing.assert_close(plain[f"model.{path}.weight"], packed.weight)


def test_other_texts_and_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert not texts.differing_texts(tokenizer, DEMO_FOLDER)
    same = texts.differing_conversations(tokenizer, DEMO_FOLDER, None)
    assert {*same.values()} == {""}
    assert len(same) == 4
    render = Renderer.render
    monkeypatch.setattr(Renderer, "render", lambda self, call: render(self, call) + "\n")
    differing = texts.differing_conversations(tokenizer, DEMO_FOLDER, None)
    assert all("the texts differ from character" in said for said in differing.values())
    monkeypatch.undo()
    other = Tokenizer.load(DEMO_FOLDER, chat_template="{{ messages[-1].content }}")
    assert all(texts.differing_conversations(other, DEMO_FOLDER, None).values())
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **given: [*encode(text, **given), 5])
    assert len(texts.differing_texts(tokenizer, DEMO_FOLDER)) == len(TEXTS)
    differing = texts.differing_conversations(tokenizer, DEMO_FOLDER, None)
    assert {*differing.values()} == {"the texts are equal and the tokens are not"}


def test_what_transformers_cannot_load_is_not_called_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> None:
        raise ImportError("it needs another package")

    monkeypatch.setattr(reference, "_read", cannot)
    found = findings()
    assert not found.is_right
    assert not found.faults
    (said,) = found.not_compared
    assert said.endswith("ImportError: it needs another package")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}"])
def test_a_template_that_raises_leaves_the_numbers(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    (folder / "chat_template.jinja").write_text(template)
    found = findings(folder, dtype="float32")
    assert found.is_right and found.paths
    assert not found.conversations


def test_a_tokenizer_that_transformers_does_not_load_leaves_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(*_: Any) -> None:
        raise ValueError("no such class")

    monkeypatch.setattr(texts, "_theirs", cannot)
    found = findings(dtype="float32")
    assert found.paths and not found.faults and not found.is_right
    (said,) = found.not_compared
    assert said.startswith("no texts were compared, since") and said.endswith("no such class")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"load_format": "dummy"}, "--load-format dummy"), ({"task": "embed"}, "--task embed")],
)
def test_what_cannot_be_verified_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        findings(**options)


RIGHT = PathResult(
    path="decode",
    num_rows=3,
    ours=Distance(0.2, 0.1, 0.01),
    theirs=Distance(0.3, 0.1, 0.02),
    bounds=Distance(0.75, 0.2, 0.032),
    num_same=2,
    num_near=1,
    num_other=0,
    worst="prompt 0, behind token 7",
)
FACTS = Findings(facts=["model: a"], dtype="bfloat16", paths=[RIGHT], format="tool calls none")


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(
    ("found", "exit_code", "verdict"),
    [
        (FACTS, 0, "RIGHT: "),
        (replace(FACTS, paths=[replace(RIGHT, ours=Distance(0.2, 0.1, 0.04))]), 1, "WRONG: "),
        (replace(FACTS, paths=[replace(RIGHT, num_other=1)]), 1, "WRONG: "),
        (replace(FACTS, conversations={"a tool": "the texts differ"}), 1, "WRONG: "),
        (replace(FACTS, texts=["'Zwölf'"]), 1, "WRONG: "),
        (replace(FACTS, paths=[], not_compared=["it is large"]), 1, "NOT SHOWN: "),
    ],
)
def test_the_command_ends_with_the_verdict(
    found: Findings, exit_code: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "verify", lambda config, tell: found)
    result = CliRunner().invoke(app, ["verify", "a-model"], standalone_mode=False)
    assert result.return_value == exit_code
    assert result.output.splitlines()[-1].startswith(verdict)
    assert result.output.count("\nfault: ") == len(found.faults) == verdict.startswith("W")


def test_nan_is_as_far_as_can_be() -> None:
    gap = torch.tensor([[0.0, torch.nan]])
    assert not Distance.of([gap]).is_within(Distance(1e9, 1e9, 1e9))
