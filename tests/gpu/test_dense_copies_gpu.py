"""An engine that keeps quantised weights a second time, dense, for steps of many tokens; and one
whose head is quantised."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Spec, make_checkpoint, reference_logits
from support.parity import load_engine
from torch import Tensor

from minisgl.engine import AsyncEngine
from minisgl.kernels.tuning import H200
from minisgl.parts.scores.host import scores_of
from minisgl.request import SamplingParams

pytestmark = pytest.mark.gpu

SPEC = Spec("qwen3", "Qwen3ForCausalLM", hidden_size=256, num_layers=2, tied=True)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
NUM_REQUESTS = H200.weight_only_dense_rows + 12
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float16",
    "kv_cache_dtype": "model",
    "cache_type": "naive",
    "num_pages": 4 * NUM_REQUESTS,
    "cuda_graph_max_bs": 128,
}


@pytest.mark.parametrize("dense_copies", ["always", "auto", "never"])
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_of_large_batches_score_as_they_do_alone(
    graphs: bool, dense_copies: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = make_checkpoint(SPEC, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": GPTQ}))
    graph_rows = OPTIONS["cuda_graph_max_bs"] if graphs else 0
    options = {"dense_copies": dense_copies, "cuda_graph_max_bs": graph_rows}
    for _, found, alone in scores_of_large_batches(tmp_path, load_format="dummy", **options):
        assert found.tolist() == pytest.approx(alone.tolist(), abs=0.03)
    assert ("take another" in caplog.text) is (dense_copies != "never")


@pytest.mark.parametrize("dense_copies", ["always", "never"])
@pytest.mark.parametrize("format", ["gptq", "nvfp4", "nvfp4-modelopt", "ct-fp8-channel"])
def test_tokens_of_a_quantised_head_score_as_they_do_alone(
    format: str, dense_copies: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from support.quantized import FORMATS, load_plain, quantize

    spec = replace(SPEC, name="untied", tied=False, vocab_size=512)
    case = quantize(spec, FORMATS[format], tmp_path, with_head=True)
    scored = scores_of_large_batches(case.folder, dense_copies=dense_copies)
    plain = load_plain(case)
    for tokens, found, alone in scored:
        exact = reference_logits(plain, tokens[:-1])[-len(found) :].log_softmax(-1)
        expected = exact.gather(1, torch.tensor(tokens[-len(found) :])[:, None])[:, 0]
        if FORMATS[format].rounds is None:
            assert found.tolist() == pytest.approx(alone.tolist(), abs=0.03)
            assert alone.tolist() == pytest.approx(expected.tolist(), abs=0.05)
        else:
            # Float16's last place decides between two neighbours in 8 bits: in float32 such changes
            # move the scores of this model by 0.06 in the mean and by up to 0.6, the rounding
            # itself by 0.08 and 1.1.
            assert (found - alone).abs().mean() < 0.12
            assert (alone - expected).abs().mean() < 0.25


def scores_of_large_batches(folder: Path, **options: Any) -> list[tuple[list[int], Tensor, Tensor]]:
    """Of some prompts and the tokens that were decoded from them, in batches whose rows fall from
    above the bound to below it: the scores of what was decoded, there and, given as a prompt,
    alone."""
    scored = []
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(SPEC.vocab_size, (12,), generator=generator).tolist()
        for _ in range(NUM_REQUESTS)
    ]
    params = [
        SamplingParams(max_tokens=4 + i % 16, seed=i, logprobs=0) for i in range(NUM_REQUESTS)
    ]

    async def run() -> None:
        async with AsyncEngine(load_engine(folder, **OPTIONS | options)) as engine:
            streams = [engine.submit(*job) for job in zip(prompts, params, strict=True)]
            for stream in streams:
                async for _ in stream:
                    pass
            for prompt, stream in list(zip(prompts, streams, strict=True))[:: NUM_REQUESTS // 8]:
                request = stream.request
                tokens = [*prompt, *request.output_token_ids]
                alone = engine.submit(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))
                async for _ in alone:
                    pass
                scores = scores_of(alone.request)[len(prompt) - 1 :]
                found = [entry.logprob for entry in request.logprobs]
                expected = [entry.logprob for entry in scores]
                scored.append((tokens, torch.tensor(found), torch.tensor(expected)))

    asyncio.run(run())
    return scored
