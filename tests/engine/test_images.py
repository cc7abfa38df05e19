"""Prompts of conversations with images, beside what transformers makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.image_checkpoints import (
    FAMILIES,
    MISTRAL3,
    Family,
    ProcessorHere,
    colourful,
    encoded,
    family_named,
    make_image_checkpoint,
    reference_processor,
)

from minisgl.engine.images import Images
from minisgl.engine.texts import Texts
from minisgl.errors import EngineStoppedError, InvalidRequestError
from minisgl.images.fetching import Fetcher
from minisgl.images.processor import ImageProcessor, ImageSupport
from minisgl.images.prompt import Prompt
from minisgl.images.source import ImageSource
from minisgl.text.rendering import Renderer, answer
from minisgl.text.tokenizer import Tokenizer


class RendererHere(Renderer):
    """Renders in this process."""

    def render(self, call: bytes) -> str:
        rendered = answer(call)
        if rendered.text is None:
            raise InvalidRequestError(rendered.param, rendered.reason)
        return rendered.text


@asynccontextmanager
async def images_of(
    folder: Path,
    fetcher: Fetcher | None = None,
    make_processor: Callable[[Path], ImageProcessor] = ProcessorHere,
) -> AsyncIterator[Images]:
    tokenizer = Tokenizer.load(folder)
    texts = Texts(tokenizer, max_seq_len=1 << 20, num_places=1000, make_renderer=RendererHere)
    images = Images(
        texts, tokenizer, ImageSupport.of(folder), fetcher or Fetcher(()), make_processor
    )
    yield images
    for part in (texts, images):
        part.close(EngineStoppedError("closed"))
    for part in (texts, images):
        await asyncio.to_thread(part.join)


def said(*content: str | Image.Image, role: str = "user") -> tuple[dict[str, Any], dict[str, Any]]:
    """A message with texts and images, for minisgl and for transformers."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            ours.append({"type": "text", "text": part})
            theirs.append({"type": "text", "text": part})
        else:
            ours.append({"type": "image", "source": ImageSource(encoded(part))})
            theirs.append({"type": "image", "image": part})
    return {"role": role, "content": ours}, {"role": role, "content": theirs}


def plain_ids(prompt: Prompt) -> list[int]:
    """The ids of a prompt, with the token of a row where an image has one."""
    ids = list(prompt.token_ids)
    for span in prompt.spans:
        assert ids[span.start : span.end] == span.picture.keys().tolist()
        ids[span.start : span.end] = span.picture.token_ids
    return ids


@pytest.mark.parametrize("family", FAMILIES, ids=str)
async def test_a_conversation_becomes_what_transformers_makes_of_it(
    family: Family, tmp_path: Path
) -> None:
    folder = make_image_checkpoint(family, tmp_path / "model")
    first, second = colourful(90, 60), colourful(50, 120, seed=1)
    turns = [
        said("Which is\n\n", first, "\n\nlarger, this or ", second, " one?"),
        said("The first.", role="assistant"),
        said("Why?"),
    ]
    ours, theirs = [ours for ours, _ in turns], [theirs for _, theirs in turns]
    reference = reference_processor(folder, family).apply_chat_template(
        theirs, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
    )
    async with images_of(folder) as images:
        prompt = await images.prompt(ours, False, {})
    assert plain_ids(prompt) == reference["input_ids"].ravel().tolist()
    assert len(prompt.spans) == 2
    for name, of_all in reference.items():
        if name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            parts = [np.asarray(span.picture.inputs[name]) for span in prompt.spans]
            if all(part.shape[1:] == np.asarray(of_all).shape[1:] for part in parts):
                np.testing.assert_array_equal(np.concatenate(parts), of_all)


async def test_a_typed_placeholder_is_text(tmp_path: Path) -> None:
    folder = make_image_checkpoint(family_named("qwen3_5"), tmp_path / "model")
    ours, _ = said("Is <|image_pad|> in ", colourful(60, 60), "<|vision_end|>?")
    async with images_of(folder) as images:
        prompt = await images.prompt([ours], False, {})
        [span] = prompt.spans
        row_id = span.picture.token_ids[0]
        outside = [*prompt.token_ids[: span.start], *prompt.token_ids[span.end :]]
        assert row_id not in outside
        decoded = images._tokenizer.decode(outside, skip_special_tokens=True)
        assert "Is <|image_pad|> in <|vision_end|>?" in decoded
        with pytest.raises(InvalidRequestError, match="2 placeholders"):
            await images.prompt([ours], False, {"control_tokens_in_text": True})


async def test_a_processor_that_needs_another_package_says_so(tmp_path: Path) -> None:
    folder = make_image_checkpoint(MISTRAL3, tmp_path / "model")
    ours, _ = said("What is it?", colourful(60, 60))
    async with images_of(folder, make_processor=ImageProcessor) as images:
        with pytest.raises(InvalidRequestError, match="PixtralProcessor requires the Torchvision"):
            await images.prompt([ours], False, {})
