"""Small copies of models that see, with random weights, and images for them."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.images.picture import Picture
from minisgl.models.adopted.proof import give_teeth
from minisgl.models.adopted.reader import transformers_config
from minisgl.models.adopted.shrunk import VOCAB_SIZE, shrunk
from minisgl.models.towers.sight import SEEING, Kind, Sight

PLACEHOLDER = VOCAB_SIZE - 1
_TOWER_SIZES = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_STATE_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_TYPES = {"token_type_ids", "mm_token_type_ids"}  # arguments that tell rows from text
_SHAPES = ((2, 3), (3, 2))  # of images, in lines of rows
_NUM_TILES = 2  # of an image, in a line where it is cut into lines
_SEED = 5

Inputs = Mapping[str, NDArray[Any]]


def inputs_of(kind: Kind, tower: Any, shape: tuple[int, int]) -> Inputs:
    """What a tower of this kind takes of an image of noise. tower: its config. shape: in lines of
    rows, for a kind that has them."""
    return _KINDS[kind](tower, shape)[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no bars and no warnings of transformers, which are about a model that nobody asks."""
    import transformers.utils.logging

    logging: Any = transformers.utils.logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A small copy of a model as transformers has it, in float32, and images that it sees."""

    model: Any
    pictures: list[Picture]

    @staticmethod
    def of(sight: Sight) -> SmallModel:
        import transformers

        config = _small_config(sight)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            architecture = getattr(transformers, sight.architecture)
            model = architecture._from_config(config, dtype=torch.float32).eval()
            give_teeth(model)
            pictures = [*_pictures(sight, model)]
        return SmallModel(model, pictures)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Tensor:
        """The logits of a sequence, [n, vocab_size], with placeholders for the rows of images."""
        ids = torch.tensor([token_ids])
        given: dict[str, Any] = {
            name: torch.cat([torch.from_numpy(each.inputs[name]) for each in pictures])
            for name in pictures[0].inputs
        }
        for name in _TYPES & inspect.signature(self.model.forward).parameters.keys():
            given[name] = (ids == PLACEHOLDER).int()
        logits: Tensor = self.model(input_ids=ids, **given, use_cache=False).logits[0]
        return logits


def _small_config(sight: Sight) -> Any:
    config = transformers_config(sight.values, sight.architecture)
    whole, text = config.text_config, config.text_config
    kinds = getattr(text, "layer_types", None) or []
    deep = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    num_layers = max([2, 1 + len(deep), *(1 + kinds.index(kind) for kind in kinds)])
    if sight.both_ways is not None:  # what rows see in a layer, text sees in a later one
        later = (n for n in range(num_layers, len(kinds)) if kinds[n] == kinds[-1])
        num_layers = 1 + next(later, len(kinds) - 1)
    text = shrunk(text, min(num_layers, text.num_hidden_layers))
    for name, size in _STATE_SIZES.items():
        if hasattr(text, name):
            setattr(text, name, size)
    if sight.axes:  # which are of pairs of a whole head
        head_dim = getattr(whole, "head_dim", None)
        if head_dim is None:
            head_dim = whole.hidden_size // whole.num_attention_heads
            text.hidden_size = text.num_attention_heads * head_dim
        else:
            text.head_dim = head_dim
    if hasattr(text, "logit_scale"):  # the code of some wholes leaves it out; tokens are the same
        text.logit_scale = 1.0
    if hasattr(config, "mm_tokens_per_image"):
        config.mm_tokens_per_image = 4
    config.text_config = text
    config.image_token_id = PLACEHOLDER
    tower = config.vision_config = _small_tower(config.vision_config, text.hidden_size)
    if isinstance(layers := getattr(config, "vision_feature_layer", None), list):
        config.vision_feature_layer = [-1 - index % 2 for index in range(len(layers))]
    if hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = [[_NUM_TILES * tower.image_size] * 2]
    return config


def _small_tower(tower: Any, hidden_size: int) -> Any:
    """hidden_size: of the text part."""
    small = copy.deepcopy(tower)
    for name, size in _TOWER_SIZES.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, size)
    # Qwen2-VL calls the size of its rows as others that inside of the tower.
    of_rows = "hidden_size" if hasattr(small, "embed_dim") else "out_hidden_size"
    if isinstance(getattr(small, of_rows, None), int):
        setattr(small, of_rows, hidden_size)
    if deep := getattr(small, "deepstack_visual_indexes", None):
        small.deepstack_visual_indexes = [*range(len(deep))]
        small.depth = len(deep)
    patch = small.patch_size
    if isinstance(small_size := getattr(small, "image_size", None), list | tuple):
        small.image_size = [4 * each for each in patch]
    elif isinstance(small_size, int):
        small.image_size = 4 * patch
    return small


def _pictures(sight: Sight, model: Any) -> Iterator[Picture]:
    inputs = _KINDS[SEEING[sight.architecture]]
    for shape in _SHAPES:
        given, grid = inputs(model.config.vision_config, shape)
        tensors = {name: torch.from_numpy(array) for name, array in given.items()}
        with torch.no_grad():
            found = model.get_image_features(**tensors, return_dict=True).pooler_output
        parts = [found] if isinstance(found, Tensor) else found
        num_rows = sum(part.numel() // part.shape[-1] for part in parts)
        digest = blake2b(repr((shape, sight.architecture)).encode()).digest()
        is_row = np.array([False, *[True] * num_rows])
        yield Picture(digest, given, (1, *[PLACEHOLDER] * num_rows), is_row, grid)


_Made = tuple[dict[str, NDArray[Any]], tuple[int, int, int] | None]


def _square(tower: Any, shape: tuple[int, int]) -> _Made:
    """One tile, of the size that the tower takes."""
    return {"pixel_values": torch.randn(1, 3, *_size_of(tower)).numpy()}, None


def _tiles(tower: Any, shape: tuple[int, int]) -> _Made:
    """Several, which a processor has cut."""
    size = _size_of(tower)
    mask = np.ones((1, _NUM_TILES, *size), dtype=bool)
    pixels = torch.randn(1, _NUM_TILES, 3, *size).numpy()
    return {"pixel_values": pixels, "pixel_attention_mask": mask}, None


def _sized(tower: Any, shape: tuple[int, int]) -> _Made:
    """Of any number of patches."""
    sizes = np.array([[2 * tower.patch_size * each for each in _SHAPES[0]]])
    return {"pixel_values": torch.randn(1, 3, *sizes[0]).numpy(), "image_sizes": sizes}, None


def _anyres(tower: Any, shape: tuple[int, int]) -> _Made:
    """The whole as a tile, and the tiles that it is cut into."""
    size = _size_of(tower)
    sizes = np.array([[2 * size[0], 2 * size[1] - shape[0]]])
    pixels = torch.randn(1, 1 + _NUM_TILES**2, 3, *size).numpy()
    return {"pixel_values": pixels, "image_sizes": sizes}, None


def _size_of(tower: Any) -> tuple[int, int]:
    size = tower.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _by_lines(tower: Any, shape: tuple[int, int]) -> _Made:
    lines, places = shape
    merged = tower.spatial_merge_size
    grid = np.array([[1, lines * merged, places * merged]])
    size = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.randn(int(grid.prod()), size).numpy()
    return {"pixel_values": pixels, "image_grid_thw": grid}, (1, lines, places)


def _placed(tower: Any, shape: tuple[int, int]) -> _Made:
    """With patches behind the others that fill up, and are at no place."""
    side = tower.pooling_kernel_size
    lines, places = (side * each for each in shape)
    by_line, in_line = np.divmod(np.arange(lines * places), places)
    known = np.stack((in_line, by_line), axis=1)
    filling = np.full((side**2, 2), -1)
    where = np.concatenate((known, filling))[None]
    pixels = torch.rand(1, where.shape[1], 3 * tower.patch_size**2).numpy()
    return {"pixel_values": pixels, "image_position_ids": where}, None


def _patched(tower: Any, shape: tuple[int, int]) -> _Made:
    """With a place for a patch more than there are."""
    sizes = np.array([[2 * each for each in shape]])  # of whose patches four make a row
    mask = np.arange(sizes.prod() + 4)[None] < sizes.prod()
    pixels = torch.randn(*mask.shape, tower.num_channels * tower.patch_size**2).numpy()
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": sizes}, None


_KINDS: dict[Kind, Callable[[Any, tuple[int, int]], _Made]] = {
    Kind.SQUARE: _square,
    Kind.TILES: _tiles,
    Kind.SIZED: _sized,
    Kind.ANYRES: _anyres,
    Kind.LINES: _by_lines,
    Kind.PLACED: _placed,
    Kind.PATCHED: _patched,
}
