"""The sampling defaults and EOS tokens of a checkpoint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.errors import CheckpointError, InvalidRequestError
from minisgl.models.config_reader import CONFIG_FILE, read_json
from minisgl.request import MAX_EDITS, SAMPLED, SamplingParams

GENERATION_FILE = "generation_config.json"

# The fields of generation_config.json that are fields of SamplingParams by the same name.
_SAMPLED = ("temperature", *(parameter.name for parameter in SAMPLED if parameter.is_filter))
_ALWAYS = ("repetition_penalty",)
FROM_CHECKPOINT = _SAMPLED + _ALWAYS


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults and EOS tokens of a checkpoint."""

    eos_token_ids: frozenset[int]
    # Values of fields of SamplingParams; only those that the checkpoint sets.
    values: Mapping[str, float] = field(default_factory=dict)

    def sampling(self, **chosen: Any) -> SamplingParams:
        """SamplingParams with the `chosen` fields, and the checkpoint's defaults for the others."""
        return SamplingParams(**{**self.values, **chosen})


def read_generation_defaults(
    folder: Path, tokenizer_eos_id: int | None = None
) -> GenerationDefaults:
    """Combine generation_config.json, config.json and the tokenizer's EOS id.

    They may name different EOS tokens (Llama 3 has three), so the result is the union. Of a config
    with a text part, that of the part counts where the whole has none. Both files may be absent.
    Raises CheckpointError where a file is broken or a value is invalid.
    """
    generation = _read_if_present(folder / GENERATION_FILE)
    eos_token_ids = _token_ids(generation, GENERATION_FILE)
    config = _read_if_present(folder / CONFIG_FILE)
    text = config.get("text_config")
    if config.get("eos_token_id") is None and isinstance(text, dict):
        config = text
    eos_token_ids |= _token_ids(config, CONFIG_FILE)
    if tokenizer_eos_id is not None:
        eos_token_ids |= {tokenizer_eos_id}
    if len(eos_token_ids) > MAX_EDITS:
        raise CheckpointError(
            f"{folder} names {len(eos_token_ids)} EOS tokens; at most {MAX_EDITS} are supported."
        )

    greedy = generation.get("do_sample") is False
    names = _ALWAYS if greedy else FROM_CHECKPOINT
    sampling = {name: generation[name] for name in names if generation.get(name) is not None}
    if greedy:
        sampling["temperature"] = 0.0
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise CheckpointError(f"{folder / GENERATION_FILE}: {error}") from error
    return GenerationDefaults(eos_token_ids, sampling)


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_ids(values: dict[str, Any], where: str) -> frozenset[int]:
    found = values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(id, bool) or not isinstance(id, int) for id in ids):
        raise CheckpointError(
            f"{where}: eos_token_id is {reprlib.repr(found)}, not a token id or a list of them."
        )
    return frozenset(id for id in ids if id >= 0)  # -1 stands for none
