"""Reads adapters as PEFT saves them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.config import memory_bytes
from minisgl.errors import CallerError, in_one_line
from minisgl.models.filling import DTYPES
from minisgl.models.target import FLOATS

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS_BYTES = 16 << 30
# With more repetitions in a pattern, or with repetitions within them, matching may take ages.
_MAX_PATTERNS, _MAX_PATTERN, _MAX_REPETITIONS = 1024, 256, 3
_REPETITION, _REPEATED_GROUP = re.compile(r"(?<!\\)[*+?{]"), re.compile(r"\)[*+{]")
_KEY = re.compile(r"base_model\.model\.([\w.]+)\.lora_(A|B)\.weight", re.ASCII)
# What reading a file raises that is not as safetensors writes it.
_BROKEN = (OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
# Fields that are read here, or that change nothing once an adapter is trained. The tensors say what
# is adapted, so lists and patterns of targets are not looked at.
_HARMLESS = frozenset(
    """peft_type peft_version task_type auto_mapping base_model_name_or_path revision inference_mode
    r lora_alpha rank_pattern alpha_pattern use_rslora target_modules target_parameters
    exclude_modules layers_to_transform layers_pattern lora_dropout fan_in_fan_out megatron_config
    megatron_core qalora_group_size loftq_config eva_config corda_config lora_ga_config
    ensure_weight_tying bias init_lora_weights""".split()
)
_NAMED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA",
    "lora_bias": "biases of B",
    "modules_to_save": "modules that are trained as a whole",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
}
# Others, such as PiSSA, change the weights of the base model, too, when PEFT loads the file.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")


class AdapterError(CallerError):
    """An adapter's files are broken, do not fit to the model, or need what is not supported."""


class AdapterFacts(NamedTuple):
    """What an engine knows of an adapter that its ranks have."""

    digest: bytes  # differs where it computes something else, whatever its name is
    base: str | None  # the name of the model that it was trained for


class AdapterReader(Protocol):
    """Reads adapters for the ranks of an engine."""

    first: dict[str, AdapterFacts]  # of adapters 0, 1, ..., loaded at the start, by their names

    def read(self, number: int, folder: str, root: str | None = None) -> AdapterFacts:
        """Read and check an adapter on every rank, for plans that name this number. root: a folder
        outside of which nothing is read. Blocks; any thread may call it. Raises AdapterError, after
        which some ranks may have it, and EngineStoppedError."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices of an adapter for one map."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """What the files of an adapter say. The matrices are not scaled, and in the host's memory."""

    pairs: Mapping[str, Pair]  # by the path of the module in transformers: a [r, k], b [n, r]
    base: str | None
    alpha: float
    alpha_patterns: Sequence[tuple[re.Pattern[str], float]]  # of paths; the first one counts
    uses_rslora: bool

    def scale(self, path: str, rank: int) -> float:
        """What multiplies B·A. path: of the module, or of the parameter if it has several."""
        found = (alpha for pattern, alpha in self.alpha_patterns if pattern.fullmatch(path))
        return next(found, self.alpha) / (math.sqrt(rank) if self.uses_rslora else rank)

    @property
    def has_experts(self) -> bool:
        return any("experts" in path.split(".") for path in self.pairs)

    @cached_property
    def facts(self) -> AdapterFacts:
        patterns = [(pattern.pattern, alpha) for pattern, alpha in self.alpha_patterns]
        scales = self.alpha, patterns, self.uses_rslora
        found = hashlib.sha256(json.dumps(scales).encode())
        for path, pair in sorted(self.pairs.items()):
            for matrix in (pair.a, pair.b):
                found.update(f"{path} {matrix.dtype} {[*matrix.shape]}\n".encode())
                found.update(matrix.contiguous().view(torch.uint8).numpy().data)
        return AdapterFacts(found.digest(), self.base)


