"""Requests with images on small checkpoints, with the tokens of transformers."""

from __future__ import annotations

import asyncio
import atexit
import inspect
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from support.adopted_checkpoints import write_checkpoint_with_towers
from support.checkpoints import load_reference
from support.followed import followed
from support.gemma_checkpoints import TEXT, TOWER
from support.parity import NOISE, load_engine
from support.state_cases import EXPERTS, HYBRID
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.stats import EngineStats
from minisgl.images.picture import Picture, Span, with_pictures
from minisgl.images.prompt import Prompt
from minisgl.models import lfm2, qwen3_5, qwen_vl
from minisgl.models.adopted.proof import give_teeth
from minisgl.models.config import ModelConfig
from minisgl.models.registry import read_model_config
from minisgl.models.towers.sight import Sight
from minisgl.models.towers.tower import Tower, _skeleton, load_tower
from minisgl.parts.images.host import Pictured
from minisgl.request import Extra, Request, SamplingParams
from minisgl.runner.setup import read_setup

FOLDER = TemporaryDirectory()
atexit.register(FOLDER.cleanup)
NUM_TOKENS = 12
PLACEHOLDER = 96  # of every small checkpoint
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logit_bias={PLACEHOLDER: -100})


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt with images, and what transformers makes of it."""

    prompt: list[int]
    spans: tuple[Span, ...]
    token_ids: list[int]
    logits: Tensor  # [NUM_TOKENS, vocab_size], of the rows that these are sampled from


@dataclass(frozen=True, eq=False)
class ImageCase:
    folder: Path
    asked: list[Asked]


def square_picture(config: Any, seed: int) -> Picture:
    """A picture of the size that the tower takes."""
    tower = config.vision_config
    generator = torch.Generator().manual_seed(seed)
    size = tower.image_size
    pixels = torch.randn((1, 3, size, size), generator=generator)
    return picture({"pixel_values": pixels.numpy()}, (size // tower.patch_size) ** 2)


def picture(inputs: dict[str, np.ndarray], num_rows: int, **others: Any) -> Picture:
    """With a token before the rows and one behind them."""
    digest = blake2b(b"".join(array.tobytes() for array in inputs.values())).digest()
    is_row = np.array([False, *[True] * num_rows, False])
    token_ids = (90, *[PLACEHOLDER] * num_rows, 91)
    return Picture(digest, inputs, token_ids, is_row, **others)


def lined_picture(config: Any, seed: int) -> Picture:
    """A picture of lines of patches, each of another shape."""
    tower = config.vision_config
    generator = torch.Generator().manual_seed(seed)
    merged = tower.spatial_merge_size
    lines, places = 2 + seed % 2, 3 - seed % 3
    grid = np.array([[1, lines * merged, places * merged]])
    size = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.randn((grid.prod(), size), generator=generator)
    inputs = {"pixel_values": pixels.numpy(), "image_grid_thw": grid}
    return picture(inputs, lines * places, grid=(1, lines, places))


def placed_picture(config: Any, seed: int) -> Picture:
    """A picture of patches with their places, each of another shape, with some that fill up."""
    tower = config.vision_config
    generator = torch.Generator().manual_seed(seed)
    lines, places = 2 + seed % 2, 3 - seed % 3
    side = tower.pooling_kernel_size
    grid = np.indices((lines * side, places * side))[::-1].reshape(2, -1).T
    where = np.full((1, 7 * side**2, 2), -1)
    where[0, : len(grid)] = grid
    pixels = torch.rand((1, where.shape[1], 3 * tower.patch_size**2), generator=generator)
    inputs = {"pixel_values": pixels.numpy(), "image_position_ids": where}
    return picture(inputs, lines * places)


def write_placed(architecture: str, folder: Path) -> Path:
    made = getattr(transformers, architecture)
    text = TEXT | {"vocab_size": 97, "vocab_size_per_layer_input": 97, "sliding_window": 5}
    text |= {"use_bidirectional_attention": "vision"}
    tower = TOWER | {"patch_size": 4}
    config = made.config_class(
        text_config=text, vision_config=tower, audio_config=None, image_token_id=PLACEHOLDER
    )
    return _saved(made, config, folder)


def patched_picture(config: Any, seed: int) -> Picture:
    """A picture of patches, each of another shape, with room for more."""
    tower = config.vision_config
    generator = torch.Generator().manual_seed(seed)
    lines, places = 2 + seed % 2, 3 - seed % 3
    sizes = np.array([[2 * lines, 2 * places]])
    mask = np.arange(28)[None] < sizes.prod()
    pixels = torch.randn((*mask.shape, 3 * tower.patch_size**2), generator=generator)
    inputs = {"pixel_values": pixels.numpy(), "pixel_attention_mask": mask}
    return picture(inputs | {"spatial_shapes": sizes}, lines * places)


def write_patched(architecture: str, folder: Path) -> Path:
    made = getattr(transformers, architecture)
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv"],
        "max_position_embeddings": 512,
    }
    tower = TOWER | {"patch_size": 4, "num_patches": 16}
    config = made.config_class(
        text_config=text | {"model_type": "lfm2"},
        vision_config=tower | {"model_type": "siglip2_vision_model"},
        image_token_id=PLACEHOLDER,
        projector_hidden_size=48,
    )
    return _saved(made, config, folder)


def write_square(architecture: str, folder: Path) -> Path:
    return write_checkpoint_with_towers(architecture, folder, PLACEHOLDER)


def write_hybrid(architecture: str, folder: Path) -> Path:
    made = getattr(transformers, architecture)
    text = HYBRID | {"vocab_size": 97, "num_hidden_layers": 3}
    text |= EXPERTS if "Moe" in architecture else {}
    config = made.config_class(text_config=text, vision_config=LINED, image_token_id=PLACEHOLDER)
    return _saved(made, config, folder)


def write_vl(architecture: str, folder: Path) -> Path:
    made = getattr(transformers, architecture)
    is_3 = "Qwen3" in architecture
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6 if is_3 else 3,  # more than get rows, in each of two stages
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        **({"head_dim": 16} if is_3 else {}),
        **(EXPERTS if "Moe" in architecture else {}),
    }
    tower = LINED | ({"deepstack_visual_indexes": [0, 1], "depth": 2} if is_3 else {})
    if architecture == "Qwen2VLForConditionalGeneration":
        tower |= {"embed_dim": 32, "hidden_size": 64}
    config = made.config_class(text_config=text, vision_config=tower, image_token_id=PLACEHOLDER)
    return _saved(made, config, folder)


LINED = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def _saved(made: Any, config: Any, folder: Path) -> Path:
    """A checkpoint of random weights under which mistakes show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = made._from_config(config, dtype=torch.float32).eval()
        give_teeth(model)
    model.save_pretrained(folder)
    return folder


