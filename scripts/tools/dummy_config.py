"""Writes the config.json of a public model, for benchmarks with random weights and no download.

dummy_models.json has those fields of the published files that transformers does not have as
defaults, without the ids of tokens: random weights would end answers by chance. Of models that also
see images, the text part; of a name that ends with -vision, the tower, too. Qwen3.5-tiny, which a
CPU can compute, is of no publisher.

python scripts/tools/dummy_config.py Qwen3-0.6B /tmp/qwen3-0.6b
minisgl bench --model /tmp/qwen3-0.6b --load-format dummy

With --quantization it is that of a quantised checkpoint, as the tools that make such write it:

| fp8-block | Qwen and DeepSeek: a scale for each 128 x 128 weights |
| fp8-channel | compressed-tensors, FP8_DYNAMIC: a scale for each row |
| fp8-tensor | AutoFP8: a scale for each matrix, and one for its inputs |
| int8 | compressed-tensors, W8A8: a scale for each row |
| int4 | compressed-tensors, W4A16: symmetric, in groups of 128 |
| awq | AutoAWQ: with zero points, in groups of 128 |
| gptq | GPTQModel: symmetric, in groups of 128 |
| nvfp4 | compressed-tensors, NVFP4A16 |
| none | not quantised, where it is published quantised |

A name that ends with -eagle3 is that of a drafter of the model: --speculative FOLDER.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("dummy_models.json").read_text())
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def model_of(sizes: list[int], family: str | None = None, **own: Any) -> dict[str, Any]:
    """The config of a model of the file: with what its family has in common."""
    common = DATA["families"][family] if family else {}
    return common | dict(zip(SIZES, sizes, strict=True)) | own


def with_tower(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """A model of Qwen3.5's kind that sees. Its tokens for images are the last that
    dummy_tokenizer.py writes."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {name: text[name] for name in text if name != "architectures"},
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5"} | tower,
        **{name: text["vocab_size"] - 3 + place for place, name in enumerate(names)},
    }


def eagle3_head(model: str) -> dict[str, Any]:
    """An EAGLE-3 head of 32,000 tokens for one of MODELS."""
    target = {name: value for name, value in MODELS[model].items() if name != "rope_scaling"}
    return target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": 32000,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def compressed_tensors(format: str, weights: Any, inputs: Any = None) -> dict[str, Any]:
    """What llm-compressor writes: `weights` and `inputs` say how these are quantised."""
    usual = {"symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": usual | weights,
        "input_activations": inputs and usual | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],  # the latter: routers
        "kv_cache_scheme": None,
    }


MODELS = {name: model_of(**fields) for name, fields in DATA["models"].items()}
MODELS |= {
    name: with_tower(MODELS[name.removesuffix("-vision")], tower)
    for name, tower in DATA["towers"].items()
}
# Of drafters, which are no models: for --speculative FOLDER with --load-format dummy.
DRAFTERS = {f"{name}-eagle3": eagle3_head(name) for name in ("Llama-3.1-8B", "Qwen3-14B")}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    name: compressed_tensors(**fields) if "format" in fields else fields
    for name, fields in DATA["quantizations"].items()
}


def config_of(model: str, quantization: str | None = None) -> dict[str, Any]:
    """The content of config.json. model: of MODELS, or without a quantisation of DRAFTERS;
    quantization: of QUANTIZATIONS."""
    if quantization is None:
        return (MODELS | DRAFTERS)[model]
    return MODELS[model] | {"quantization_config": QUANTIZATIONS[quantization]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*MODELS, *DRAFTERS]
    parser.add_argument("model", choices=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where config.json goes")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="the format of the weights")
    given = parser.parse_args()
    if given.quantization and given.model in DRAFTERS:
        parser.error(f"--quantization: {given.model} is a drafter, and not quantised")
    given.folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(config_of(given.model, given.quantization), indent=2)
    (given.folder / "config.json").write_text(content + "\n")


if __name__ == "__main__":
    main()
