"""Images from clients to the tower and back: a small Llava in the server, and in transformers."""

from __future__ import annotations

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
from minisgl.engine import AsyncEngine

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
