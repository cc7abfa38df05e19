"""What is known of a model that sees, before its tower is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import ResolvedConfig
from minisgl.models.config import ModelConfig
from minisgl.models.config_reader import CONFIG_FILE, Fields, read_json

# Each of these gives rows for an image by itself, which take the places of its placeholders.
SEEING = frozenset({"LlavaForConditionalGeneration"})
_PLACEHOLDERS = ("image_token_id", "image_token_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a model sees images."""

    architecture: str
    values: dict[str, Any]  # of the whole config.json
    placeholder: int  # the id that a prompt has in the place of each row of an image
    row_size: int  # numbers in a row


def read_sight(folder: Path, model: ModelConfig, options: ResolvedConfig) -> Sight | str:
    """How the model in `folder` sees, or why it takes no images. model: its text part."""
    fields = Fields(read_json(folder / CONFIG_FILE), CONFIG_FILE)
    names = fields.values.get("architectures") or [""]
    placeholders = [fields.values[name] for name in _PLACEHOLDERS if name in fields.values]
    if names[0] not in SEEING or not placeholders:
        return (
            "it reads text only"
            if names[0] == model.architecture
            else (f"of {names[0]}, minisgl runs the text part only")
        )
    if options.task != "generate":
        return f"it was loaded with --task {options.task}"
    if not options.image_rows:
        return "it was loaded with --image-rows 0"
    return Sight(
        architecture=names[0],
        values=dict(fields.values),
        placeholder=int(placeholders[0]),
        row_size=model.hidden_size,
    )
