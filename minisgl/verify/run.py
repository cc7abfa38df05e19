"""Verifies a model: minisgl beside transformers, on this machine and with its weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from minisgl.config import Activations, EngineConfig, ResolvedConfig
from minisgl.errors import ConfigError, UnsupportedModelError, in_one_line
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.formats import FP8_WHILE_LOADING
from minisgl.models.formats.int8 import Int8
from minisgl.models.hub import locate_model
from minisgl.models.registry import read_model_config
from minisgl.text.parsing.selection import choose_format
from minisgl.text.template_file import read_template
from minisgl.verify.answers import Stretch, answers, for_verifying
from minisgl.verify.prompts import Prompts
from minisgl.verify.reference import Fp8, Reference, Scores
from minisgl.verify.texts import differing_conversations, differing_texts
from minisgl.verify.verdict import PathResult, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What verifying a model has shown."""

    facts: Sequence[str]  # the code, the dtype, the device
    dtype: str
    paths: Sequence[PathResult] = ()
    not_compared: Sequence[str] = ()  # what was not, and why
    texts: Sequence[str] | None = None  # those whose tokens differ; None: not compared
    conversations: dict[str, str] = field(default_factory=dict)  # "", or what differs
    format: str = ""  # the parsers

    @property
    def faults(self) -> list[str]:
        """What is not as in transformers, one sentence each."""
        faults = [each.fault for each in self.paths if not each.is_right]
        faults += [f"the tokens of {text} differ" for text in self.texts or ()]
        return faults + [f"{name}: {said}" for name, said in self.conversations.items() if said]

    @property
    def is_right(self) -> bool:
        """Whether all was compared, and nothing differs."""
        return not self.faults and not self.not_compared


def verify(config: EngineConfig, tell: Callable[[str], None]) -> Findings:
    """Compare minisgl with transformers. tell: takes what happens, for people. Blocks.

    Raises MinisglError where minisgl does not run the model.
    """
    if config.load_format == "dummy":
        raise ConfigError(
            "--load-format", "dummy", "allowed: auto, for weights that mean something"
        )
    if config.task not in ("auto", "generate"):
        raise ConfigError("--task", config.task, "verify compares next tokens; allowed: generate")
    folder = locate_model(config.model)
    model = read_model_config(
        folder, quantization=config.quantization, model_impl=config.model_impl
    )
    tell("minisgl computes the prompts.")
    with LLM(**asdict(for_verifying(config))) as llm:
        engine = llm.engine
        resolved, tokenizer = engine.config, engine.tokenizer
        assert tokenizer is not None  # without one, loading fails
        stretches = answers(llm, Prompts.of(tokenizer, engine.capacity.max_seq_len))
    del llm, engine
    gc.collect()
    if resolved.device == "cuda":
        torch.cuda.empty_cache()
    tell("transformers computes them.")
    paths: list[PathResult] = []
    not_compared: list[str] = []
    try:
        paths = beside_transformers(folder, stretches, resolved, model)
    except UnsupportedModelError as error:
        not_compared.append(f"no numbers were compared, since {error}")
    template = read_template(config.chat_template) if config.chat_template else None
    texts: list[str] | None = None
    conversations: dict[str, str] = {}
    try:
        texts = differing_texts(tokenizer, folder)
        if tokenizer.has_chat_template:
            conversations = differing_conversations(tokenizer, folder, template)
    except Exception as error:  # of whichever tokenizer
        not_compared.append(
            f"no texts were compared, since transformers' tokenizer fails: {in_one_line(error)}"
        )
    return Findings(
        facts=_facts(model, resolved),
        dtype=resolved.dtype,
        paths=paths,
        not_compared=not_compared,
        texts=texts,
        conversations=conversations,
        format=str(choose_format(tokenizer)),
    )


def beside_transformers(
    folder: Path, stretches: Sequence[Stretch], config: ResolvedConfig, model: ModelConfig
) -> list[PathResult]:
    """What minisgl computed with `config`, beside transformers. Raises UnsupportedModelError where
    transformers cannot compute it here."""
    dtype = getattr(torch, config.dtype)
    fp8 = _in_fp8(config, model)
    try:
        reference = Reference(folder, dtype, model.quantization)

        def scores(dtype: torch.dtype, fp8: Fp8) -> list[Scores]:
            try:
                return reference.scores(stretches, dtype, torch.device(config.device), fp8)
            except torch.OutOfMemoryError:
                return reference.scores(stretches, dtype, torch.device("cpu"), fp8)

        exact = scores(torch.float32, Fp8())
        rounded = exact if (dtype, fp8) == (torch.float32, Fp8()) else scores(dtype, fp8)
    except UnsupportedModelError:
        raise
    except Exception as error:  # of whatever code
        raise UnsupportedModelError(
            f"transformers does not run it: {in_one_line(error)}"
        ) from error
    return compare(stretches, exact, rounded, dtype)


def _in_fp8(config: ResolvedConfig, model: ModelConfig) -> Fp8:
    scheme, inputs = model.quantization, Activations.NONE
    if scheme is not None:
        scheme = scheme.rounding
        inputs = scheme.on(torch.device(config.device), getattr(torch, config.dtype)).activations
    if inputs == Activations.NONE and config.kv_dtype != config.dtype:
        inputs = Activations.TOKEN  # keys and values alone cost less
    group = 0 if scheme is None else scheme.group
    weights, integers = scheme is FP8_WHILE_LOADING, isinstance(scheme, Int8)
    return Fp8(inputs, group, weights, integers)


def _facts(model: ModelConfig, config: ResolvedConfig) -> list[str]:
    if isinstance(model, NativeConfig):
        code = [f"model: {model.architecture} with minisgl's own code for this architecture"]
    else:
        code = [note for note in model.notes if note.startswith("model: ")]
    weights = "" if model.quantization is None else f", weights {model.quantization}"
    return [
        *code,
        f"computed in {config.dtype} on {config.device}{weights}, KV cache in {config.kv_dtype}, "
        f"attention {config.attn_prefill} and {config.attn_decode}",
    ]
