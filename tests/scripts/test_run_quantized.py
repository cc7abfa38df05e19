"""The measurements of quantised models: which there are, how each is started, what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_quantized
from dummy_config import MODELS, QUANTIZATIONS
from run_quantized import CASES, Case, figures, run, split
from support.folders import SCRIPTS

from minisgl.models.hub import DEMO_FOLDER

SCRIPT = SCRIPTS / "bench" / "run_quantized.py"


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_case_is_of_a_known_model_and_format() -> None:
    assert len(set(CASES)) == len(CASES)
    for case in CASES:
        assert case.model in MODELS
        assert case.weights in ("bf16", *QUANTIZATIONS)


def test_options_choose_what_is_measured() -> None:
    listed = script("--list", "--model", "Qwen3-32B", "--kv", "fp8", "--measure", "offline")
    assert listed.stdout.splitlines() == [
        "Qwen3-32B, weights fp8-block, KV fp8, offline",
        "Qwen3-32B, weights fp8-channel, KV fp8, offline",
    ]
    nothing = script("--model", "Qwen3-32B", "--weights", "int4")
    assert nothing.returncode == 2
    assert "no measurement has all of these" in nothing.stderr


def test_a_command_has_the_options_of_its_case_and_of_the_user() -> None:
    case = Case("Qwen3-14B", "fp8-block", "fp8", "latency")
    command = case.command(Path("/m"), Path("/r"), ["--attn", "triton"])
    said = " ".join(command[3:])
    assert said.startswith("bench latency --model /m --load-format dummy")
    assert "--kv-cache-dtype fp8 --attn triton --json /r" in said
    plain = Case("Qwen3-14B", "fp8-block", "model", "offline")
    assert "--kv-cache-dtype" not in plain.command(Path("/m"), Path("/r"), [])
    assert split(["--kv", "fp8", "--", "--attn", "fi"]) == (["--kv", "fp8"], ["--attn", "fi"])
    assert split(["--list"]) == (["--list"], ())
    own, options = split(["--weights", "int4", "--", "--dense-copies", "never"])
    assert own == ["--weights", "int4"]
    assert "--dense-copies never --json /r" in " ".join(
        plain.command(Path("/m"), Path("/r"), options)
    )


def test_a_figure_is_a_line() -> None:
    case = Case("Qwen3-14B", "int4", "model", "offline")
    energy = {"mean_watts": 650.4, "joules_per_output_token": 0.1}
    report = {
        "figures": {"output_tokens_per_s": 8900.4, "energy": energy},
        "limit": {"share": 0.781},
    }
    assert [*figures(case, report)] == [
        "Qwen3-14B, weights int4, KV model, offline: 8,900 tok/s, 78.1% of the limit, 650 W, "
        "0.100 J/token"
    ]


@pytest.mark.parametrize(("weights", "measure"), [("fp8-block", "latency"), ("bf16", "context")])
def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch, weights: str, measure: str) -> None:
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    monkeypatch.setitem(MODELS, "tiny", config)
    options = ["--device", "cpu", "--dense-copies", "never"]
    if measure == "latency":
        options += ["--batch-size", "2", "--input-len", "4", "--output-len", "3", "--repeat", "1"]
    else:
        options += ["--batch", "2", "--context", "16", "--output", "3"]
    [line] = run(Case("tiny", weights, "model", measure), options)
    assert line.startswith(f"tiny, weights {weights}, KV model, {measure}: batch 2: ")
    assert line.endswith(" ms"), "a CPU has no limit and no energy"


def test_a_benchmark_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "tiny", {"architectures": ["GPT2LMHeadModel"]})
    monkeypatch.setattr(run_quantized, "CASES", (Case("tiny", "bf16", "model", "latency"),))
    monkeypatch.setattr(sys, "argv", ["run_quantized.py", "--", "--device", "cpu"])
    assert run_quantized.main() == 1
    printed = capsys.readouterr().out
    assert printed.startswith("tiny, weights bf16, KV model, latency: failed: ")
    assert "GPT2LMHeadModel" in printed
