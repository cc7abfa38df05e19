"""Prompts of conversations with images, beside what transformers makes of them."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.engine_loop import ScriptedRunner, engine_on
from support.image_checkpoints import (
    FAMILIES,
    GEMMA_TEMPLATE,
    MISTRAL3,
    Family,
    ProcessorHere,
    colourful,
    encoded,
    family_named,
    inputs_of,
    make_image_checkpoint,
    reference_processor,
)
from support.waiting import LIMIT_S, until
from transformers import AutoTokenizer

from minisgl.engine import images as images_module
from minisgl.engine.images import LONG_BYTES, NUM_PROCESSES, Images
from minisgl.engine.texts import Texts
from minisgl.engine.work_queue import WorkQueue
from minisgl.errors import EngineStoppedError, InvalidRequestError, QueueFullError
from minisgl.images.checkpoint import TEXT_OUTPUTS
from minisgl.images.fetching import Fetcher
from minisgl.images.kept import KeptPictures
from minisgl.images.picture import Picture
from minisgl.images.processor import ImageProcessor, ImageSupport
from minisgl.images.prompt import Prompt
from minisgl.images.source import ImageSource
from minisgl.parts.images.host import Pictured
from minisgl.places import Places
from minisgl.request import Tenant
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
    support: ImageSupport | None = None,
) -> AsyncIterator[Images]:
    tokenizer = Tokenizer.load(folder)
    texts = Texts(tokenizer, max_seq_len=1 << 20, num_places=1000, make_renderer=RendererHere)
    images = Images(
        texts, tokenizer, support or ImageSupport.of(folder), fetcher or Fetcher(()), make_processor
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
    [pictured] = prompt.extras
    assert isinstance(pictured, Pictured)
    assert pictured.spans == prompt.spans
    for name, of_all in reference.items():
        if name not in (*TEXT_OUTPUTS, "batch_num_images"):
            parts = [np.asarray(inputs_of(span.picture)[name]) for span in prompt.spans]
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
    async with images_of(folder) as images:
        if importlib.util.find_spec("torchvision") is not None:
            assert (await images.prompt([ours], False, {})).spans
            return
        with pytest.raises(InvalidRequestError, match="needs the package torchvision, which"):
            await images.prompt([ours], False, {})


def question(*images: ImageSource, role: str = "user") -> list[dict[str, Any]]:
    parts = [{"type": "image", "source": image} for image in images]
    return [{"role": role, "content": [*parts, {"type": "text", "text": "What is it?"}]}]


class Processors:
    """Makes processors, all of which count here."""

    def __init__(self) -> None:
        self.made: list[ProcessorHere] = []

    def __call__(self, folder: Path) -> ProcessorHere:
        self.made.append(ProcessorHere(folder))
        return self.made[-1]

    @property
    def num_images(self) -> int:
        return sum(processor.num_images for processor in self.made)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(family_named("qwen3_5"), tmp_path_factory.mktemp("see") / "model")


async def test_the_next_turn_of_a_conversation_processes_no_image_again(qwen: Path) -> None:
    processors = Processors()
    first, second = ImageSource(encoded(colourful(60, 60))), ImageSource(encoded(colourful(60, 40)))
    async with images_of(qwen, make_processor=processors) as images:
        begun = question(first)
        one = await images.prompt(begun, False, {})
        assert processors.num_images == 1
        turn = {"role": "assistant", "content": "A cat."}
        other = await images.prompt([*begun, turn, *question(first, second)], False, {})
        assert processors.num_images == 2
        [span], spans = one.spans, other.spans
        assert spans[0].picture is spans[1].picture is span.picture
        assert spans[2].picture.digest != span.picture.digest
        # The prompt goes on where the first one ended: its pages are found in the prefix cache.
        length = span.end
        assert other.token_ids[:length] == one.token_ids[:length]


async def test_requests_at_once_process_an_image_of_both_once(qwen: Path) -> None:
    processors = Processors()
    image = ImageSource(encoded(colourful(60, 60)))
    async with images_of(qwen, make_processor=processors) as images:
        images._line = WorkQueue(lambda: processors(qwen))
        prompts = await asyncio.gather(
            *(images.prompt(question(image), False, {}) for _ in range(5))
        )
        assert processors.num_images == 1
        assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1


async def test_who_shares_no_prefixes_shares_no_processed_images(qwen: Path) -> None:
    """Else the time of an image would tell that somebody else had sent it."""
    processors = Processors()
    asked = question(ImageSource(encoded(colourful(60, 60))))
    async with images_of(qwen, make_processor=processors) as images:
        prompts = [await images.prompt(asked, False, {}, salt) for salt in ("a", "b", "a", None)]
    assert processors.num_images == 3
    first, second, again, _ = (prompt.spans[0].picture for prompt in prompts)
    assert first is again
    assert first.digest == second.digest


async def test_a_reduced_image_is_another_one(qwen: Path) -> None:
    data = encoded(colourful(700, 60))
    async with images_of(qwen) as images:
        high, low = [
            await images.prompt(question(ImageSource(data, is_low=is_low)), False, {})
            for is_low in (False, True)
        ]
        assert high.spans[0].picture.digest != low.spans[0].picture.digest
        assert high.token_ids != low.token_ids


async def test_the_images_of_a_request_share_its_pixels(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_module, "MAX_REQUEST_PIXELS", 8000)
    sources = [ImageSource(encoded(colourful(60, 60, seed=seed))) for seed in range(3)]
    async with images_of(qwen) as images:
        await images.prompt(question(*sources[:2]), False, {})
        for asked in (sources, [sources[0]] * 3):  # the latter is kept
            with pytest.raises(InvalidRequestError, match=r"60 × 60 pixels.*a request"):
                await images.prompt(question(*asked), False, {})


async def test_the_images_of_a_request_share_its_bytes(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(colourful(60, 60))

    class OfAnyHost(Fetcher):
        async def fetch(self, url: str) -> bytes:
            return data

    monkeypatch.setattr(images_module, "MAX_REQUEST_BYTES", 2 * len(data))
    by_url, source = ImageSource(url="http://a.example/"), ImageSource(data)
    async with images_of(qwen, OfAnyHost(())) as images:
        prompt = await images.prompt(question(source, by_url), False, {})
        assert prompt.spans[0].picture is prompt.spans[1].picture
        for asked in ([source] * 3, [by_url] * 3, [by_url, source, by_url]):
            with pytest.raises(InvalidRequestError, match=r"bytes; allowed: .* a request"):
                await images.prompt(question(*asked), False, {})
        assert images._waiting_bytes.num_taken == 0


async def test_fetched_bytes_count_while_other_images_are_on_their_way(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(colourful(60, 60))

    class OneNeverComes(Fetcher):
        async def fetch(self, url: str) -> bytes:
            if url.endswith("never"):
                await asyncio.Event().wait()
            return data

    monkeypatch.setattr(images_module, "MAX_REQUEST_BYTES", 2 * len(data))
    never, come = (ImageSource(url=f"http://a.example/{name}") for name in ("never", "a"))
    async with images_of(qwen, OneNeverComes(())) as images:
        waits = asyncio.ensure_future(images.prompt(question(never, come), False, {}))
        await until(lambda: images._waiting_bytes.num_taken == len(data))
        with pytest.raises(InvalidRequestError, match=r"bytes; allowed: .* a request"):
            await images.prompt(question(never, come, come, come), False, {})
        waits.cancel()
        await until(lambda: not images._waiting_bytes.num_taken)


async def test_too_many_bytes_of_all_requests_are_refused(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    class Gated(ProcessorHere):
        def process(self, *args: Any, **options: Any) -> tuple[Picture, int]:
            assert gate.wait(LIMIT_S)
            return super().process(*args, **options)

    data = encoded(colourful(60, 60))
    monkeypatch.setattr(images_module, "MAX_WAITING_BYTES", 2 * len(data) - 1)
    asked = question(ImageSource(data))
    async with images_of(qwen, make_processor=Gated) as images:
        first = asyncio.ensure_future(images.prompt(asked, False, {}))
        await until(lambda: images._waiting_bytes.num_taken)
        with pytest.raises(QueueFullError, match="try again later"):
            await images.prompt(asked, False, {})
        gate.set()
        assert (await first).spans
        assert (await images.prompt(asked, False, {})).spans


async def test_requests_that_wait_have_images_up_to_a_share_of_the_memory(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [question(ImageSource(encoded(colourful(60, 60, seed=seed)))) for seed in range(5)]
    async with images_of(qwen) as images:
        held = [await images.prompt(asked[0], False, {})]
        num_bytes = images._kept._num_bytes
        monkeypatch.setattr(images_module, "memory_bytes", lambda: 4 * 2.5 * num_bytes)
        images._kept._max_bytes = 0  # whatever is kept does not count
        held += [await images.prompt(each, False, {}) for each in asked[1:3]]
        with pytest.raises(QueueFullError, match="try again later"):
            await images.prompt(asked[3], False, {})
        held.clear()  # the requests have ended
        gc.collect()
        assert (await images.prompt(asked[3], False, {})).spans
        assert (await images.prompt(asked[4], False, {})).spans


async def test_fetches_at_once_are_limited(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, gate = encoded(colourful(60, 60)), asyncio.Event()
    num_open = most = 0

    class Waits(Fetcher):
        async def fetch(self, url: str) -> bytes:
            nonlocal num_open, most
            num_open += 1
            most = max(most, num_open)
            await gate.wait()
            num_open -= 1
            return data

    monkeypatch.setattr(images_module, "NUM_FETCHES", 3)
    async with images_of(qwen, Waits(())) as images:
        asked = question(*[ImageSource(url="http://a.example/")] * 5)
        prompts = asyncio.gather(*(images.prompt(asked, False, {}) for _ in range(3)))
        await until(lambda: num_open == 3)
        gate.set()
        assert [len(prompt.spans) for prompt in await prompts] == [5, 5, 5]
    assert most == 3


async def test_an_image_that_fails_ends_its_request_only(qwen: Path) -> None:
    good, bad = ImageSource(encoded(colourful(60, 60))), ImageSource(b"<svg/>")
    far = ImageSource(url="http://example.com/a.png")
    async with images_of(qwen) as images:
        found = await asyncio.gather(
            *(
                images.prompt(question(*asked), False, {})
                for asked in ([bad, good], [good], [far, good], [good, far, far])
            ),
            return_exceptions=True,
        )
        kinds = [type(each) for each in found]
        refused = InvalidRequestError
        assert kinds == [refused, Prompt, refused, refused]
        assert "allowed: none (--image-hosts lists them)" in str(found[3])


IMAGE_BYTES = 1000


class InOrder:
    """Makes processors, and a fetcher, that note whose images they get, one when a test says so."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}  # by the bytes of an image
        self.gate = threading.Semaphore(0)
        self.order: list[str] = []

    def source(self, name: str, *, large: bool = False) -> ImageSource:
        number = len(self.names)
        image = Image.new("RGB", (40, 40), (number, 0, 0))
        # Zeros behind an image are not looked at.
        data = encoded(image, "PNG").ljust(LONG_BYTES if large else IMAGE_BYTES, b"\0")
        self.names[data] = name
        return ImageSource(data)

    def processor(self, folder: Path) -> ProcessorHere:
        outer = self

        class Noted(ProcessorHere):
            def process(self, data: bytes, *args: Any, **options: Any) -> tuple[Picture, int]:
                outer.order.append(outer.names[data])
                assert outer.gate.acquire(timeout=LIMIT_S)
                return super().process(data, *args, **options)

        return Noted(folder)

    async def until_begun(self, num: int) -> None:
        await until(lambda: len(self.order) == num)

    async def until_wait(self, images: Images, num: int) -> None:
        """Wait until so many images are processed or wait for that."""
        await until(lambda: len(self.order) + waiting_at(images._processing) == num)


