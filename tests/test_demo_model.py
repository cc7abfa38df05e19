"""The bundled model, as the script makes it and as transformers sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.models.hub import DEMO_FOLDER as DEMO
from minisgl.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ("Hello!", "What is the capital of France?")
MAX_BYTES = 12e6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def test_it_is_small_and_says_that_it_is_untrained() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < MAX_BYTES
    assert json.loads((DEMO / "minisgl.json").read_text()) == {"demo": True, "trained": False}


def test_the_tokenizer_is_whole(tokenizer: Tokenizer) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert tokenizer.vocab_size == config["vocab_size"] == 2048
    for text in ("What is 12 + 30? It is 42.", "日本 👍🏽\n\n\tx"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("2048")] == [*"2048"]
    corpus = (ROOT / "scripts" / "demo_corpus.txt").read_text(encoding="utf-8")
    assert len(corpus) / len(tokenizer.encode(corpus)) > 3  # letters a token


def test_chat_ends_a_turn_with_an_eos_token(tokenizer: Tokenizer) -> None:
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (0.7, 0.9)
    ends = [tokenizer.token_text(token_id) for token_id in generation["eos_token_id"]]
    assert ends == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token_id == generation["eos_token_id"][0]

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    user = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.decode(tokenizer.chat(messages), skip_special_tokens=False)
    assert whole == system + user
    assert tokenizer.decode(tokenizer.chat(messages[1:]), skip_special_tokens=False) == user


def test_minisgl_and_transformers_agree_and_the_answers_have_teeth() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM() as llm:
        outputs = [llm.chat(chat, SamplingParams(temperature=0, max_tokens=48)) for chat in chats]
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        seen = model(ids, output_attentions=True)
        start = len(output.prompt_token_ids) - 1
        assert seen.logits[0, start:-1].argmax(-1).tolist() == output.token_ids
        assert len(set(output.token_ids)) > 24
        for weights in seen.attentions:  # peaked, so that a wrong position or head shows
            assert weights[..., 16:, :].amax(-1).mean() > 0.3
    assert outputs[0].token_ids != outputs[1].token_ids


def test_the_script_makes_the_same_model_again(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_demo_model.py"
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, tmp_path], check=True, env=environment)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in DEMO.iterdir()}
    for made in tmp_path.iterdir():
        if made.suffix != ".safetensors":
            assert made.read_bytes() == (DEMO / made.name).read_bytes(), made.name
    bundled = load_file(DEMO / "model.safetensors")
    again = load_file(tmp_path / "model.safetensors")
    assert bundled.keys() == again.keys()
    assert all(torch.equal(bundled[name], again[name]) for name in bundled)
