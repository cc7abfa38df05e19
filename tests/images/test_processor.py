"""The process that decodes and processes images ends no one but itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support.image_checkpoints import (
    ProcessorHere,
    colourful,
    encoded,
    family_named,
    make_image_checkpoint,
)
from torch import Tensor

from minisgl.errors import EngineStoppedError, InvalidRequestError, UnsupportedModelError
from minisgl.images.checkpoint import CheckpointProcessor
from minisgl.images.levels import LEVELS, TABLE
from minisgl.images.limits import MAX_PIXELS
from minisgl.images.processor import ImageProcessor, ImageSupport, digest_of
from minisgl.models.towers import processing
from minisgl.models.towers.tower import Tower

pytestmark = pytest.mark.usefixtures("started_workers")

DIGEST = bytes(32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(family_named("qwen3_5"), tmp_path_factory.mktemp("see") / "model")


@pytest.fixture(scope="module")
def processor(folder: Path) -> Iterator[ImageProcessor]:
    processor = ImageProcessor(folder)
    yield processor
    assert processor.wait() == 0  # once its pipes are closed, as they are when we die


@pytest.fixture
def here(folder: Path) -> ProcessorHere:
    return ProcessorHere(folder)


def test_what_the_process_makes_is_what_is_made_here(
    processor: ImageProcessor, here: ProcessorHere
) -> None:
    assert processor.placeholder() == here.placeholder()
    data = encoded(colourful(100, 60))
    (made, num_pixels), (same, _) = (
        each.process(data, DIGEST, MAX_PIXELS) for each in (processor, here)
    )
    assert num_pixels == 6000
    assert made.digest == DIGEST
    assert (made.token_ids, made.grid) == (same.token_ids, same.grid)
    assert made.num_rows == np.prod(made.grid) == len(made.token_ids)
    assert made.inputs.keys() == same.inputs.keys() == {LEVELS, TABLE, "image_grid_thw"}
    for name, array in made.inputs.items():
        np.testing.assert_array_equal(array, same.inputs[name])


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"<svg/>", "no format that is known"),
        (encoded(colourful(1, 4000)), "refused by the model's processor: .*ratio"),
        (encoded(colourful(90, 90))[:500], "damaged or incomplete"),
    ],
    ids=["svg", "strip", "cut"],
)
def test_an_image_that_is_refused_leaves_the_next_one_alone(
    processor: ImageProcessor, image: bytes, reason: str
) -> None:
    processor.start()
    process = processor._process
    with pytest.raises(InvalidRequestError, match=reason):
        processor.process(image, DIGEST, MAX_PIXELS)
    picture, _ = processor.process(encoded(colourful(64, 64)), DIGEST, MAX_PIXELS)
    assert picture.num_rows
    assert processor._process is process


def test_images_are_upright_and_over_white_before_they_are_processed(here: ProcessorHere) -> None:
    image = colourful(64, 96)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(image.transpose(Image.Transpose.ROTATE_90), exif=exif)
    (one, _), (other, _) = (
        here.process(data, DIGEST, MAX_PIXELS) for data in (turned, encoded(image))
    )
    np.testing.assert_array_equal(one.inputs[LEVELS], other.inputs[LEVELS])


BREAKING = """
from minisgl.images import checkpoint
from minisgl.models.towers import processing

def broken(self, image, **form):
    {action}
    return real(self, image, **form)

real = checkpoint.CheckpointProcessor.process
checkpoint.CheckpointProcessor.process = broken
processing.serve({folder!r}, {seconds})
"""


def test_an_image_that_takes_too_much_ends_alone(folder: Path) -> None:
    action = """
    if image.width == 101:
        while True: pass
    if image.width == 102:
        bytearray(2 << 30)
    if image.width == 103:
        import os; os.kill(os.getpid(), 11)
"""
    reasons = {
        101: "longer than 1 s to process; send a smaller one",
        102: "more than 1024 MiB of memory to process; send a smaller one",
        103: "cannot be decoded; send it in another format",
    }
    with ImageProcessor(folder) as processor:
        processor.code = BREAKING.format(action=action, folder=str(folder), seconds=1)
        small = encoded(colourful(60, 60))
        processor.process(small, DIGEST, MAX_PIXELS)
        process = processor._process
        for width, reason in (*reasons.items(), *reasons.items()):
            with pytest.raises(InvalidRequestError, match=reason):
                processor.process(encoded(colourful(width, 60)), DIGEST, MAX_PIXELS)
            picture, _ = processor.process(small, DIGEST, MAX_PIXELS)
            assert picture.num_rows
            assert processor._process is process


def test_a_processor_that_would_use_threads_ends(folder: Path) -> None:
    """As that of torchvision would: a pool of threads that was there before the fork hangs."""
    code = """
import torch
from minisgl.models.towers import processing

def work(): torch.rand(1 << 20).exp().sum()

def load(folder):
    work()
    return loaded(folder)