@pytest.mark.parametrize("large", [False, True])
async def test_clients_take_turns_with_their_images(qwen: Path, large: bool) -> None:
    """And the users of each; the images of one user keep their order."""
    seen = InOrder()
    asked = [(Tenant("many", "x"), f"{number}") for number in range(20)]
    asked += [(Tenant("many", "y"), "other user"), (Tenant("few"), "a"), (Tenant("few"), "b")]
    async with images_of(qwen, make_processor=seen.processor) as images:
        prompts = []
        for tenant, name in asked:
            wanted = question(seen.source(name, large=large))
            prompts.append(asyncio.ensure_future(images.prompt(wanted, False, {}, None, tenant)))
            await seen.until_wait(images, len(prompts))
        assert seen.order == ["0", "1"]
        for num_ended in range(1, len(asked) + 1):
            seen.gate.release()
            await seen.until_begun(min(num_ended + NUM_PROCESSES, len(asked)))
        assert all(prompt.spans for prompt in await asyncio.gather(*prompts))
    assert seen.order[:8] == ["0", "1", "2", "a", "other user", "b", "3", "4"]
    assert seen.order[8:] == [f"{number}" for number in range(5, 20)]
    assert images._waiting_bytes.num_taken == images._texts._changing.num_taken == 0


async def test_images_that_nobody_waits_for_any_more_leave_their_places(qwen: Path) -> None:
    seen = InOrder()
    async with images_of(qwen, make_processor=seen.processor) as images:
        await know_placeholder(images)
        many = [
            asyncio.ensure_future(
                images.prompt(question(seen.source(f"{k}")), False, {}, None, Tenant("many"))
            )
            for k in range(10)
        ]
        await seen.until_wait(images, len(many))
        one = asyncio.ensure_future(
            images.prompt(question(seen.source("one")), False, {}, None, Tenant("one"))
        )
        await seen.until_wait(images, len(many) + 1)
        for each in many[1:]:  # one that is processed, too
            each.cancel()
        for _ in range(3):
            seen.gate.release()
        assert (await many[0]).spans and (await one).spans
        assert sorted(seen.order) == ["0", "1", "one"]
        assert images._processing._num_free == NUM_PROCESSES
        assert not images._processing._waiting and not images._waiting_bytes.num_taken


