"""Strict, typed access to the fields of config.json.

The readers of the families are strict: a field that they do not know may change the arithmetic. So
a field that is neither read, nor known to be harmless, nor switched off is rejected by name, unless
transformers does not read it either.
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from minisgl.config import DTYPES, MAX_SEQ_LEN
from minisgl.errors import CheckpointError, UnsupportedModelError, one_of
from minisgl.models.transformers_fields import fields_read

CONFIG_FILE = "config.json"
_TEXT_CONFIG = f"{CONFIG_FILE}: text_config"
# Of config.json; the second is that of compressed-tensors in 2024.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
DRAFTING_LEFT_OUT = "layers that draft tokens, left out: "  # begins a note of a ModelConfig

# Bounds far beyond any model, which keep allocations that follow from a field reasonable.
_LARGEST_COUNT = 2**31 - 1
NUMBERS_OF_LAYERS = frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
_LARGEST_COUNTS = {
    **dict.fromkeys(NUMBERS_OF_LAYERS, 10_000),
    "max_position_embeddings": MAX_SEQ_LEN,
}
_LARGEST = 1e30

# Before a layer, in models of text and in those that see.
_PREFIX = re.compile(r"(?:model\.|language_model\.)*")

logger = logging.getLogger(__name__)


def without_prefix(name: str) -> str:
    """The name of a tensor or module of a checkpoint without what stands before its layer."""
    return _PREFIX.sub("", name, count=1)


def field_names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


# Names, token ids, and fields that only training, generation or an implementation reads.
HARMLESS_FIELDS = field_names(
    """model_type transformers_version _name_or_path name_or_path _commit_hash auto_map
    tokenizer_class task_specific_params id2label label2id num_labels problem_type finetuning_task
    transformers.js_config is_llama_config unsloth_version unsloth_fixed
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
    max_sequence_length model_max_length gradient_checkpointing
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    num_return_sequences
    use_cache pretraining_tp return_dict is_decoder output_hidden_states output_attentions
    attn_implementation _attn_implementation _attn_implementation_autoset"""
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`. Raises CheckpointError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read: its lists are nested too deep.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return values


class Fields:
    """Typed access to a JSON object. null counts as absent; a value of a wrong type, and a missing
    field without a default, raise CheckpointError."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """where: what messages call the object."""
        self.values = values
        self.where = where

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        most = _LARGEST_COUNTS.get(name, _LARGEST_COUNT)
        value = self._get(name, default)
        # NaN fails every comparison.
        if not _is_number(value) or not 1 <= value <= most or value != int(value):
            raise self.wrong(name, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(name, default)
        if not _is_number(value) or not (value == 0 or 1 / _LARGEST <= abs(value) <= _LARGEST):
            raise self.wrong(name, f"0 or a number from {1 / _LARGEST:g} to {_LARGEST:g}")
        return float(value)

    def number_above(self, low: float, name: str, default: float | None = None) -> float:
        """A finite number greater than `low`."""
        value = self.number(name, default)
        if value <= low:
            raise self.wrong(name, f"a number above {low:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def whole_numbers(self, name: str) -> list[int]:
        """A list of integers, empty by default."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(number) is not int for number in value):
            raise self.wrong(name, "a list of whole numbers")
        return value

    def kinds(self, name: str, allowed: tuple[str, str], default: list[str]) -> list[str]:
        """One of two kinds for each layer; `default` has as many as there are layers."""
        value = self._get(name, default)
        is_list = isinstance(value, list) and len(value) == len(default)
        if not is_list or not {*map(str, value)} <= {*allowed}:
            raise self.wrong(name, f"{len(default)} times {' or '.join(allowed)}")
        kinds: list[str] = value
        return kinds

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """The error to raise where field `name` is not `wanted`."""
        value = reprlib.repr(self.values.get(name))
        return CheckpointError(f"{self.where}: {name} is {value}, not {wanted}.")

    def part(self, name: str) -> Fields:
        """The object in a field, empty by default."""
        values, where = self.values.get(name) or {}, f"{self.where}: {name}"
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is not a JSON object.")
        return Fields(values, where)

    def refused(self, name: str, allowed: str) -> UnsupportedModelError:
        """The error to raise for the value of a field."""
        value = reprlib.repr(self.values.get(name))
        return UnsupportedModelError(f"{self.where}: {name} {value} is not supported; {allowed}.")

    def require(self, name: str, values: Collection[object], instead: str = "") -> None:
        """Raise UnsupportedModelError where a field has another value."""
        value = self.values.get(name)
        # 1 equals True to Python.
        if not any(value == known and type(value) is type(known) for known in values):
            allowed = one_of([known for known in values if known is not None])
            raise self.refused(name, allowed + instead)

    def refuse_others(self, known: frozenset[str]) -> None:
        """Raise UnsupportedModelError for a field outside `known` that is switched on: null, false,
        0 and empty values are not. Of one that transformers does not read, warn instead."""
        others = [name for name, value in self.values.items() if value and name not in known]
        read = fields_read(self.values) if others else None
        for name in others:
            field = f"{self.where}: the field {name} ({reprlib.repr(self.values[name])})"
            if read is None or name in read:
                raise UnsupportedModelError(f"{field} is not supported.")
            logger.warning("%s is left aside: transformers does not read it either.", field)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.where} lacks {name}.")
        return default if value is None else value


def quantization_fields(values: Mapping[str, Any]) -> Fields | None:
    """What a config.json says of quantisation, for the whole or for its text part; None: nothing.
    Raises CheckpointError."""
    for part, where in ((values, CONFIG_FILE), (values.get("text_config"), _TEXT_CONFIG)):
        for name in QUANTIZATION_FIELDS:
            found = part.get(name) if isinstance(part, Mapping) else None
            if found and not isinstance(found, dict):
                raise CheckpointError(f"{where}: {name} is not a JSON object.")
            if found:
                return Fields(found, f"{where}: {name}")
    return None


def checkpoint_dtype(fields: Fields) -> str:
    """The dtype of a checkpoint's weights, one of DTYPES. Raises UnsupportedModelError."""
    # Configs without the field date from when every checkpoint was float32, or are of gpt-oss.
    default = "bfloat16" if fields.values.get("model_type") == "gpt_oss" else "float32"
    value = fields.values.get("dtype") or fields.values.get("torch_dtype") or default
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{CONFIG_FILE}: dtype {name} is not supported; {one_of(DTYPES)}"
        )
    return name


def drafting_layers(fields: Fields) -> tuple[int, tuple[str, ...]]:
    """How many layers that draft a checkpoint has behind the others, and the note that they are
    left out. Raises CheckpointError."""
    for name in ("num_mtp_layers", "num_nextn_predict_layers"):
        if fields.values.get(name):
            number = fields.count(name)
            return number, (f"{DRAFTING_LEFT_OUT}{number}",)
    return 0, ()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
