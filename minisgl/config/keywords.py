"""The options of the engine as keywords in Python, where `--page-size 16` is `page_size=16`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, get_origin, get_type_hints

from minisgl.config.engine import EngineConfig
from minisgl.config.options import option_names
from minisgl.errors import ConfigError, nearest, one_of

Text: TypeAlias = str | os.PathLike[str]
OPTION = re.compile(r"--[a-z][a-z-]*[a-z]")
# What people write elsewhere, beside the spellings of the command line.
FAMILIAR = {
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "max_prefill_length",
    "mem_fraction_static": "memory_ratio",
}

# Options of other engines, and what to do here, by their names in Python.
INSTEAD = {
    "revision": "download it with `hf download ID --revision REVISION --local-dir FOLDER`, and "
    "give that folder as the model",
    "seed": "a request has its own, among its sampling parameters",
    "tokenizer": "it is read from the folder of the model",
    "trust_remote_code": "leave it out, since code of a checkpoint never runs",
}


class TorchDtype(Protocol):
    """A dtype of torch, which is not imported here."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...


class TorchDevice(Protocol):
    """A device of torch."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class OtherSpellings(TypedDict, total=False):
    """The spellings of options that no field of EngineConfig has."""

    model_path: Text
    max_model_len: int | None
    tensor_parallel_size: int
    tp_size: int
    enable_dp_attention: bool
    pipeline_parallel_size: int
    pp_size: int
    enable_expert_parallel: bool
    gpu_memory_utilization: float
    enable_return_routed_experts: bool
    cache: Literal["radix", "naive"]
    attention_backend: str


class EngineOptions(OtherSpellings, total=False):
    """The fields of EngineConfig, as keywords that editors complete."""

    model: Text
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | TorchDtype
    device: Literal["auto", "cuda", "cpu"] | TorchDevice
    load_format: Literal["auto", "dummy"]
    quantization: Literal["fp8"] | None
    model_impl: Literal["auto", "native", "adopted"]
    task: Literal["auto", "generate", "embed", "rerank"]
    max_seq_len_override: int | None
    chat_template: Text | None
    tp: int
    dp_attention: bool
    pp: int
    ep: bool
    parallel: Literal["given", "auto", "heads"]
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    cluster_token_file: Text
    disable_pynccl: bool
    memory_ratio: float
    num_pages: int | None
    page_size: int | None
    cache_type: Literal["radix", "naive"]
    kv_cache_dtype: Literal["auto", "model", "fp8"]
    dense_copies: Literal["auto", "always", "never"]
    host_cache: float
    whole_pages: bool
    state_cache: float | None
    disk_cache: Text | None
    disk_cache_gb: float
    max_running_requests: int
    max_queued_requests: int
    max_prefill_length: int
    schedule_policy: Literal["fcfs", "lpm"]
    schedule_conservativeness: float
    key_share: float
    step_timeout: float
    max_logprobs: int
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    head_dtype: Literal["auto", "float32"]
    return_routed_experts: bool
    batch_invariant: bool
    speculative: Text | None
    draft_tokens: int
    draft_acceptance: float | None
    lora: str | tuple[str, ...] | Mapping[str, Text]
    max_loras: int | None
    max_lora_rank: int
    lora_experts: bool
    image_hosts: str | tuple[str, ...]
    image_rows: int
    attn: str
    cuda_graph_max_bs: int | None


class KeywordError(ConfigError):
    """A keyword is unknown, or has a value that cannot be used."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r}", True, allowed)
        self.param = name


SPECS = {spec.name: spec for spec in fields(EngineConfig)}
_LISTS = {name for name, hint in get_type_hints(EngineConfig).items() if get_origin(hint) is tuple}
# The fields by all their spellings on the command line, and in Python.
SPELLINGS = {spelling: name for name, spec in SPECS.items() for spelling in option_names(spec)}
KEYWORDS = {spelling[2:].replace("-", "_"): name for spelling, name in SPELLINGS.items()}


def config_of(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these options. Raises KeywordError."""
    given: dict[str, Any] = {}
    for keyword, value in options.items():
        name = KEYWORDS.get(keyword)
        if name is None:
            raise KeywordError(keyword, value, _unknown(keyword))
        if name in given:
            other = next(each for each in options if KEYWORDS[each] == name)
            reason = f"the same option is given by {other}, too; allowed: one of them"
            raise KeywordError(keyword, value, reason)
        said = _in_words(value)
        given[name] = (said,) if name in _LISTS and isinstance(said, str) else said
    try:
        return EngineConfig(**given)
    except ConfigError as error:
        raise in_keywords(error, options) from None


def in_keywords(error: ConfigError, options: Mapping[str, Any]) -> ConfigError:
    """An error of the command line in Python's words; `options` are those that were given."""
    name = SPELLINGS.get(error.param or "")
    if name is None:
        return error
    choices = SPECS[name].metadata["choices"]
    allowed = OPTION.sub(lambda said: SPELLINGS.get(said[0], said[0]), error.allowed)
    if choices and error.allowed == one_of(choices):
        allowed = one_of(map(repr, choices))
    keyword = next((each for each in options if KEYWORDS[each] == name), name)
    return KeywordError(keyword, options.get(keyword, SPECS[name].default), allowed)


def _in_words(value: Any) -> Any:
    """What the command line says for a path, a dtype or device of torch, or another kind of text
    or number, such as a member of an enumeration or a number of NumPy."""
    match value:
        case bool():
            return value
        case str():
            return str.__str__(value)  # which a subclass may override
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case os.PathLike():
            return os.fspath(value)
        case Mapping():  # folders of adapters by name
            return tuple(f"{_in_words(name)}={_in_words(at)}" for name, at in value.items())
        case list() | tuple():
            return tuple(map(_in_words, value))
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _unknown(name: str) -> str:
    """What to say of a keyword that does not exist."""
    if name in INSTEAD:
        return f"there is no such option; {INSTEAD[name]}"
    near = nearest(name, KEYWORDS, FAMILIAR)
    hint = f"did you mean {near}? " if near else ""
    return f"there is no such option; {hint}{one_of(SPECS)}"
