"""The processor of a checkpoint, as transformers has it, in the process that processes images."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minisgl.errors import UnsupportedModelError
from minisgl.images.levels import LevelProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

FILES = ("processor_config.json", "preprocessor_config.json")
OTHER_FILES = ("tokenizer_config.json",)  # may name the class, too
ROW_IDS = ("image_token_id", "image_token_index")  # of the config: the id that stands for a row
# An output of processors that do not cut images into tiles where a conversation has several.
NUM_IMAGES = "batch_num_images"
# What a processor returns of the text, and not of the image.
TEXT_OUTPUTS = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "special_tokens_mask")
)
TEXT_OPTIONS = {"add_special_tokens": False, "padding": False}
VERSION = 1  # of what is done to an image here: another one makes other digests


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands for an image in a rendered conversation, and what its text becomes.

    `before` and `after` are plain text around the tokens of an image, which tokens of the
    surrounding text may include.
    """

    text: str
    token_id: int
    before: str
    after: str
    fingerprint: str  # of all that the result depends on beside the image
    counts_images: bool = False  # an image that is the only one of a conversation is another one


@dataclass(frozen=True, slots=True)
class Processed:
    """What the processor makes of one image; see `Picture`."""

    inputs: dict[str, NDArray[Any]]
    token_ids: list[int]
    is_row: NDArray[np.bool_]
    grid: tuple[int, int, int] | None


class CheckpointProcessor:
    """Processes one image at a time as the processor of a checkpoint does."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedModelError for a processor that cannot be used here."""
        from transformers import AutoConfig  # takes seconds

        self._processor = _load_processor(folder)
        self._text: str = self._processor.image_token
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        found = [value for name in ROW_IDS if (value := getattr(config, name, None)) is not None]
        if not found:
            raise UnsupportedModelError("its config does not say which token stands for images.")
        self._row_id = int(found[0])
        self._tokenizer: Any = self._processor.tokenizer
        self._control = frozenset(self._tokenizer.get_added_vocab().values())
        images = self._processor.image_processor
        self._merge = int(getattr(images, "merge_size", 1))
        self._levels: LevelProcessor | None = None
        with contextlib.suppress(Exception):  # of code of transformers that has other options
            self._levels = LevelProcessor.of(images, self._row_id, self._run_for_levels)
        self.placeholder = self._find_placeholder(folder)

    def process(self, image: Image, *, is_only: bool = True) -> Processed:
        """Process an image in RGB; is_only: of its conversation, where the processor counts images.
        Raises ValueError as the processor does, for one of a shape that it does not take."""
        if self._levels is not None:
            ids, inputs = self._levels(image)
        elif is_only:
            ids, inputs = self._run(image)
        else:  # as the first of two
            ids, inputs = self._run(image, image)
            ids = ids[: len(ids) // 2]
            inputs = {
                name: each if name == NUM_IMAGES else each[:1] for name, each in inputs.items()
            }
        begin, end = self._control_part(ids)
        token_ids = ids[begin:end]
        is_row = np.asarray(token_ids) == self._row_id
        grid = None
        if (sizes := inputs.get("image_grid_thw")) is not None:
            frames, height, width = (int(size) for size in np.ravel(sizes))
            grid = (frames, height // self._merge, width // self._merge)
        return Processed(inputs, token_ids, is_row, grid)

    def _run(self, *images: Image, **options: Any) -> tuple[list[int], dict[str, NDArray[Any]]]:
        """The tokens that replace the placeholders of a conversation's images, plain text around
        them included, and all that the processor returns of the images. options: for these."""
        made = self._processor(
            images=[[*images]],
            text=[self._text * len(images)],
            return_tensors="np",
            text_kwargs=TEXT_OPTIONS,
            images_kwargs=options,
        )
        inputs = {
            name: array
            for name, value in made.items()
            if name not in TEXT_OUTPUTS and (array := np.asarray(value)).dtype != object
        }
        return np.ravel(np.asarray(made["input_ids"])).tolist(), inputs

    def _run_for_levels(
        self, image: Image, **options: Any
    ) -> tuple[list[int], dict[str, NDArray[Any]]]:
        ids, inputs = self._run(image, **options)
        begin, end = self._control_part(ids)
        return ids[begin:end], inputs

    def _control_part(self, ids: list[int]) -> tuple[int, int]:
        """Where the control tokens of a replacement begin and end."""
        places = [place for place, token_id in enumerate(ids) if token_id in self._control]
        if not places:
            raise UnsupportedModelError("its tokens for images are no tokens of their own.")
        return places[0], places[-1] + 1

    def _find_placeholder(self, folder: Path) -> Placeholder:
        import PIL.Image

        ids, inputs = self._run(PIL.Image.new("RGB", (64, 64)))
        begin, end = self._control_part(ids)
        token_id = int(self._tokenizer.convert_tokens_to_ids(self._text))
        before, after = (self._tokenizer.decode(part) for part in (ids[:begin], ids[end:]))
        around = self._tokenizer(before + self._text + after, add_special_tokens=False)
        if around["input_ids"] != [*ids[:begin], token_id, *ids[end:]]:
            raise UnsupportedModelError("the text around its tokens for images cannot be told.")
        fingerprint = self._fingerprint(folder)
        return Placeholder(self._text, token_id, before, after, fingerprint, NUM_IMAGES in inputs)

    def _fingerprint(self, folder: Path) -> str:
        import PIL
        import transformers

        kinds = (type(self._processor.image_processor), type(self._tokenizer))
        facts = [
            VERSION,
            transformers.__version__,
            PIL.__version__,
            getattr(sys.modules.get("torchvision"), "__version__", None),
            self._processor.__class__.__name__,
        ]
        digest = hashlib.blake2b(json.dumps([*facts, *(kind.__name__ for kind in kinds)]).encode())
        for name in (*FILES, "config.json"):
            if (file := folder / name).is_file():
                digest.update(hashlib.blake2b(file.read_bytes()).digest())
        return digest.hexdigest()


def _load_processor(folder: Path) -> Any:
    """The processor, without its parts for video and sound, which need other packages. Of the ways
    to process pixels it has the one that transformers prefers: by torchvision, which is faster,
    where that is installed, else by Pillow; they differ by less than 0.02."""
    import transformers
    from transformers.models.auto.processing_auto import processor_class_from_name

    logging.getLogger("transformers").setLevel(logging.ERROR)
    name = _class_name(folder)
    found: Any = processor_class_from_name(name)
    if found is None:
        raise UnsupportedModelError(f"transformers has no {name}.")

    class ForImages(found):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is not None:  # else a part that is left out
                return super().check_argument_for_proper_class(name, argument)
            return None

    ForImages.__name__ = found.__name__
    images: Any = transformers.AutoImageProcessor
    parts = {
        "image_processor": images.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ),
    }
    options, _ = found.get_processor_dict(folder, local_files_only=True)
    given = [parts.get(attribute) for attribute in found.get_attributes()]
    return ForImages.from_args_and_dict(given, options)


def _class_name(folder: Path) -> str:
    """The name of the processor's class, as the checkpoint or transformers says."""
    from transformers.models.auto import processing_auto

    for name in (*FILES, *OTHER_FILES):
        if (file := folder / name).is_file():
            said = json.loads(file.read_bytes()).get("processor_class")
            if isinstance(said, str):
                return said
    kind = json.loads((folder / "config.json").read_bytes()).get("model_type", "")
    auto: Any = processing_auto
    if (known := auto.PROCESSOR_MAPPING_NAMES.get(kind)) is not None:
        return str(known)
    raise UnsupportedModelError(f"transformers has no processor for models of type {kind}.")
