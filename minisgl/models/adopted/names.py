"""How the tensors of a checkpoint are called in a model of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.models.adopted.towers import RENAMED, is_of_text

_EXPERT_MAPS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

NameOf = Callable[[str], str | None]


def names_of(model: Any, *, has_towers: bool = False, drafting: Sequence[str] = ()) -> NameOf:
    """The name in the model, without its prefix, of a tensor by its name in a checkpoint; None for
    what the model leaves aside, such as layers whose names begin with one of `drafting`.
    transformers knows the renamings, those of towers aside."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if not hasattr(each, "operations")]
    of_experts = [
        renamed
        for each in mapping
        if hasattr(each, "operations")
        for renamed in _of_experts(each.source_patterns, each.target_patterns)
    ]
    prefix = f"{model.base_model_prefix}."
    left_out = tuple(each.removeprefix(prefix) for each in drafting)

    def name_of(name: str) -> str | None:
        if has_towers:
            if not is_of_text(name):
                return None
            name = _of_text(name)
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        for pattern, replacement in of_experts:
            name = pattern.sub(replacement, name)
        name = name.removeprefix(prefix)
        return None if name.startswith(left_out) else name

    return name_of


def joined_maps(model: Any) -> list[tuple[str, list[str]]]:
    """Maps whose outputs a checkpoint may have in one tensor, by the part of its name in which it
    differs, and those of theirs."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return [
        (each.source_patterns[0], each.target_patterns)
        for each in get_model_conversion_mapping(model)
        if [type(operation).__name__ for operation in getattr(each, "operations", ())] == ["Split"]
    ]


def _of_text(name: str) -> str:
    for pattern, replacement in RENAMED.items():
        renamed = re.sub(pattern, replacement, name)
        if renamed != name:
            return renamed
    return name


def _of_experts(sources: list[str], targets: list[str]) -> list[tuple[re.Pattern[str], str]]:
    """Renames the matrices of single experts, of which transformers makes one tensor, to those of
    minisgl's experts."""
    path, _, last = targets[0].rpartition(".")
    maps = _EXPERT_MAPS.get(last, ())
    if len(targets) != 1 or len(sources) != len(maps) or not all("*" in each for each in sources):
        return []
    return [
        (
            re.compile(re.escape(source.removesuffix(".weight")).replace(r"\*", r"(\d+)") + r"\."),
            rf"{path}.\1.{name}.",
        )
        for source, name in zip(sources, maps, strict=True)
    ]