def write_glm(architecture: str, folder: Path) -> Path:
    made = getattr(transformers, architecture)
    config = made.config_class()
    is_mixture = "moe" in config.text_config.model_type
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
        "pad_token_id": 0,
        "eos_token_id": 1,
        **({"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1} if is_mixture else {}),
        **({"moe_intermediate_size": 24} if is_mixture else {}),
    }
    tower = {"image_size": 16, "patch_size": 4, "out_hidden_size": 64}
    tower |= {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    config = made.config_class(text_config=text, vision_config=tower, image_token_id=PLACEHOLDER)
    return _saved(made, config, folder)


LLAVA, QWEN = "LlavaForConditionalGeneration", "Qwen3_5ForConditionalGeneration"
QWEN_3_VL = "Qwen3VLForConditionalGeneration"
GEMMA_3, GEMMA_4 = "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"
GLMS = ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration")
WRITERS: dict[str, tuple[Any, Any]] = {
    LLAVA: (write_square, square_picture),
    **dict.fromkeys(qwen3_5.WITH_TOWER, (write_hybrid, lined_picture)),
    **dict.fromkeys(qwen_vl.READERS, (write_vl, lined_picture)),
    **dict.fromkeys(GLMS, (write_glm, lined_picture)),
    GEMMA_3: (write_square, square_picture),
    GEMMA_4: (write_placed, placed_picture),
    lfm2.WITH_TOWER: (write_patched, patched_picture),
}


@cache
def image_case(architecture: str) -> ImageCase:
    write, draw = WRITERS[architecture]
    folder = write(architecture, Path(FOLDER.name) / architecture)
    reference = load_reference(folder, getattr(transformers, architecture))
    config = reference.config
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> list[int]:
        return torch.randint(2, 90, (length,), generator=generator).tolist()

    one, two, three = (draw(config, seed) for seed in range(3))
    shared = text(9)
    asked = [
        ([*shared, PLACEHOLDER, *text(5)], [one]),
        ([*shared, PLACEHOLDER, *text(5)], [two]),
        ([*text(3), PLACEHOLDER, *text(4), PLACEHOLDER, PLACEHOLDER, *text(6)], [one, two, three]),
        (text(20), []),
        ([*shared, PLACEHOLDER, *text(8)], [one]),
    ]
    return ImageCase(folder, [_asked(reference, *each) for each in asked])


def _asked(reference: Any, template: list[int], pictures: list[Picture]) -> Asked:
    return answered(reference, *with_pictures(template, PLACEHOLDER, pictures))


def answered(reference: Any, prompt: list[int], spans: tuple[Span, ...]) -> Asked:
    """What a model of transformers makes of a prompt."""
    ids = Prompt(prompt, spans).shown_token_ids
    tokens, logits = list(ids), list[Tensor]()
    for _ in range(NUM_TOKENS):
        # Sampled placeholders are no images.
        row = _logits(reference, tokens, spans)[-1]
        row[PLACEHOLDER] = -torch.inf
        logits.append(row)
        tokens.append(int(row.argmax()))
    return Asked(prompt, spans, tokens[len(ids) :], torch.stack(logits))


def prompt_logits(reference: Any, asked: Asked) -> Tensor:
    """[len(asked.prompt), vocab_size]"""
    return _logits(reference, Prompt(asked.prompt, asked.spans).shown_token_ids, asked.spans)


@torch.no_grad()
def _logits(reference: Any, token_ids: list[int], spans: tuple[Span, ...]) -> Tensor:
    given: dict[str, Tensor] = {}
    pictures = [span.picture for span in spans]
    for name in pictures[0].inputs if pictures else ():
        given[name] = torch.cat([torch.from_numpy(each.inputs[name]) for each in pictures])
    ids = torch.tensor([token_ids])
    for name in _kinds_of(reference):
        given[name] = (ids == PLACEHOLDER).int()
    logits: Tensor = reference(input_ids=ids, **given, use_cache=False).logits[0]
    return logits


def _kinds_of(reference: Any) -> set[str]:
    """The arguments by which a model is told rows from text."""
    takes = inspect.signature(reference.forward).parameters
    return {"token_type_ids", "mm_token_type_ids"} & takes.keys()


def tower_of(architecture: str, device: str = "cpu") -> Tower:
    """The tower of a case in float32; on "meta" without its weights."""
    return tower_in(image_case(architecture).folder, device)


def tower_in(folder: Path, device: str = "cpu") -> Tower:
    """The same of any checkpoint."""
    where = torch.device(device)
    sight = read_setup(EngineConfig(model=str(folder), device="cpu", dtype="float32")).sight
    assert isinstance(sight, Sight)
    if device == "meta":
        return Tower(_skeleton(sight, torch.float32, where)[0], torch.float32, where)
    return load_tower(sight, folder, dtype=torch.float32, device=where, load_format="auto")


@cache
def config_of(folder: Path) -> ModelConfig:
    return read_model_config(folder)


async def submitted(engine: AsyncEngine, asked: Asked, **options: Any) -> Request:
    """The request, once it has ended."""
    extras: list[Extra] = [Pictured(asked.spans)] if asked.spans else []
    extras += options.pop("extras", ())
    params = options.pop("params", PARAMS)
    return await followed(engine, engine.submit(asked.prompt, params, extras=extras, **options))


def is_right(asked: Asked, request: Request) -> bool:
    """Whether the tokens are those of transformers; a close call excuses what follows it."""
    for step, (got, wanted) in enumerate(
        zip(request.output_token_ids, asked.token_ids, strict=True)
    ):
        if got != wanted:
            best = asked.logits[step].nan_to_num(neginf=-1e9).topk(2).values
            return float(best[0] - best[1]) < NOISE * float(best[0].abs())
    return True


def started(architecture: str, **options: Any) -> AsyncEngine:
    """Must be called on an event loop."""
    folder = image_case(architecture).folder
    return AsyncEngine(load_engine(folder, model_config=config_of(folder), **options))


def check(
    architecture: str, *, alone: bool = False, times: int = 1, **options: Any
) -> tuple[list[Request], EngineStats]:
    """Run the prompts of a case, one after the other or together, and compare their tokens."""
    asked = image_case(architecture).asked * times

    async def run() -> tuple[list[Request], EngineStats]:
        async with started(architecture, **options) as engine:
            if alone:
                found = [await submitted(engine, each) for each in asked]
            else:
                found = await asyncio.gather(*(submitted(engine, each) for each in asked))
            engine.audit()
            return found, engine.stats()

    found, stats = asyncio.run(run())
    assert all(map(is_right, asked, found))
    return found, stats
