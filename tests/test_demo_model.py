"""The bundled model, through minisgl and through transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl import LLM, SamplingParams
from minisgl.models.hub import DEMO_FOLDER

ROOT = Path(__file__).parent.parent
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_minisgl_and_transformers_give_the_same_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    generated = model.generate(**prompt, max_new_tokens=32, do_sample=False, top_p=None)[0]
    expected = generated[prompt["input_ids"].shape[1] :].tolist()
    with LLM() as llm:
        output = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=32))
    assert output.prompt_token_ids == prompt["input_ids"][0].tolist()
    assert output.token_ids == expected
    assert len(set(expected)) >= 10


def test_the_bundle_is_small() -> None:
    files = [path for path in DEMO_FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12 << 20


def test_the_script_makes_the_same_model_again(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_demo_model.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "minisgl.json"):
        assert (tmp_path / name).read_text() == (DEMO_FOLDER / name).read_text(), name
    made, bundled = (load_file(f / "model.safetensors") for f in (tmp_path, DEMO_FOLDER))
    assert made.keys() == bundled.keys()
    assert all(torch.equal(made[name], bundled[name]) for name in made)
