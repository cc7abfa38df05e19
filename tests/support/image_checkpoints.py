"""Checkpoints without weights of models that see: config, processor, tokenizer and chat template of
each family, as small as they can be."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from support.toy_tokenizers import trained_byte_level
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from minisgl.errors import EngineStoppedError
from minisgl.images.levels import LEVELS, PIXELS, TABLE, numbers_of
from minisgl.images.picture import Picture
from minisgl.images.processor import ImageProcessor
from minisgl.models.towers.processing import answer, load

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    f"{QWEN_IMAGE}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# It takes content in parts only, and writes the images of a message before its texts.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role.upper() }}: "
    "{% for part in message.content if part.type == 'image' %}<image>\n{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}"
    "{% if message.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
PIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}[IMG]"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
INTERN_TEMPLATE = QWEN_TEMPLATE.replace(QWEN_IMAGE, "<IMG_CONTEXT>\n")


@dataclass(frozen=True)
class Family:
    """What the files of a checkpoint say."""

    name: str
    module: str  # of the processor
    processor: str
    image_processor: Mapping[str, Any]
    template: str
    tokens: tuple[str, ...]  # special ones
    row: str  # the token that stands for a row
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the processor
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    adds_bos: bool = False

    def __str__(self) -> str:
        return self.name


QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
LLAVA_OPTIONS = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
SMALL_QWEN = {"size": {"shortest_edge": 3136, "longest_edge": 50176}, "temporal_patch_size": 2}
FAMILIES = (
    Family(
        "qwen3_5",
        "qwen3_vl.processing_qwen3_vl",
        "Qwen3VLProcessor",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 16,
            "merge_size": 2,
            **SMALL_QWEN,
        },
        QWEN_TEMPLATE,
        (*QWEN_TOKENS, "<|image_pad|>", "<|video_pad|>"),
        "<|image_pad|>",
    ),
    Family(
        "qwen2_5_vl",
        "qwen2_5_vl.processing_qwen2_5_vl",
        "Qwen2_5_VLProcessor",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            **SMALL_QWEN,
        },
        QWEN_TEMPLATE,
        (*QWEN_TOKENS, "<|image_pad|>", "<|video_pad|>"),
        "<|image_pad|>",
    ),
    Family(
        "llava",
        "llava.processing_llava",
        "LlavaProcessor",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        LLAVA_TEMPLATE,
        ("<image>",),
        "<image>",
        options=LLAVA_OPTIONS,
        adds_bos=True,
    ),
    Family(
        "gemma3",
        "gemma3.processing_gemma3",
        "Gemma3Processor",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        GEMMA_TEMPLATE,
        (
            *("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
            "<image_soft_token>",
        ),
        "<image_soft_token>",
        options={"image_seq_length": 4},
        tokenizer={
            "extra_special_tokens": {
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            }
        },
        adds_bos=True,
    ),
    Family(
        "idefics3",
        "idefics3.processing_idefics3",
        "Idefics3Processor",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
        },
        SMOL_TEMPLATE,
        (
            *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>"),
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        "<image>",
        options={"image_seq_len": 4},
    ),
    Family(
        "internvl",
        "internvl.processing_internvl",
        "InternVLProcessor",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 28, "width": 28},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        INTERN_TEMPLATE,
        ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>",
        options={"image_seq_length": 4},
        tokenizer={
            "extra_special_tokens": {
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            }
        },
    ),
    Family(
        "gemma4",
        "gemma4.processing_gemma4",
        "Gemma4Processor",
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
        GEMMA_TEMPLATE.replace("<start_of_image>", "<|image|>"),
        (
            *("<start_of_turn>", "<end_of_turn>", "<|image>", "<image|>", "<|image|>"),
            *("<|audio>", "<audio|>", "<|audio|>"),
        ),
        "<|image|>",
        tokenizer={
            "pad_token": "</s>",
            "extra_special_tokens": {
                "boi_token": "<|image>",
                "eoi_token": "<image|>",
                "image_token": "<|image|>",
                "boa_token": "<|audio>",
                "eoa_token": "<audio|>",
                "audio_token": "<|audio|>",
            },
        },
        adds_bos=True,
    ),
    Family(
        "glm4v",
        "glm4v.processing_glm4v",
        "Glm4vProcessor",
        {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            **SMALL_QWEN,
        },
        QWEN_TEMPLATE.replace(QWEN_IMAGE, "<|begin_of_image|><|image|><|end_of_image|>"),
        (
            *("<|im_start|>", "<|im_end|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
            *("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
        ),
        "<|image|>",
    ),
    Family(
        "llava_next",
        "llava_next.processing_llava_next",
        "LlavaNextProcessor",
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        LLAVA_TEMPLATE,
        ("<image>",),
        "<image>",
        options=LLAVA_OPTIONS,
        adds_bos=True,
    ),
    Family(
        "llava_onevision",
        "llava_onevision.processing_llava_onevision",
        "LlavaOnevisionProcessor",
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        LLAVA_TEMPLATE,
        ("<image>", "<video>"),
        "<image>",
        options={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
)

# Its processor needs torchvision, which the tests do not have.
MISTRAL3 = Family(
    "mistral3",
    "pixtral.processing_pixtral",
    "PixtralProcessor",
    {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 84},
        "patch_size": {"height": 14, "width": 14},
    },
    PIXTRAL_TEMPLATE,
    ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "[IMG]",
    options={"patch_size": 14, "spatial_merge_size": 1},
    adds_bos=True,
)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def make_image_checkpoint(family: Family, folder: Path) -> Path:
    """Write the files of a family, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family)
    tokenizer.save_pretrained(folder)
    row_id = tokenizer.convert_tokens_to_ids(family.row)
    config = {"model_type": family.name, "image_token_id": row_id, "vision_config": {}}
    _write(folder / "config.json", {**config, **family.config})
    _write(
        folder / "preprocessor_config.json",
        {**family.image_processor, "processor_class": family.processor},
    )
    _write(
        folder / "processor_config.json", {"processor_class": family.processor, **family.options}
    )
    return folder