async def know_placeholder(images: Images) -> None:
    """As after the first image, so that others come to the line in their order."""
    assert images._line is not None
    await images._find_placeholder(images._line)


def waiting_at(places: Places) -> int:
    return sum(len(line) for users in places._waiting.values() for line in users.values())


async def test_clients_take_turns_at_addresses(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, gate, begun = encoded(colourful(60, 60)), asyncio.Semaphore(0), list[str]()

    class Noted(Fetcher):
        async def fetch(self, url: str) -> bytes:
            begun.append(url)
            await gate.acquire()
            return data

    def asked(client: str, names: str) -> asyncio.Future[Prompt]:
        wanted = question(*[ImageSource(url=name) for name in names])
        return asyncio.ensure_future(images.prompt(wanted, False, {}, None, Tenant(client)))

    monkeypatch.setattr(images_module, "NUM_FETCHES", 2)
    async with images_of(qwen, Noted(())) as images:
        prompts = [asked("many", "012345"), asked("many", "678")]
        await until(lambda: waiting_at(images._fetching) == 7)
        prompts.append(asked("one", "a"))
        await until(lambda: waiting_at(images._fetching) == 8)
        for _ in range(10):
            gate.release()
        await asyncio.gather(*prompts)
    assert "".join(begun) == "012a345678"


async def test_a_client_with_many_images_that_wait_locks_no_other_out(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = InOrder()
    monkeypatch.setattr(images_module, "MAX_WAITING_BYTES", 4 * IMAGE_BYTES)

    def asked(client: str, number: int) -> asyncio.Future[Prompt]:
        wanted = question(seen.source(f"{client} {number}"))
        return asyncio.ensure_future(images.prompt(wanted, False, {}, None, Tenant(client)))

    async with images_of(qwen, make_processor=seen.processor) as images:
        await know_placeholder(images)
        many = [asked("many", number) for number in range(6)]
        await until(lambda: sum(each.done() for each in many) == 2)
        others = [asked("other", number) for number in range(4)]
        await until(lambda: sum(each.done() for each in others) == 2)
        for _ in range(6):
            seen.gate.release()
        found = await asyncio.gather(*many, *others, return_exceptions=True)
    refused = [isinstance(each, QueueFullError) for each in found]
    assert refused == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2


async def test_an_engine_that_closes_ends_what_waits_for_a_turn(qwen: Path) -> None:
    seen = InOrder()
    async with images_of(qwen, make_processor=seen.processor) as images:
        await know_placeholder(images)
        prompts = [
            asyncio.ensure_future(images.prompt(question(seen.source(f"{k}")), False, {}))
            for k in range(5)
        ]
        await seen.until_wait(images, 5)
        images.close(EngineStoppedError("closed for a test"))
        for prompt in prompts:
            with pytest.raises(EngineStoppedError, match="closed for a test"):
                await prompt
        for _ in range(2):
            seen.gate.release()
    assert len(seen.order) == 2


async def test_a_caller_that_leaves_ends_its_fetches(qwen: Path) -> None:
    cancelled: list[str] = []
    begun = asyncio.Event()

    class Waits(Fetcher):
        async def fetch(self, url: str) -> bytes:
            begun.set()
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                cancelled.append(url)

    async with images_of(qwen, Waits(())) as images:
        asked = question(ImageSource(url="http://a.example/"))
        task = asyncio.ensure_future(images.prompt(asked, False, {}))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: cancelled)
        assert images._waiting_bytes.num_taken == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_a_conversation_that_cannot_be_rendered_ends_its_fetches(
    fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    class Waits(Fetcher):
        async def fetch(self, url: str) -> bytes:
            try:
                if fails:
                    raise InvalidRequestError("messages", "the image is lost.")
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.append(url)

    family = replace(family_named("gemma3"), template="{{ raise_exception('no questions') }}")
    folder = make_image_checkpoint(family, tmp_path / "model")
    async with images_of(folder, Waits(())) as images:
        asked = question(ImageSource(url="http://a.example/"))
        with pytest.raises(InvalidRequestError, match="no questions"):
            await images.prompt(asked, False, {})
        await until(lambda: ended)
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_template_that_leaves_images_out_is_told(tmp_path: Path) -> None:
    template = GEMMA_TEMPLATE.replace("<start_of_image>", "")
    family = replace(family_named("gemma3"), template=template)
    folder = make_image_checkpoint(family, tmp_path / "model")
    async with images_of(folder) as images:
        asked = question(ImageSource(encoded(colourful(60, 60))))
        with pytest.raises(InvalidRequestError, match=r"1 images, for which .* 0 placeholders"):
            await images.prompt(asked, False, {})


@pytest.mark.parametrize("name", ["qwen3_5", "llava", "gemma3"])
async def test_a_conversation_without_images_is_that_of_the_template(
    name: str, tmp_path: Path
) -> None:
    family = family_named(name)
    folder = make_image_checkpoint(family, tmp_path / "model")
    processors = Processors()
    messages = [{"role": "user", "content": "What is it?"}]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]
    reference = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        in_parts, add_generation_prompt=True, return_dict=False
    )
    async with images_of(folder, make_processor=processors) as images:
        for asked in (messages, in_parts):
            assert await images.prompt(asked, False, {}) == Prompt(reference)
    assert not processors.made


