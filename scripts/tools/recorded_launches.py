"""Records which Triton kernels the engine launches on a GPU, with their types, constants and
options, on a machine without one.

The engine itself runs on a pretended GPU: it loads the models of SERVED with their options,
captures its steps and runs the largest. A launch ends where Triton would compile its kernel. So no
list of arguments stands twice: what is recorded is what ships.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from dummy_config import config_of
from pretended_gpu import GPU, Device, pretended, pretended_ranks
from triton.runtime.jit import JITFunction

from minisgl.config import Capacity, EngineConfig, ResolvedConfig, resolve
from minisgl.kernels.cache_pages.page_copies import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kernels.hardware import has_fp8_products
from minisgl.models.config import ModelConfig
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.runner.load import load_runner
from minisgl.runner.memory import allocate_states
from minisgl.runner.setup import Setup
from minisgl.runner.warmup import longest_step

NUM_LAYERS = 2  # of each kind that the model has; the others are like these
# Rows of steps without a graph, beside the longest: tables of tiles have entries between them.
CHUNKS = (700, 1500, 3000)


def served(model: str, **options: Any) -> EngineConfig:
    """A model of dummy_config.py, with `:` before its quantisation, and how it is served."""
    return EngineConfig(model=model, load_format="dummy", attn="triton", **options)


SERVED = (
    served("Qwen3-0.6B"),
    served("Qwen3-14B"),
    served("Llama-3.1-8B"),
    served("Qwen3-30B-A3B"),
    served("Qwen3-14B", batch_invariant=True),
    served("Qwen3-30B-A3B", batch_invariant=True, head_dtype="float32"),
    served("Qwen3-0.6B", speculative="ngram"),  # a run's group of heads is padded
    served("Llama-3.1-8B", speculative="ngram"),
    served("Qwen3-30B-A3B", speculative="ngram"),
    served("Qwen3-14B", tp=2),
    served("Qwen3-14B", tp=4),
    served("Qwen3-14B:fp8-block", dense_copies="never"),
    served("Qwen3-14B:fp8-channel"),
    served("Qwen3-14B:fp8-tensor"),
    served("Qwen3-14B:int8"),
    served("Qwen3-30B-A3B:int8"),
    served("Qwen3-14B:int4", dense_copies="always"),
    served("Qwen3-14B:int4", dense_copies="never"),
    served("Qwen3-14B:awq", dense_copies="never"),
    served("Qwen3-30B-A3B:int4"),
    served("Qwen3-14B:nvfp4", dense_copies="always"),
    served("Qwen3-14B:nvfp4", dense_copies="never"),
    served("Qwen3-30B-A3B:nvfp4"),
    served("Qwen3-30B-A3B", tp=2, ep=True),
    served("Mistral-7B"),
    served("Qwen3.8-27B", speculative="ngram"),
    served("Qwen3.8-27B"),
    served("Qwen3.5-35B-A3B", speculative="ngram"),
    served("Qwen3.5-35B-A3B"),
    served("gpt-oss-20b"),
    served("gpt-oss-20b:none"),
    served("gpt-oss-20b", tp=2),
    served("gpt-oss-20b", tp=2, ep=True),
    served("gpt-oss-120b"),
    served("Gemma-2-9B"),
    served("Gemma-3-12B"),
    served("gemma-4-31B"),
    served("gemma-4-26B-A4B"),
    served("GLM-4.7-Flash"),
    served("DeepSeek-V2-Lite"),
    served("DeepSeek-V3"),
    served("MiMo-V2-Flash"),
    *(served("Llama-3.1-8B", max_loras=8, max_lora_rank=rank) for rank in (16, 64, 320)),
    *(served(f"Qwen3-30B-A3B:{kind}", max_loras=2, lora_experts=True) for kind in ("", "int4")),
    served("gpt-oss-20b", max_loras=2, lora_experts=True),
)
# There are no kernels of them for devices that cannot multiply FP8.
SERVED_IN_FP8 = (
    served("Qwen3-14B", kv_cache_dtype="fp8", speculative="ngram"),
    served("Qwen3-14B", kv_cache_dtype="fp8"),
    served("Qwen3-30B-A3B:fp8-block"),
    served("Qwen3-30B-A3B:fp8-channel"),
    served("Qwen3-30B-A3B:fp8-tensor"),
    served("Qwen3-30B-A3B:fp8-block", tp=2, ep=True),
    *(
        served(f"Qwen3-30B-A3B:fp8-{kind}", max_loras=2, lora_experts=True)
        for kind in ("block", "tensor")
    ),
    served("gpt-oss-20b", kv_cache_dtype="fp8"),
    served("Gemma-3-12B", kv_cache_dtype="fp8"),
    served("GLM-4.7-Flash", kv_cache_dtype="fp8"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What Triton compiles for a launch."""

    name: str  # of the kernel, with its module
    signature: dict[str, Any]  # types by the names of parameters
    constants: dict[tuple[int, ...], Any]  # by the places of parameters, and within tuples
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def kernel(self) -> Any:
        """The JITFunction."""
        module, _, function = self.name.rpartition(".")
        return getattr(import_module(module), function)

    @property
    def chosen(self) -> dict[str, Any]:
        """The constants and the options that the engine chose."""
        names = ("num_warps", "num_stages", "maxnreg")
        return {
            parameter.name: self.constants[(place,)]
            for place, parameter in enumerate(self.kernel.params)
            if parameter.is_constexpr
        } | {name: self.options[name] for name in names}