class ProcessorHere(ImageProcessor):
    """Processes images in this process, whose packages are loaded already."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        super().__init__(folder, dtype)
        self.num_images = 0
        self._loaded = load(folder)

    def ask(self, task: bytes) -> bytes:
        if self._closed.is_set():
            raise EngineStoppedError(self.stopped)
        return answer(self._loaded, task)

    def process(
        self, data: bytes, digest: bytes, max_pixels: int, **form: bool
    ) -> tuple[Picture, int]:
        self.num_images += 1
        return super().process(data, digest, max_pixels, **form)


def inputs_of(picture: Picture) -> dict[str, np.ndarray]:
    """What the processor has made of an image, with numbers in the place of levels."""
    inputs = dict(picture.inputs)
    if LEVELS in inputs:
        inputs[PIXELS] = numbers_of(inputs.pop(LEVELS), inputs.pop(TABLE))
    return inputs


def reference_processor(folder: Path, family: Family) -> Any:
    """The processor as transformers has it. Where its part for videos needs torchvision, that is
    left out."""
    module = importlib.import_module(f"transformers.models.{family.module}")
    kind: Any = getattr(module, family.processor)
    check = kind.check_argument_for_proper_class
    parts = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    kind = type(
        kind.__name__,
        (kind,),
        {
            "check_argument_for_proper_class": lambda self, name, argument: (
                argument is None or check(self, name, argument)
            )
        },
    )
    return kind(
        **{name: parts.get(name) for name in kind.get_attributes()},
        **family.options,
        chat_template=family.template,
    )


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def colourful(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image with no two equal parts."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    backend = Backend.from_str(trained_byte_level())
    if family.adds_bos:
        first = backend.token_to_id("<s>")
        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", first)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=family.template,
        **family.tokenizer,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    return tokenizer


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values))
