"""Makes the picture of a conversation with an image on the page:

bash scripts/tools/browser.sh
python scripts/tools/image_on_page.py .github/images/seen.png

No model that sees is small enough to be bundled. So a small Llava learns to name the colours of
flags, in a few minutes; then a server runs it, and a browser shows it a picture.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
import transformers
from pages import ROOT
from PIL import Image, ImageDraw
from torch import Tensor

sys.path.append(str(ROOT / "tests"))

from playwright.sync_api import expect
from support.browser import browser, opened
from support.image_checkpoints import (
    encoded,
    family_named,
    make_image_checkpoint,
    reference_processor,
)
from support.serving import demo_engine, served

from minisgl.engine import AsyncEngine

TEMPLATE = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content if part.type == 'image' %}<image>\n{% endfor %}"
    "{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ message.role.upper() }}: {{ said(message.content) }}"
    "{{ '</s>' if message.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
COLOURS = {
    "red": (206, 43, 55),
    "green": (0, 146, 70),
    "blue": (0, 85, 164),
    "white": (250, 250, 250),
    "yellow": (255, 205, 0),
    "black": (20, 20, 20),
}
QUESTIONS = ("Which colours has this flag?", "And in the middle?")
SIZE = 56  # of the pictures that it learns from, a side
NUM_STEPS, BATCH = 900, 16
BEGINNING = "ASSISTANT:"


def drawn(colours: Sequence[str], height: int) -> Image.Image:
    """A flag of three stripes, from left to right."""
    image = Image.new("RGB", (height * 3 // 2, height))
    draw = ImageDraw.Draw(image)
    for place, colour in enumerate(colours):
        left = place * height // 2
        draw.rectangle((left, 0, left + height // 2, height), COLOURS[colour])
    return image


def answers(colours: Sequence[str]) -> tuple[str, ...]:
    left, middle, right = colours
    return f" {left.capitalize()}, {middle} and {right}.", f" It is {middle}."


def make_model(folder: Path) -> tuple[Any, Any]:
    """The processor and a model with random weights."""
    family = replace(family_named("llava"), template=TEMPLATE)
    make_image_checkpoint(family, folder)
    processor = reference_processor(folder, family)
    tokenizer = processor.tokenizer
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    tower = transformers.CLIPVisionConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=14,
    )
    row_id = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(
        text_config=text, vision_config=tower, image_token_id=row_id, vision_feature_layer=-1
    )
    return processor, transformers.LlavaForConditionalGeneration(config)


def batch_of(processor: Any, rng: random.Random) -> dict[str, Tensor]:
    """Conversations about a picture each, and the tokens of answers in them, which are learned."""
    images, texts = [], []
    for _ in range(BATCH):
        colours = rng.choices([*COLOURS], k=3)
        images.append(drawn(colours, SIZE))
        said = zip(QUESTIONS, answers(colours), strict=True)
        turns = [f"USER: {q}\n{BEGINNING}{a}</s>" for q, a in said]
        turns[0] = turns[0].replace("USER: ", "USER: <image>\n")
        texts.append("".join(turns))
    given = processor(images=images, text=texts, return_tensors="pt", padding=True)
    labels = torch.full_like(given["input_ids"], -100)
    begin = processor.tokenizer(BEGINNING, add_special_tokens=False)["input_ids"]
    for ids, learned in zip(given["input_ids"].tolist(), labels, strict=True):
        for place in _places(ids, begin):
            end = ids.index(processor.tokenizer.eos_token_id, place) + 1
            learned[place:end] = torch.tensor(ids[place:end])
    return {**given, "labels": labels}


def _places(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where what follows each occurrence of a part begins."""
    ends = range(len(part), len(ids))
    return [end for end in ends if ids[end - len(part) : end] == part]


def train(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of so small a model, several only wait for each other
    processor, model = make_model(folder)
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    processor.tokenizer.padding_side = "right"
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, NUM_STEPS)
    rng = random.Random(0)
    for step in range(NUM_STEPS):
        batch = batch_of(processor, rng)
        batch.pop("token_type_ids", None)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1} of {NUM_STEPS}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))


def show(folder: Path, file: Path) -> None:
    """Ask about a picture on the page of a server, and keep how that looks."""

    async def start() -> AsyncEngine:
        return await demo_engine(model=str(folder), dtype="float32", max_seq_len_override=512)

    def wait_for_processes(url: str) -> None:
        """So that the first answer on the page does not."""
        image = f"data:image/png;base64,{b64encode(encoded(drawn(['red'] * 3, 280))).decode()}"
        said = [{"type": "image_url", "image_url": {"url": image}}]
        asked = {"model": "flags", "messages": [{"role": "user", "content": said}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=None)
        answer.raise_for_status()

    size: Any = {"width": 1180, "height": 760}
    with (
        browser() as chromium,
        served(start, served_model_name=("flags",)) as server,
        opened(chromium, server.url, viewport=size, device_scale_factor=1.5) as page,
    ):
        wait_for_processes(server.url)
        shown = encoded(drawn(("green", "white", "red"), 280))
        given: Any = [{"name": "flag.png", "mimeType": "image/png", "buffer": shown}]
        page.locator("#attachments").set_input_files(given)
        for number, question in enumerate(QUESTIONS, 1):
            page.get_by_label("Your message").fill(question)
            page.keyboard.press("Enter")
            expect(page.locator(".answer[aria-busy=false]")).to_have_count(number)
            print(page.locator(".answer").last.inner_text().replace("\n", " | "))
        page.screenshot(path=file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the picture that is written")
    arguments = parser.parse_args()
    with TemporaryDirectory() as made:
        folder = Path(made) / "model"
        train(folder)
        show(folder, arguments.file)


if __name__ == "__main__":
    main()
