"""How a checkpoint makes vectors of texts, as its files for sentence-transformers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.errors import CheckpointError, UnsupportedModelError, one_of
from minisgl.models.config_reader import CONFIG_FILE, Fields, read_json
from minisgl.pooling import PooledRows

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
_KINDS = ["Transformer", "Pooling", "Normalize"]

_MODES = {"lasttoken": PooledRows.LAST, "mean": PooledRows.MEAN, "cls": PooledRows.FIRST}
_MODE_FIELDS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# Tokens that end each text of a model, whether its tokenizer appends them or not.
_END_TOKENS = {"qwen3": "<|endoftext|>"}
_INSTRUCTIONS = {"qwen3": "Instruct: {instruction}\nQuery:"}


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """What a checkpoint says of its vectors."""

    rows: PooledRows = PooledRows.LAST
    normalize: bool = True
    with_prompt: bool = True  # a mean takes the tokens of the prompt in
    prompts: Mapping[str, str] = field(default_factory=dict)  # what precedes a text, by name
    default_prompt: str | None = None
    end_token: str | None = None  # appended where the tokenizer does not
    instruct: str | None = None  # what precedes a text with an instruction


def read_embedding_rules(folder: Path) -> EmbeddingRules | None:
    """Read the modules of a checkpoint; None if it does not say that it makes vectors.

    Raises CheckpointError for a broken file, UnsupportedModelError for what is not computed here.
    """
    if not (folder / MODULES_FILE).is_file():
        return None
    modules = _read_modules(folder / MODULES_FILE)
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        return None
    if kinds not in (_KINDS, _KINDS[:2]):
        raise UnsupportedModelError(
            f"{MODULES_FILE} names the modules {', '.join(kinds)}; allowed: {', '.join(_KINDS)}, "
            "of which the last may be missing."
        )
    path = modules[1][1]
    pooling = Fields(read_json(folder / path / CONFIG_FILE), f"{path}/{CONFIG_FILE}")
    prompts, default = _read_prompts(folder)
    rules = default_rules(folder)
    return EmbeddingRules(
        rows=_rows(pooling),
        normalize="Normalize" in kinds,
        with_prompt=pooling.values.get("include_prompt") is not False,
        prompts=prompts,
        default_prompt=default,
        end_token=rules.end_token if _rows(pooling) is PooledRows.LAST else None,
        instruct=rules.instruct,
    )


def default_rules(folder: Path) -> EmbeddingRules:
    """The rules for a checkpoint without modules: the norm of the last token."""
    model_type = read_json(folder / CONFIG_FILE).get("model_type")
    return EmbeddingRules(
        end_token=_END_TOKENS.get(str(model_type)), instruct=_INSTRUCTIONS.get(str(model_type))
    )


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [(each["type"].rpartition(".")[2], str(each["path"])) for each in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def _rows(pooling: Fields) -> PooledRows:
    chosen: Any = pooling.values.get("pooling_mode")
    if chosen is None:
        chosen = [mode for name, mode in _MODE_FIELDS.items() if pooling.values.get(name)]
    modes = [chosen] if isinstance(chosen, str) else list(chosen)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{pooling.where}: pooling by {' and '.join(map(str, modes)) or 'nothing'} is not "
            f"supported; {one_of(tuple(_MODES))}."
        )
    return _MODES[modes[0]]


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / PROMPTS_FILE
    if not path.is_file():
        return {}, None
    values = read_json(path)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    is_valid = isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())
    if not is_valid or not (default is None or default in prompts):
        raise CheckpointError(f"{path}: prompts must be texts by name, the default one of them.")
    return prompts, default