def record(device: Device) -> list[Launch]:
    """All different launches on `device`. Only for a process that has asked for no device before,
    and will ask for no other."""
    found: dict[tuple[str, str], Launch] = {}

    def note(
        kernel: Any,
        key: str,
        signature: Any,
        index: int,
        constants: Any,
        options: Any,
        attributes: Any,
        warmup: bool,
    ) -> Any:
        name = f"{kernel.module}.{kernel.__name__}"
        found[name, key] = Launch(name, signature, constants, attributes, options.__dict__)
        compiled = kernel.device_caches[index][0]
        return compiled.setdefault(key, _NOTHING)

    in_fp8 = SERVED_IN_FP8 if has_fp8_products(device.capability) else ()
    with TemporaryDirectory() as name:
        # What reads the configs of models of transformers computes, which no pretended GPU does.
        models = [(options, *_written(options, Path(name))) for options in (*SERVED, *in_fp8)]
        with pretended(device), mock.patch.object(JITFunction, "_do_compile", note):
            for options, folder, model in models:
                _serve(options, folder, model)
    return list(found.values())


# In place of a compiled kernel: its launch does nothing.
_NOTHING = SimpleNamespace(
    launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
)


def _written(options: EngineConfig, root: Path) -> tuple[Path, ModelConfig]:
    """A folder with the config of few layers, and what the engine reads there."""
    folder = root / options.model
    folder.mkdir(exist_ok=True)
    model, _, quantization = options.model.partition(":")
    content = config_of(model, quantization or None) | {"num_hidden_layers": NUM_LAYERS}
    if "full_attention_interval" in content:
        content["full_attention_interval"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(content))
    return folder, read_model_config(folder)


def _serve(options: EngineConfig, folder: Path, model: ModelConfig) -> None:
    """Start an engine's runner as a server does, and run eager steps."""
    facts = model.facts()
    config = resolve(options, facts, device_facts(facts.on_rank(options.tp)), overlap=True)
    ranks = pretended_ranks(options.tp, model.hidden_size, getattr(torch, config.dtype))
    runner = load_runner(Setup(config, model, folder), ranks=ranks)
    for length in CHUNKS:
        shorter = replace(config, max_prefill_length=min(length, config.max_prefill_length))
        plan = longest_step(shorter, runner.vocab_size, scored=False)
        runner.collect(runner.launch(plan))
    runner.close()
    _move_pages(config, model, config_of(options.model.partition(":")[0])["num_hidden_layers"])


def _move_pages(config: ResolvedConfig, model: ModelConfig, num_layers: int) -> None:
    """To host memory and back, for which a runner needs streams."""
    specs = model.facts().on_rank(config.tp).kv_specs(config.kv_dtype)[:1] * num_layers
    states = allocate_states(specs, Capacity(64, config.page_size, num_slots=0, max_seq_len=0), GPU)
    planes = Planes.of([plane for state in states for plane in state.planes])
    pages = torch.zeros(8, dtype=torch.int64, device=GPU)
    packed = torch.empty((8, planes.page_bytes), dtype=torch.uint8, device=GPU)
    gather_pages(planes, pages, packed)
    scatter_pages(planes, pages, packed)
