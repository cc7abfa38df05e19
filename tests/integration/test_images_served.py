"""Images from clients to the tower and back: a small Llava in the server, and in transformers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import torch
import transformers
from PIL import Image
from support.adopted_checkpoints import give_teeth
from support.image_checkpoints import (
    colourful,
    encoded,
    family_named,
    make_image_checkpoint,
    reference_processor,
)
from support.serving import Served, demo_engine, served

from minisgl import LLM
from minisgl.engine import AsyncEngine, images
from minisgl.server.answers.handover import PREFILL, PREFILLED, Handover

NUM_TOKENS = 8
NUM_ROWS = 16  # of 56 pixels a side in patches of 14
RED, BLUE = colourful(70, 90), colourful(60, 60, seed=1)


class Llava:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        family = family_named("llava")
        make_image_checkpoint(family, folder)
        self.processor = reference_processor(folder, family)
        self.row_id: int = self.processor.tokenizer.convert_tokens_to_ids("<image>")
        text = transformers.LlamaConfig(
            vocab_size=len(self.processor.tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        tower = transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=56,
            patch_size=14,
        )
        config = transformers.LlavaConfig(
            text_config=text, vision_config=tower, image_token_id=self.row_id
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.model = transformers.LlavaForConditionalGeneration(config).float().eval()
            give_teeth(self.model)
        self.model.save_pretrained(folder)

    def answer(self, *content: str | Image.Image) -> tuple[int, list[int]]:
        """The number of tokens of a question, and the tokens of its answer."""
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part}
            for part in content
        ]
        given = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            return_tensors="pt",
        )
        given.pop("token_type_ids", None)
        with torch.no_grad():
            found = self.model.generate(
                **given,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                suppress_tokens=[self.row_id],
                eos_token_id=None,
            )
        length = given["input_ids"].shape[1]
        return length, found[0, length:].tolist()


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Llava:
    return Llava(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def server(llava: Llava) -> Iterator[Served[AsyncEngine]]:
    async def start() -> AsyncEngine:
        return await demo_engine(
            model=str(llava.folder), dtype="float32", page_size=1, max_seq_len_override=256
        )

    with served(start, served_model_name=("model",)) as found:
        yield found
        found.on_loop(found.engine.audit)


def data_url(image: Image.Image, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{b64encode(encoded(image, form)).decode()}"


def asked(server: Served[AsyncEngine], llava: Llava, *content: str | Image.Image) -> Any:
    """The answer to a question by the API of chats."""
    parts: Any = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in content
    ]
    with server.openai() as client:
        return client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": parts}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={
                "return_token_ids": True,
                "ignore_eos": True,
                "logit_bias": {str(llava.row_id): -100},
            },
        )


def test_answers_are_those_of_transformers_and_images_are_cached_by_what_they_show(
    server: Served[AsyncEngine], llava: Llava
) -> None:
    for content in (
        ("What is this?", RED),
        ("What is this?", BLUE),
        (RED, "Is this", BLUE, "the same?"),
        ("What is this?", RED),
    ):
        length, tokens = llava.answer(*content)
        answer = asked(server, llava, *content)
        assert answer.choices[0].token_ids == tokens, content
        assert answer.usage.prompt_tokens == length
        assert len(answer.prompt_token_ids) == length and min(answer.prompt_token_ids) >= 0
        num_images = sum(not isinstance(part, str) for part in content)
        assert answer.prompt_token_ids.count(llava.row_id) == NUM_ROWS * num_images
    assert answer.usage.prompt_tokens_details.cached_tokens == length - 1
    other = asked(server, llava, "What is this?", colourful(50, 50, seed=2))
    # The template has the image in front of the text.
    assert other.usage.prompt_tokens_details.cached_tokens < length - NUM_ROWS


def test_texts_are_there_under_a_template_that_wants_them_in_parts(
    server: Served[AsyncEngine], llava: Llava
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    with server.http() as http:
        found = http.post("/tokenize", json={"messages": messages}).json()
        text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert "SYSTEM: Be brief. USER: Hi! ASSISTANT:" in text


def test_logprobs_of_a_prompt_are_null_in_the_places_of_images(
    server: Served[AsyncEngine], llava: Llava
) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    content = [{"type": "text", "text": "Which?"}, part]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    shown = answer["prompt_token_ids"]
    for token_id, scored in zip(shown[1:], answer["prompt_logprobs"][1:], strict=True):
        assert (scored is None) == (token_id == llava.row_id)
        assert scored is None or str(token_id) in scored


def test_all_apis_agree(server: Served[AsyncEngine], llava: Llava) -> None:
    chat = asked(server, llava, "Which?", RED)
    text, count = chat.choices[0].message.content, chat.usage.prompt_tokens
    options = {"temperature": 0, "ignore_eos": True, "logit_bias": {str(llava.row_id): -100}}
    with server.openai() as client:
        content: Any = [
            {"type": "input_text", "text": "Which?"},
            {"type": "input_image", "image_url": data_url(RED)},
        ]
        response = client.responses.create(
            model="model",
            input=[{"role": "user", "content": content}],
            max_output_tokens=NUM_TOKENS,
            extra_body=options,
        )
        assert response.output_text == text and response.usage
        assert response.usage.input_tokens == count
    source: Any = {
        "type": "base64",
        "media_type": "image/png",
        "data": b64encode(encoded(RED)).decode(),
    }
    messages: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Which?"}, {"type": "image", "source": source}],
        }
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        message = client.messages.create(
            model="model", max_tokens=NUM_TOKENS, messages=messages, extra_body=options
        )
        assert message.content[0].text == text
        counted = client.messages.count_tokens(model="model", messages=messages)
        assert counted.input_tokens == count
    url = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Which?"}, url]}]}
    with server.http() as http:
        found = http.post("/tokenize", json=body).json()
        assert found["tokens"] == chat.prompt_token_ids
        [model] = http.get("/v1/models").json()["data"]
        assert model["input_modalities"] == ["text", "image"]


def history(num_images: int) -> list[dict[str, Any]]:
    """Items of a conversation with an image in each question."""
    items: list[dict[str, Any]] = []
    for number in range(num_images):
        if number:
            answer = {"type": "output_text", "text": f"Answer {number}"}
            items.append({"role": "assistant", "content": [answer]})
        image = {"type": "input_image", "image_url": data_url(colourful(60, 60, seed=number))}
        question = {"type": "input_text", "text": f"Question {number}"}
        items.append({"role": "user", "content": [question, image]})
    return items


@pytest.mark.parametrize(
    ("limits", "num_images", "num_left", "words"),
    [
        ({"max_seq_len_override": 160}, 6, None, "maximum context length"),
        ({"image_rows": 3 * NUM_ROWS + 1}, 8, 3, "images take 128 tokens"),
        ({}, 19, 16, "19 images; allowed: 16"),
        ({"pixels": 5 * 60 * 60 - 1}, 8, 4, "too many"),
        ({"bytes": 5}, 8, 5, "bytes; allowed"),
    ],
    ids=["tokens", "rows", "images", "pixels", "bytes"],
)
def test_truncation_leaves_out_turns_with_images_that_do_not_fit(
    llava: Llava,
    limits: dict[str, int],
    num_images: int,
    num_left: int | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = history(num_images)
    options = {"max_seq_len_override": 1024, **limits}
    if pixels := options.pop("pixels", None):
        monkeypatch.setattr(images, "MAX_REQUEST_PIXELS", pixels)
    if num := options.pop("bytes", None):
        sizes = [len(encoded(colourful(60, 60, seed=seed))) for seed in range(num_images)]
        monkeypatch.setattr(images, "MAX_REQUEST_BYTES", sum(sizes[-num:]))

    async def start() -> AsyncEngine:
        return await demo_engine(model=str(llava.folder), dtype="float32", page_size=1, **options)

    with served(start) as server, server.http() as http:

        def post(given: list[dict[str, Any]], truncation: str) -> Any:
            body = {
                "input": given,
                "instructions": "Be brief.",
                "truncation": truncation,
                "temperature": 0,
                "max_output_tokens": 4,
                "ignore_eos": True,
            }
            return http.post("/v1/responses", json=body)

        refused = post(items, "disabled")
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert words in error["message"] and error["param"].startswith("input")
        answer = post(items, "auto")
        assert answer.status_code == 200, answer.text
        # As few as possible are left out.
        rest = [items[2 * number :] for number in range(num_images)]
        fits = [post(each, "disabled") for each in rest]
        first = next(each for each in fits if each.status_code == 200)
        left = num_images - fits.index(first)
        assert 1 < left == (num_left or left) < num_images
        for name in ("output", "usage"):
            assert found(answer, name) == found(first, name)
        damaged = [*items]
        image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        damaged[-1] = {"role": "user", "content": [image]}
        error = post(damaged, "auto").json()["error"]
        assert error["param"] == f"input[{len(items) - 1}].content[0].image_url"
        server.on_loop(server.engine.audit)


def found(response: Any, name: str) -> Any:
    """What an answer says that another answer to the same prompt says."""
    answer = response.json()
    if name == "output":
        return [part["text"] for item in answer["output"] for part in item["content"]]
    return answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,AAAA", "no format that is known"),
        (data_url(RED)[:-400], "damaged or incomplete"),
        ("http://169.254.169.254/latest", "host that is not allowed"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(
    server: Served[AsyncEngine], url: str, words: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    content = [{"type": "text", "text": "a"}, part]
    with server.http() as http:
        for path, body, field in (
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": content}]},
                "messages.0.content.1.image_url",
            ),
            (
                "/v1/responses",
                {
                    "input": [
                        {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
                    ]
                },
                "input[0].content[0].image_url",
            ),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == field, answer.text
            assert words in answer.json()["error"]["message"]
        keys = http.post("/v1/completions", json={"prompt": [-5], "max_tokens": 1})
        assert keys.status_code == 400


def chat_about(server: Served[AsyncEngine], *parts: Any, **fields: Any) -> Any:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages = [{"role": "user", "content": content}]
    with server.http() as http:
        return http.post("/v1/chat/completions", json={"messages": messages, **fields})


def image_part(data: bytes | Image.Image, form: str = "png") -> dict[str, Any]:
    data = data if isinstance(data, bytes) else encoded(data)
    url = f"data:image/{form};base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_choices_and_masks_are_of_one_image(server: Served[AsyncEngine]) -> None:
    fields = {"temperature": 1, "seed": 5, "n": 3, "max_tokens": 6, "ignore_eos": True}
    alone = [
        choice["message"]["content"]
        for choice in chat_about(server, "a", image_part(RED), **fields).json()["choices"]
    ]
    again = chat_about(server, "a", image_part(RED), **fields).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == alone
    assert len({*alone}) == 3
    schema = {"type": "object", "properties": {"is": {"enum": ["red", "blue"]}}, "required": ["is"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    # Drawn without a seed, the answer may be spaces between its parts until its last token.
    held = {"response_format": form, "max_tokens": 64, "seed": 5}
    answer = chat_about(server, "a", image_part(RED), **held).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["is"] in ("red", "blue")


def test_one_server_computes_a_prompt_with_images_and_another_answers(
    llava: Llava, tmp_path: Path
) -> None:
    """As those of --roles, to which the router sends a request one after the other."""

    async def start() -> AsyncEngine:
        return await demo_engine(
            model=str(llava.folder),
            dtype="float32",
            page_size=4,
            num_pages=64,
            max_seq_len_override=128,
            host_cache=0.01,
        )

    content = [{"type": "text", "text": "What is this?"}, image_part(RED)]
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "logit_bias": {str(llava.row_id): -100},
        "return_token_ids": True,
    }
    length, tokens = llava.answer("What is this?", RED)
    with served(start) as prefill, served(start) as decode:
        for server, name in ((prefill, "prefill"), (decode, "decode")):
            sharing = server.engine.pages.share(str(tmp_path / name), always_load=True)
            address = asyncio.run_coroutine_threadsafe(sharing, server.loop).result()
            server.state.around = Handover(server.engine, address).around
        with prefill.http() as http:
            headers = {PREFILL.decode(): "1"}
            offered = http.post("/v1/chat/completions", json=body, headers=headers).json()
        assert offered["offered"] == 1
        with decode.http() as http:
            headers = {PREFILLED.decode(): offered["address"]}
            answer = http.post("/v1/chat/completions", json=body, headers=headers).json()
        assert answer["choices"][0]["token_ids"] == tokens
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 4 * 4
        for server in (prefill, decode):
            server.on_loop(server.engine.audit)


def bomb(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of few bytes that says it is as large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(bytes(9))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def animated(form: str) -> bytes:
    return encoded(RED, form, save_all=True, append_images=[BLUE.resize(RED.size)])


def hostile() -> dict[str, bytes]:
    zeros = zlib.compress(bytes(70 << 20))
    return {
        "many pixels": bomb(30_000, 30_000),
        "most pixels": bomb(2**31 - 1, 2**31 - 1),
        "a bomb of text": bomb(4, 4, (b"zTXt", b"a\0\0" + zeros)),
        "a bomb of colours": bomb(4, 4, (b"iCCP", b"a\0\0" + zeros)),
        "no width": bomb(0, 9),
        "truncated": encoded(RED, "JPEG")[:-60],
        "an animated PNG": animated("PNG"),
        "an animated GIF": animated("GIF"),
        "a page": b"<html><script>",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "another format": encoded(RED, "TIFF"),
        "nothing": b"",
    }


def test_hostile_images_are_errors_of_their_requests(
    server: Served[AsyncEngine], llava: Llava
) -> None:
    for name, data in hostile().items():
        answer = chat_about(server, "a", image_part(data), max_tokens=1)
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == "messages.0.content.1.image_url", name
    _, tokens = llava.answer("What is this?", RED)
    for data in (encoded(RED) + b"PK\x03\x04<script>", encoded(RED)):  # of two kinds at once
        options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        options |= {"return_token_ids": True, "logit_bias": {str(llava.row_id): -100}}
        answer = chat_about(server, "What is this?", image_part(data, "gif"), **options)
        assert answer.json()["choices"][0]["token_ids"] == tokens


def test_clients_that_leave_while_an_image_is_on_its_way_leave_nothing(
    server: Served[AsyncEngine],
) -> None:
    """Whether it is decoded, waits for the tower, or is answered then."""
    part = image_part(colourful(700, 700, seed=5))
    body = json.dumps(
        {"messages": [{"role": "user", "content": [part]}], "max_tokens": 99, "stream": True}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    for until_bytes in (0, 1, 600):
        with socket.create_connection(address) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            received = 0
            while received < until_bytes:
                received += len(client.recv(200))
    assert chat_about(server, "a", image_part(RED), max_tokens=1).status_code == 200
    stats = server.engine.stats
    while stats().num_running + stats().num_queued:
        assert chat_about(server, "a", max_tokens=1).status_code == 200


def test_programs_chat_about_images_of_pillow(llava: Llava, tmp_path: Path) -> None:
    length, tokens = llava.answer("What is this?", RED)
    file = tmp_path / "red.png"
    RED.save(file)
    with LLM(str(llava.folder), device="cpu", dtype="float32", max_seq_len_override=256) as llm:
        for part in (
            {"type": "image", "image": RED},
            {"type": "image", "image": file},
            {"type": "image_url", "image_url": {"url": str(file)}},
        ):
            content = [{"type": "text", "text": "What is this?"}, part]
            output = llm.chat(
                [{"role": "user", "content": content}],
                temperature=0,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                logit_bias={llava.row_id: -100},
            )
            assert output.token_ids == tokens
            assert len(output.prompt_token_ids) == length and min(output.prompt_token_ids) >= 0