async def test_a_model_without_a_tower_says_that_it_takes_no_images(tmp_path: Path) -> None:
    folder = make_image_checkpoint(family_named("qwen3_5"), tmp_path / "model")
    async with images_of(folder, support=ImageSupport()) as images:
        with pytest.raises(InvalidRequestError, match="the model takes no images"):
            await images.prompt(question(ImageSource(b"a")), False, {})
        messages = [{"role": "user", "content": "Hello"}]
        prompt = await images.prompt(messages, False, {})
        assert prompt == Prompt(await images._texts.chat(messages, False, {}))


async def test_the_processes_are_there_before_the_first_images(qwen: Path) -> None:
    started: list[Path] = []

    class Started(ProcessorHere):
        def start(self) -> Any:
            started.append(qwen)

    async with images_of(qwen, make_processor=Started) as images:
        images.warm()
        await until(lambda: len(started) == 2)
    async with images_of(qwen, support=ImageSupport()) as images:
        images.warm()
        assert images._warming is None


async def test_an_engine_reads_conversations_with_images() -> None:
    async with engine_on(ScriptedRunner(page_size=4), tokenizer=True) as engine:
        with pytest.raises(InvalidRequestError, match="the model takes no images"):
            await engine.encode_conversation(question(ImageSource(b"a")))
        messages = [{"role": "user", "content": "Hello"}]
        prompt = await engine.encode_conversation(messages, add_generation_prompt=False)
        encoded = await engine.encode_chat(messages, add_generation_prompt=False)
        assert (prompt.token_ids, prompt.spans, prompt.extras) == (encoded, (), [])