def read_adapter(folder: Path, *, root: Path | None = None) -> Adapter:
    """Read an adapter. root: a folder outside of which nothing is read.

    Raises AdapterError with one sentence that says what is wrong and what is allowed.
    """
    config, path = look_at(folder, root)
    pairs = _read_pairs(path)
    base = config.get("base_model_name_or_path")
    return Adapter(
        pairs,
        base if isinstance(base, str) else None,
        _number("lora_alpha", config.get("lora_alpha", 8)),
        _alpha_patterns(config),
        bool(config.get("use_rslora")),
    )


def look_at(folder: Path, root: Path | None = None) -> tuple[dict[str, Any], Path]:
    """The config of an adapter, and the path of its tensors, of which nothing is read. Raises
    AdapterError."""
    config = _read_config(_file(folder, CONFIG_FILE, MAX_CONFIG_BYTES, root))
    _refuse_config(config)
    most = min(MAX_TENSORS_BYTES, memory_bytes() // 8)  # it is in memory more than once
    return config, _file(folder, TENSORS_FILE, most, root)


def _file(folder: Path, name: str, most: int, root: Path | None) -> Path:
    """The path of a file of the folder, if it is one, within the root, and no larger than `most`
    bytes."""
    try:
        path = (folder / name).resolve()
        if root is not None and not path.is_relative_to(root.resolve()):
            raise AdapterError(f"The adapter lies outside of {root}; allowed: folders within it.")
        if not path.is_file():
            for pickle in _PICKLES:
                if (folder / pickle).exists():
                    raise AdapterError(
                        f"The adapter has {pickle}, a pickle, which can run code; allowed: "
                        f"{TENSORS_FILE}, which PEFT saves by default."
                    )
            raise AdapterError(
                f"The adapter has no file {name}; allowed: a folder as PEFT saves it, with "
                f"{CONFIG_FILE} and {TENSORS_FILE}."
            )
        size = path.stat().st_size
    except (OSError, ValueError, RuntimeError) as error:  # links in a circle, a NUL in the name
        raise AdapterError(f"{name} cannot be read: {in_one_line(error)}.") from error
    if size > most:
        raise AdapterError(f"{name} has {size:,} bytes; allowed: up to {most:,}.")
    return path


# -- the config -----------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {in_one_line(error)}.") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object; allowed: what PEFT saves.")
    return config


def _refuse_config(config: Mapping[str, Any]) -> None:
    """Raise AdapterError for what the arithmetic here has not."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type is {kind!r:.80}; allowed: 'LORA'.")
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"{CONFIG_FILE}: bias is {config['bias']!r:.80}: trained biases are not supported; "
            "allowed: 'none'."
        )
    initial = config.get("init_lora_weights", True)
    if initial not in _INITIAL:
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {initial!r:.80}, which may change the weights of "
            "the base model, too; allowed: an adapter that PEFT has converted to plain LoRA "
            "(path_initial_model_for_weight_conversion of save_pretrained)."
        )
    if config.get("use_rslora") not in (None, True, False):
        raise AdapterError(f"{CONFIG_FILE}: use_rslora is no flag; allowed: true and false.")
    for name, value in config.items():
        if name not in _HARMLESS and value:
            what = f" ({_NAMED[name]})" if name in _NAMED else ""
            raise AdapterError(
                f"{CONFIG_FILE}: {name!r:.80}{what} is not supported; allowed: plain LoRA, without "
                "this field."
            )


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise AdapterError(f"{CONFIG_FILE}: {name} is {value!r:.80}; allowed: a finite number.")


def _alpha_patterns(config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], float]]:
    given = config.get("alpha_pattern") or {}
    if not isinstance(given, dict) or len(given) > _MAX_PATTERNS:
        raise AdapterError(
            f"{CONFIG_FILE}: alpha_pattern is not a JSON object of up to {_MAX_PATTERNS} patterns."
        )
    return [(_pattern(key), _number("alpha_pattern", alpha)) for key, alpha in given.items()]


def _pattern(key: str) -> re.Pattern[str]:
    """Of the paths that end with what matches the key, behind a dot."""
    is_slow = _REPEATED_GROUP.search(key) or len(_REPETITION.findall(key)) > _MAX_REPETITIONS
    if len(key) <= _MAX_PATTERN and not is_slow:
        with suppress(re.error, RecursionError, OverflowError):
            re.compile(key)  # by itself, too: its groups end within it
            return re.compile(rf"(.*\.)?({key})")
    raise AdapterError(
        f"{CONFIG_FILE}: alpha_pattern has {key!r:.80}; allowed: regular expressions of up to "
        f"{_MAX_PATTERN} characters and {_MAX_REPETITIONS} repetitions, none of a group."
    )


# -- the tensors ----------------------------------------------------------------------------------


def _read_pairs(path: Path) -> dict[str, Pair]:
    found: dict[str, dict[str, Tensor]] = {}
    try:
        # A header of JSON behind its length, then the numbers. What reads such files copies them
        # with Python's lock held, and no step is launched meanwhile. Nor is the file mapped: the
        # system ends a process that reads a mapped file which is cut.
        data = torch.from_numpy(np.fromfile(path, np.uint8))
        size = int(data[:8].view(torch.int64))
        header = json.loads(data.narrow(0, 8, size).numpy().tobytes())
        header.pop("__metadata__", None)
        for key, about in sorted(header.items()):
            module, side = _split_key(key)
            found.setdefault(module, {})[side] = _matrix(key, about, data[8 + size :])
    except _BROKEN as error:
        raise AdapterError(f"{TENSORS_FILE} cannot be read: {in_one_line(error)}.") from error
    if not found:
        raise AdapterError(f"{TENSORS_FILE} has no tensors; allowed: pairs of lora_A and lora_B.")
    for module, sides in found.items():
        for side, other in ("AB", "BA"):
            if side not in sides:
                raise AdapterError(
                    f"{TENSORS_FILE} has lora_{other} of {module:.200} and not lora_{side}; "
                    "allowed: both of each module."
                )
        a, b = sides["A"], sides["B"]
        if a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"{TENSORS_FILE}: lora_A of {module:.200} has {a.shape[0]} rows, and lora_B "
                f"{b.shape[1]} columns; allowed: as many, the rank."
            )
    return {module: Pair(sides["A"], sides["B"]) for module, sides in found.items()}


def _split_key(key: str) -> tuple[str, str]:
    """The path of a module, and A or B."""
    match = _KEY.fullmatch(key)
    if match is None:
        kinds: Iterable[tuple[str, str]] = (
            ("lora_magnitude_vector", "DoRA"),
            ("lora_embedding_", "adapted embeddings"),
            (".bias", "trained biases"),
            ("", "tensors beside lora_A.weight and lora_B.weight"),
        )
        what = next(name for part, name in kinds if part in key)
        raise AdapterError(
            f"{TENSORS_FILE} has {key!r:.200}: {what} are not supported; allowed: "
            "base_model.model.PATH.lora_A.weight and lora_B.weight of linear maps."
        )
    return match[1], match[2]


def _matrix(key: str, about: Mapping[str, Any], numbers: Tensor) -> Tensor:
    """One of a file's numbers, which its header says something about."""
    dtype, shape, (start, end) = about["dtype"], about["shape"], about["data_offsets"]
    if dtype not in FLOATS:
        problem = f"has the dtype {dtype:.80}"
    elif len(shape) != 2 or 0 in shape:
        problem = f"has the shape {shape!s:.80}"
    else:
        matrix = numbers.narrow(0, start, end - start).view(DTYPES[dtype]).view(shape)
        if bool(matrix.isfinite().all()):
            return matrix
        problem = "has NaN or infinities"
    raise AdapterError(
        f"{TENSORS_FILE}: {key:.200} {problem}; allowed: finite matrices in float32, float16 or "
        "bfloat16."
    )
