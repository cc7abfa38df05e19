"""What is known of a model that sees, before its tower is loaded."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import ResolvedConfig
from minisgl.models import lfm2, qwen3_5
from minisgl.models.config import ModelConfig
from minisgl.models.config_reader import CONFIG_FILE, Fields, read_json

_QWEN_3 = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
# Those whose images have any shape, in lines of rows: they count positions in three directions.
# With each, how many pairs of a head each of these rotates, unless the config says it.
BY_LINES: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(qwen3_5.WITH_TOWER, (11, 11, 10)),
    "Qwen2VLForConditionalGeneration": (16, 24, 24),
    "Qwen2_5_VLForConditionalGeneration": (16, 24, 24),
    **dict.fromkeys(_QWEN_3, (24, 20, 20)),
}
# Of these, those whose pairs take turns; of the others, those of one position follow each other.
_IN_TURN = frozenset((*qwen3_5.WITH_TOWER, *_QWEN_3))


class BothWays(enum.Enum):
    """Where the rows of an image see those behind them, too."""

    ALL = "in all layers"
    WINDOWED = "in layers with a window"


class Kind(enum.Enum):
    """What a tower takes of an image."""

    SQUARE = "one tile"
    TILES = "tiles, and which of their pixels are there"
    ANYRES = "the whole and its tiles, and the size of the image"
    SIZED = "all of its pixels, and their size"
    LINES = "patches, and how many lines of how many"
    PLACED = "patches, and where each is"
    PATCHED = "patches of tiles, which of them are there, and in how many lines"


# Each of these gives rows for an image by itself, which take the places of its placeholders.
SEEING: dict[str, Kind] = {
    **dict.fromkeys(BY_LINES, Kind.LINES),
    "Gemma3ForConditionalGeneration": Kind.SQUARE,
    "Gemma4ForConditionalGeneration": Kind.PLACED,
    "AyaVisionForConditionalGeneration": Kind.SQUARE,
    "Cohere2VisionForConditionalGeneration": Kind.SQUARE,
    "GotOcr2ForConditionalGeneration": Kind.SQUARE,
    "Idefics3ForConditionalGeneration": Kind.TILES,
    lfm2.WITH_TOWER: Kind.PATCHED,
    "InternVLForConditionalGeneration": Kind.SQUARE,
    "LightOnOcrForConditionalGeneration": Kind.SIZED,
    "LlavaForConditionalGeneration": Kind.SQUARE,
    "LlavaNextForConditionalGeneration": Kind.ANYRES,
    "LlavaOnevisionForConditionalGeneration": Kind.ANYRES,
    "Mistral3ForConditionalGeneration": Kind.SIZED,
    "SmolVLMForConditionalGeneration": Kind.TILES,
    "VipLlavaForConditionalGeneration": Kind.SQUARE,
}
_PLACEHOLDERS = ("image_token_id", "image_token_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a model sees images."""

    architecture: str
    values: dict[str, Any]  # of the whole config.json
    placeholder: int  # the id that a prompt has in the place of each row of an image
    # Numbers in a row: a multiple of the hidden size, where there are rows that the outputs of the
    # first layers get, too.
    row_size: int
    # Which position rotates each pair of a head, where positions are counted in three directions: 0
    # that by frame, 1 that by line, 2 that within a line; empty: there is one position.
    axes: tuple[int, ...] = ()
    both_ways: BothWays | None = None  # None: a row sees those before it
    pad: int = 0  # the id that rows have in embeddings of each layer


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
    text = fields.values.get("text_config") or fields.values
    deep = (fields.values.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
    if len(deep) >= model.num_layers // options.pp:
        return f"with --pp {options.pp} the first stage has too few layers"
    return Sight(
        architecture=names[0],
        values=dict(fields.values),
        placeholder=int(placeholders[0]),
        row_size=(1 + len(deep)) * model.hidden_size,
        axes=_axes(names[0], text),
        both_ways=_both_ways(names[0], text),
        pad=text.get("pad_token_id") or 0,
    )


def _both_ways(architecture: str, text: Mapping[str, Any]) -> BothWays | None:
    """text: the config of the text part."""
    if architecture == "Gemma3ForConditionalGeneration":
        return BothWays.ALL
    return BothWays.WINDOWED if text.get("use_bidirectional_attention") == "vision" else None


def _axes(architecture: str, text: Mapping[str, Any]) -> tuple[int, ...]:
    """text: the config of the text part."""
    if architecture not in BY_LINES:
        return ()
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sizes = rope.get("mrope_section") or BY_LINES[architecture]
    axes = [axis for axis, size in enumerate(sizes) for _ in range(size)]
    if architecture in _IN_TURN:
        axes = [0] * len(axes)
        for axis in (1, 2):
            for pair in range(axis, min(len(axes), 3 * sizes[axis]), 3):
                axes[pair] = axis
    return tuple(axes)