async def test_an_engine_that_closes_ends_what_waits_for_images(qwen: Path) -> None:
    class Waits(Fetcher):
        async def fetch(self, url: str) -> bytes:
            return await asyncio.get_running_loop().create_future()

    async with images_of(qwen, Waits(())) as images:
        await images.prompt(question(ImageSource(encoded(colourful(60, 60)))), False, {})
        images.close(EngineStoppedError("closed"))
        with pytest.raises(EngineStoppedError):
            await images.prompt(question(ImageSource(encoded(colourful(60, 40)))), False, {})


def test_kept_pictures_have_a_bound_in_bytes() -> None:
    def picture(number: int) -> Picture:
        pixels = np.zeros(100, dtype=np.uint8)
        return Picture(bytes([number]), {"pixel_values": pixels}, (), np.zeros(0, dtype=bool))

    kept = KeptPictures(max_bytes=250)
    first, second, third, large = map(picture, range(4))
    kept.put(first.digest, first, 1)
    kept.put(second.digest, second, 2)
    assert kept.get(first.digest) == (first, 1)
    kept.put(third.digest, third, 3)
    assert kept.get(second.digest) is None  # the least recently used
    assert kept.get(first.digest) is not None
    kept.put(first.digest, first, 1)
    large.inputs["pixel_values"].resize(300, refcheck=False)  # type: ignore[attr-defined]
    kept.put(large.digest, large, 4)
    assert all(kept.get(each.digest) is None for each in (first, second, third, large))
    kept.put(second.digest, second, 2)
    assert kept.get(second.digest) is not None
