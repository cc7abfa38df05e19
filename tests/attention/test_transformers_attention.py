"""TorchAttention against transformers' eager attention, with the masks that transformers makes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cache import Cache
from support.paged import page_table, spec_of
from torch import Tensor
from transformers.masking_utils import create_sliding_window_causal_mask

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionSpec

LENGTH, WINDOW, SCALE = 40, 7, 0.4


def attend(module: Any, config: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """q, k and v: [tokens, heads, head_dim]; returns the shape of q."""
    mask = create_sliding_window_causal_mask(
        config,
        torch.empty(1, LENGTH, config.hidden_size),
        None,  # no padding
        None,  # no cache, an argument with a new name in transformers 5.24
        position_ids=torch.arange(LENGTH)[None],
    )
    function = importlib.import_module(type(module).__module__).eager_attention_forward
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out: Tensor = function(module, *heads, mask, scaling=SCALE, **options)[0][0]
    return out


@pytest.mark.parametrize(
    ("family", "name"), [("gpt_oss", "GptOss"), ("gemma2", "Gemma2"), ("mistral", "Mistral")]
)
def test_windows_soft_caps_and_sinks_are_those_of_transformers(family: str, name: str) -> None:
    """Whole, in chunks that begin inside a window, and one token at a time."""
    torch.manual_seed(0)
    configs = importlib.import_module(f"transformers.models.{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(configs, f"{name}Config")(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        attn_implementation="eager",
    )
    module = getattr(modeling, f"{name}Attention")(config, 0).eval()
    cache = Cache([LENGTH], 4, 2, 16, torch.float32)
    q = 3 * torch.randn(LENGTH, 8, 16)
    spec: AttentionSpec = replace(spec_of(q, cache.kv, SCALE), window=WINDOW)
    options, sinks = {}, None
    match family:
        case "gemma2":
            spec = replace(spec, softcap=module.attn_logit_softcapping)
            options = {"softcap": module.attn_logit_softcapping}
            q *= 10  # scores beyond the cap
        case "gpt_oss":
            sinks = module.sinks.detach().normal_().float()
            spec = replace(spec, sinks=True)
        case "mistral":
            assert spec.extras() == ("sliding windows",)
    expected = attend(module, config, q, cache.keys[0], cache.values[0], **options).detach()

    backend, table = TorchAttention(), page_table(cache.pages)
    for size in (LENGTH, 13, 3):
        parts = []
        for start in range(0, LENGTH, size):
            chunk = PrefillBatch.of(table, (start,), (min(size, LENGTH - start),))
            parts.append(
                backend.prefill(
                    AttentionCall(q[start : start + size], cache.kv, spec, sinks), chunk
                )
            )
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)
    lengths = torch.arange(1, LENGTH + 1, dtype=torch.int32)
    rows = DecodeBatch(table.expand(LENGTH, -1), lengths, LENGTH)
    out = backend.decode(AttentionCall(q, cache.kv, spec, sinks), rows)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    unlimited = backend.decode(AttentionCall(q, cache.kv, replace(spec, window=None), sinks), rows)
    assert not torch.allclose(unlimited[WINDOW:], out[WINDOW:], rtol=1e-2, atol=1e-2)