torch.set_num_threads(4)
loaded, processing.load = processing.load, load
"""
    with ImageProcessor(folder) as processor:
        processor.code = code + BREAKING.format(action="work()", folder=str(folder), seconds=1)
        picture, _ = processor.process(encoded(colourful(60, 60)), DIGEST, MAX_PIXELS)
        assert picture.num_rows


def test_a_large_image_ends_within_the_limit_of_memory(processor: ImageProcessor) -> None:
    """As many pixels as are allowed, in the mode that takes the most."""
    image = Image.new("RGBA", (8000, 4000), (0, 0, 0, 0))
    picture, num_pixels = processor.process(encoded(image), DIGEST, MAX_PIXELS)
    assert num_pixels == MAX_PIXELS
    assert picture.inputs[LEVELS].min() == 255  # white


def test_closing_ends_what_is_processed(folder: Path) -> None:
    processor = ImageProcessor(folder)
    code = "while image.width: pass"
    processor.code = BREAKING.format(action=code, folder=str(folder), seconds=3600)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            processor.process(encoded(colourful(60, 60)), DIGEST, MAX_PIXELS)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    processor.close()
    thread.join()
    assert [type(error) for error in errors] == [EngineStoppedError]


def test_the_digest_depends_on_bytes_processor_and_size(
    here: ProcessorHere, tmp_path: Path
) -> None:
    print_of = here.placeholder().fingerprint
    digests = {
        digest_of(data, fingerprint, is_low=is_low, is_only=is_only)
        for data in (b"a", b"b", b"lowa")
        for fingerprint in (print_of, "other")
        for is_low in (False, True)
        for is_only in (False, True)
    }
    assert len(digests) == 24
    assert {len(digest) for digest in digests} == {32}
    folder = make_image_checkpoint(family_named("qwen3_5"), tmp_path / "other")
    assert ProcessorHere(folder).placeholder().fingerprint == print_of
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patch_size": 14}))
    assert ProcessorHere(folder).placeholder().fingerprint != print_of


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pixels_come_rounded_as_the_tower_would_round_them(tmp_path: Path, dtype: str) -> None:
    folder = make_image_checkpoint(family_named("llava"), tmp_path / "model")
    data = encoded(colourful(60, 84))
    exact, _ = ProcessorHere(folder).process(data, DIGEST, MAX_PIXELS)
    rounded, _ = ProcessorHere(folder, dtype).process(data, DIGEST, MAX_PIXELS)
    tower = Tower(Features(), getattr(torch, dtype), torch.device("cpu"))
    of_exact, of_rounded = (tower.rows(each.inputs) for each in (exact, rounded))
    assert of_exact.dtype == of_rounded.dtype == getattr(torch, dtype)
    assert torch.equal(of_exact, of_rounded) and of_exact.unique().numel() > 100
    assert 2 * rounded.inputs["pixel_values"].nbytes == exact.inputs["pixel_values"].nbytes


class Features(torch.nn.Module):
    """A tower that returns its pixels."""

    def get_image_features(self, pixel_values: Tensor, return_dict: bool) -> SimpleNamespace:
        return SimpleNamespace(pooler_output=pixel_values)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("division by zero"), "refused by the model's processor: division"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "more than 1024 MiB"),
        (MemoryError(), "more than 1024 MiB"),
    ],
)
def test_whatever_a_processor_raises_is_about_its_image(
    here: ProcessorHere, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(CheckpointProcessor, "process", failing)
    with pytest.raises(InvalidRequestError, match=words):
        here.process(encoded(colourful(60, 60)), DIGEST, MAX_PIXELS)


def test_a_torchvision_of_another_torch_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which transformers says no more than that its classes cannot be imported."""

    def failing(*_: object) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AutoImageProcessor'.") from error

    monkeypatch.setattr(processing, "CheckpointProcessor", failing)
    monkeypatch.setattr(processing.importlib.util, "find_spec", lambda _: object())
    with pytest.raises(UnsupportedModelError, match="torchvision is of another release than torch"):
        ProcessorHere(folder).placeholder()


def test_a_checkpoint_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    folder = make_image_checkpoint(family_named("qwen3_5"), tmp_path / "model")
    for file in ("preprocessor_config.json", "processor_config.json"):
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "NoSuch"}))
    here = ProcessorHere(folder)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="transformers has no NoSuch"):
            here.placeholder()


def test_the_files_of_a_checkpoint_say_whether_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_image_checkpoint(family_named("llava"), tmp_path / "model")
    assert ImageSupport.of(folder) == ImageSupport(folder, "")
    blind = ImageSupport.of(folder, blind="it reads text only")
    assert blind == ImageSupport(None, "the model takes no images: it reads text only.")
    monkeypatch.setattr(processing.importlib.util, "find_spec", lambda _: None)
    assert "not installed; pip install pillow" in ImageSupport.of(folder).refusal
    monkeypatch.undo()
    for file in folder.glob("*processor_config.json"):
        file.unlink()
    assert "no processor for images (preprocessor_config.json)" in ImageSupport.of(folder).refusal
