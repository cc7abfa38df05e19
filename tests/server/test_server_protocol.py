"""Request bodies, options and the shapes of answers, without a socket."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from support.fake_engine import FakeDefaults, FakeTokenizer

from minisgl.config import EngineConfig
from minisgl.errors import CallerError, ConfigError, InvalidRequestError
from minisgl.request import MAX_INTEGER, FinishReason, OutputDelta, SamplingParams, TokenLogprobs
from minisgl.server.answers.jobs import MAX_SCORES, GenerationJob, fitted, scored_room
from minisgl.server.apis.messages.request_types import MessagesRequest
from minisgl.server.apis.openai.answer_types import ChatCompletionChunk, CompletionChunk
from minisgl.server.apis.openai.chat_reply import ChatReply
from minisgl.server.apis.openai.chunked_reply import ChunkedReply
from minisgl.server.apis.openai.completion_reply import CompletionReply
from minisgl.server.apis.responses.request_types import ResponsesRequest
from minisgl.server.config import ServerConfig
from minisgl.server.http.decoding import decode
from minisgl.server.http.encoding import event
from minisgl.server.process import ServerProcess
from minisgl.server.requests.request_types import (
    REPLACED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from minisgl.server.requests.templating import template_messages, template_options
from minisgl.text.rendering import encode_call

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps({"messages": HELLO, **fields}).encode(), ChatRequest)


def completion(prompt: object = "hi", **fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": prompt, **fields}).encode(), CompletionRequest)


def image() -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages.0.tool_calls"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 129}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": [1]}, "stop.0"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"audio": {}}, "audio"),
        ({"stop_regex": []}, "stop_regex"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
)
def test_an_invalid_or_unsupported_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields).sampling(FakeDefaults())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 129}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_an_invalid_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
)
@pytest.mark.parametrize("value", ["a", 3, True, {"type": "object"}, ["yes", "no"]])
@pytest.mark.parametrize("field", REPLACED)
def test_a_constraint_by_an_older_name_is_refused_with_the_name_of_today(
    kind: type[Any], field: str, value: object
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(json.dumps({field: value}).encode(), kind)
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: is not supported; send structured_outputs")
    whole = {"messages": HELLO, "prompt": "a", "input": "a"}
    needed = {name: whole[name] for name in kind.__struct_fields__ if name in whole}
    for unwanted in {ResponsesRequest: ("prompt", "messages")}.get(kind, ()):
        del needed[unwanted]
    decode(json.dumps({field: None, **needed}).encode(), kind)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "prompt: is missing."),
        (b'{"prompt": "a", "promt": 1}', "promt: is not known; leave it out."),
        (b'{"prompt": "a", "suffix": "3"}', "suffix: is not supported; leave it out."),
        (b'{"prompt": "a", "stop_regex": []}', "stop_regex: is not supported; leave it out."),
        (b'{"prompt": 5}', "prompt: must be a text or a list, not an integer."),
        (b'{"prompt": []}', "prompt: must not be empty."),
        (b'{"prompt": [1.5]}', "prompt.0: must be an integer or a text or a list."),
        (b'{"prompt": "a", "temperature": "x"}', "temperature: must be a number, not a text."),
        (b'{"prompt": "a", "best_of": 1.5}', "best_of: must be an integer."),
        (b'{"prompt": "a", "best_of": 1e999}', "best_of: number out of range."),
        (b'{"prompt": "a", "n": 2.0, "best_of": "x"}', "best_of: must be an integer, not a text."),
        (b'{"prompt": "a", "n": 129.0}', "n: must be at most 128."),
        (
            b'{"prompt": "a", "min_tokens": true}',
            "min_tokens: must be an integer, not true or false.",
        ),
        (
            b'{"prompt": "a", "typical_p": 0.9}',
            "typical_p: is not supported; leave it out, or at 1.",
        ),
        (b'{"prompt": "a", "mirostat": 2}', "mirostat: is not supported; leave it out, or at 0."),
        (b'{"prompt": "a", "xtc_threshold": 1}', "xtc_threshold: is not supported; leave it out."),
        (
            b'{"prompt": "a", "stop_token_ids": [%s]}' % b",".join([b"1"] * 1025),
            "stop_token_ids: must have at most 1024 entries.",
        ),
        (
            b'{"prompt": "a", "logit_bias": {%s}}' % b",".join(b'"%d":1' % k for k in range(1025)),
            "logit_bias: must have at most 1024 keys.",
        ),
        (b'{"prompt": "a", "logprobs": 129}', "logprobs: must be at most 128."),
        (b'{"prompt": "a", "max_tokens": -1}', "max_tokens: must be at least 0."),
        (b'{"prompt": "a", "timeout": 0}', "timeout: must be more than 0."),
        (b'{"prompt": "a", "timeout": 604801}', "timeout: must be at most 604800."),
        (b'{"prompt": "a", "stop": ""}', "stop: must not be empty."),
        (
            b'{"prompt": "a", "stop": ["%s"]}' % (b"x" * 257),
            "stop.0: must have at most 256 characters.",
        ),
        (
            b'{"prompt": "a", "stop": [%s]}' % b",".join([b'"x"'] * 17),
            "stop: must have at most 16 entries.",
        ),
        (
            b'{"prompt": "a", "response_format": {"type": "xml"}}',
            "response_format.type: cannot be 'xml'; allowed: text, json_object, json_schema or "
            "structural_tag.",
        ),
    ],
)
def test_error_messages_are_plain_sentences(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, CompletionRequest, strict=True)
    assert str(caught.value) == message


def test_an_invalid_choice_is_refused_with_the_allowed_values() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(tool_choice="any")
    expected = "tool_choice: cannot be 'any'; allowed: auto, none or required."
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            (key, 1, f"each key must be a token id, which {key!r} is not.")
            for key in ("abc", "", "05", "5.0", " 5", "+5", "\u0665", "-1", "99999999999")
        ),
        ("2147483648", 1, "each key must be from 0 to 2147483647, not 2147483648."),
        ("5", "a", "the bias of token 5 must be a number, not 'a'."),
        ("5", None, "the bias of token 5 must be a number, not None."),
        ("5", -101, "the bias of token 5 must be from -100 to 100, not -101."),
    ],
)
def test_the_invalid_entry_of_logit_bias_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(logit_bias={"7": 1, key: value, "9": 2}).sampling(FakeDefaults())
    assert str(caught.value) == f"logit_bias: {message}"


def test_an_unsupported_field_is_refused_before_its_content_is_checked() -> None:
    for fields in (
        {"tool_choice": "any", "functions": [{}]},
        {"tool_choice": {"type": "function"}, "temperature": "hot", "functions": [{}]},
        {"messages": [{"role": "function", "content": "x"}], "functions": [{}]},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            chat(**fields)
        assert str(caught.value) == "functions: is not supported; leave it out."
    with pytest.raises(InvalidRequestError) as caught:
        chat(function_call="auto", functions=[{}], tools=None)
    assert caught.value.param == "functions"


def test_whole_numbers_written_as_floats_are_integers() -> None:
    counts: dict[str, Any] = {"n": 2.0, "top_k": 3.0, "min_tokens": 4.0, "seed": -5.0}
    body = completion([[1.0, 2], [3.0]], max_tokens=1e1, logprobs=6.0, best_of=2.0, **counts)
    assert body.prompts() == [[1, 2], [3]]
    params = completion(stop_token_ids=[7.0], max_tokens=10.0, **counts).sampling(FakeDefaults())
    assert params == SamplingParams(
        temperature=0.5, top_k=3, min_tokens=4, seed=-5, stop_token_ids=(7,), max_tokens=10
    )
    assert all(type(token_id) is int for prompt in body.prompts() for token_id in prompt)
    options = {"a": 2.0, "b": [3.0]}
    answer = chat(max_completion_tokens=5.0, top_logprobs=1.0, logprobs=True, logit_bias={"1": 2.0})
    assert answer.sampling(FakeDefaults()).max_tokens == 5
    kept = encode_call(template_options(chat(n=1.0, chat_template_kwargs=options)))
    assert str(json.loads(kept)) == str(options)  # they are not ours to change
    assert decode(b'{"tokens": [5.0, 6, 1e1]}', DetokenizeRequest).tokens == [5, 6, 10]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 2.0, "n": 1.5}, "n"),
        ({"top_k": 2.0, "n": "1"}, "n"),  # a text is no number, whatever is beside it
        ({"top_k": 2.0, "n": True}, "n"),
        ({"top_k": 2.0, "seed": 1e19}, "seed"),
        ({"top_k": 2.0, "prompt": [1.0, "2"]}, "prompt.0"),
        ({"top_k": 2.0, "prompt": [1.0, 2.5]}, "prompt.0"),
        ({"top_k": 2.0, "best_of": [1.0]}, "best_of"),
        ({"top_k": 2.0, "n": 500.0}, "n"),
        ({"top_k": 2.0, "unknown": 1}, "unknown"),
        ({"top_k": 2.0, "bad_words": ["a", 1]}, "bad_words.1"),
    ],
)
def test_an_error_beside_a_whole_float_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(
            json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest, strict=True
        ).prompts()
    assert caught.value.param == param


def test_null_beside_a_whole_float_counts_as_absent() -> None:
    body = completion(["a", "b"], top_k=2.0, n=None, seed=None, temperature=None, user="x")
    assert (body.top_k, body.n, body.prompts()) == (2, None, ["a", "b"])


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 1, "repeat_penalty": 1.0, "xtc_probability": 0, "dry_multiplier": 0.0},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"xtc_probability": 0.0, "xtc_threshold": 0.1},
        {
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["\n"],
        },
        {"return_tokens_as_token_ids": False},
    ],
)
def test_disabled_samplers_are_recognized_as_off(fields: dict[str, Any]) -> None:
    for body in (chat(**fields), completion(**fields)):
        assert body.sampling(FakeDefaults()).temperature == 0.5


def test_the_refusal_of_an_assistant_message_is_its_text() -> None:
    parts = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot."}]
    for message in (
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "refusal": "I cannot."},
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": "I cannot.", "refusal": None},
    ):
        assert template_messages(chat(messages=[message])) == [
            {"role": "assistant", "content": "I cannot."}
        ]
    for message, param in (
        ({"role": "user", "content": "a", "refusal": "b"}, "messages.0.refusal"),
        ({"role": "user", "content": parts}, "messages.0.content.1.type"),
    ):
        with pytest.raises(InvalidRequestError, match="only allowed in") as caught:
            template_messages(chat(messages=[message]))
        assert caught.value.param == param


def test_the_number_of_logprobs_of_an_answer_is_limited() -> None:
    params = SamplingParams(logprobs=20, prompt_logprobs=20)
    assert scored_room(SamplingParams(), 10**9, 1024) == MAX_INTEGER
    assert scored_room(SamplingParams(logprobs=0), 10**9, 4) == MAX_SCORES // 4
    assert scored_room(SamplingParams(logprob_token_ids=[1, 2, 3]), 9, 1) == MAX_SCORES // 4
    assert scored_room(params, 1000, 10) == (MAX_SCORES - 21_000) // 210
    assert scored_room(SamplingParams(prompt_logprobs=1), MAX_SCORES // 2, 1) == MAX_INTEGER
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_SCORES} .* 1050000") as caught:
        scored_room(params, 50_000, 1)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b'{"a":NaN}', b'{"model": "\xff"}', b"[" * 100_000, b"[]"]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(CallerError) as caught:
        decode(body, ChatRequest)
    assert caught.value.param is None


def test_null_counts_as_absent() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    params = chat(**dict.fromkeys(names)).sampling(FakeDefaults())
    assert params == SamplingParams(temperature=0.5)


def test_unknown_fields_are_refused_only_when_strict() -> None:
    body = json.dumps({"messages": HELLO, "colour": "red", "user": "me", "store": True}).encode()
    decode(body, ChatRequest)
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, ChatRequest, strict=True)
    assert caught.value.param == "colour"
    decode(body.replace(b'"colour": "red", ', b""), ChatRequest, strict=True)


def test_every_sampling_field_reaches_the_engine() -> None:
    given: dict[str, Any] = {
        "temperature": 0.1,
        "top_p": 0.2,
        "top_k": 3,
        "min_p": 0.4,
        "min_tokens": 5,
        "stop": ["x", "y"],
        "stop_token_ids": [6],
        "ignore_eos": True,
        "seed": 7,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.1,
        "skip_special_tokens": False,
    }
    params = chat(
        **given,
        logit_bias={"12": -3},
        include_stop_str_in_output=True,
        max_tokens=99,
        max_completion_tokens=50,
        logprobs=True,
        top_logprobs=4,
    ).sampling(FakeDefaults())
    expected = {**given, "stop": ("x", "y"), "stop_token_ids": (6,)}
    assert params == SamplingParams(
        **expected, logit_bias={12: -3.0}, include_stop=True, max_tokens=50, logprobs=4
    )


def test_completions_have_their_own_default_values() -> None:
    assert completion().sampling(FakeDefaults()).max_tokens == 16
    scoring = completion(max_tokens=0, echo=True).sampling(FakeDefaults())
    assert (scoring.max_tokens, scoring.logprobs, scoring.prompt_logprobs) == (0, None, 0)
    echoing = completion(echo=True, logprobs=2).sampling(FakeDefaults())
    assert (echoing.logprobs, echoing.prompt_logprobs) == (2, 2)
    assert completion(echo=True).sampling(FakeDefaults()).prompt_logprobs is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_prompts_may_be_text_tokens_or_lists_of_either(
    prompt: object, prompts: list[object]
) -> None:
    assert completion(prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], ["a", [1]], [1, [1]], ["a"] * 513])
def test_empty_mixed_or_too_many_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt, n=2).prompts()
    assert caught.value.param == "prompt"


def test_messages_are_converted_for_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
    ]
    assert template_messages(chat(messages=messages)) == [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": "onetwo"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (image(), "messages.0.content.1.type"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(
    messages: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template_messages(chat(messages=messages))
    assert caught.value.param == param


def test_template_options_are_collected_from_the_request() -> None:
    assert template_options(chat()) == {}
    asked = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    rendered = json.loads(encode_call(template_options(asked)))
    assert rendered == {"reasoning_effort": "low", "enable_thinking": False}
    with pytest.raises(InvalidRequestError) as caught:
        template_options(chat(chat_template_kwargs={"messages": []}))
    assert caught.value.param == "chat_template_kwargs"


def test_max_tokens_defaults_to_the_remaining_context() -> None:
    params = SamplingParams(max_tokens=100, min_tokens=50)
    assert fitted(params, 100) is params
    assert (fitted(params, 40).max_tokens, fitted(params, 40).min_tokens) == (40, 40)
    assert fitted(params, 0) is params
    assert fitted(SamplingParams(), 10).max_tokens is None


@pytest.mark.parametrize(
    "options",
    [
        {"host": ""},
        {"port": 65536},
        {"api_key": ("",)},
        {"api_key": ("right", "schlüssel")},
        {"api_key": "not-a-tuple"},
        {"drain_timeout": -1},
        {"drain_timeout": float("nan")},
        {"cors_origin": ("example.org",)},
        {"served_model_name": ("",)},
        {"served_model_name": ("fine", "caf\udce9")},
    ],
)
def test_invalid_server_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.param == "--" + next(iter(options)).replace("_", "-")
    for key in ("schlüssel", "not-a-tuple"):
        assert key not in str(caught.value)


def test_a_model_whose_folder_is_not_utf_8_needs_another_name() -> None:
    engine = EngineConfig(model="caf\udce9")
    with pytest.raises(ConfigError, match="--served-model-name") as caught:
        ServerProcess(engine, ServerConfig())
    assert caught.value.param == "--model"
    assert str(caught.value).isascii()
    ServerProcess(engine, ServerConfig(served_model_name=("café",)))


# -- shapes of answers ----------------------------------------------------------------------------


def job(**fields: Any) -> GenerationJob:
    defaults: dict[str, Any] = {"index": 0, "k": 0, "params": SamplingParams()}
    return GenerationJob(**{"prompt_token_ids": b"hi!", **defaults, **fields})


def reply_of(
    kind: type[ChunkedReply[Any]], job: GenerationJob, *, include_usage: bool
) -> ChunkedReply[Any]:
    return kind([job], model="m", tokenizer=FakeTokenizer(), include_usage=include_usage)


def delta(text: str, finish: FinishReason | None = None, **fields: Any) -> OutputDelta:
    ids = list(text.encode())
    return OutputDelta(ids, text, len(ids), 1, finish_reason=finish, **fields)


def events(reply: ChunkedReply[Any], *deltas: OutputDelta) -> list[Any]:
    data = b"".join(reply.choices[0].events(delta) for delta in deltas) + reply.last_events()
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize(
    ("kind", "chunk"), [(ChatReply, ChatCompletionChunk), (CompletionReply, CompletionChunk)]
)
def test_the_handwritten_delta_event_equals_the_encoded_type(
    kind: type[ChunkedReply[Any]], chunk: type[msgspec.Struct], include_usage: bool
) -> None:
    """Byte for byte: a delta of text, which is put together from parts encoded beforehand."""
    reply = kind(
        [job(index=3)], model='a "m" ""', tokenizer=FakeTokenizer(), include_usage=include_usage
    )
    (choice,) = reply.choices
    choice.events(delta("first"))
    for text in ("a", '"', '""', 'a "quoted"\nline \u2028 ü \x00', "😀", "}\n\n"):
        data = choice.events(delta(text))
        decoded: Any = msgspec.json.decode(data.removeprefix(b"data: "), type=chunk)
        assert event(decoded) == data
        (part,) = decoded.choices
        assert (part.delta.content if kind is ChatReply else part.text) == text
        assert part.index == 3


def test_chat_chunks_have_role_deltas_finish_reason_and_usage() -> None:
    reply = reply_of(ChatReply, job(index=3), include_usage=True)
    text = 'a "quoted"\nline \u2028 ü'
    chunks = events(reply, delta(text), delta(""), delta("", FinishReason.LENGTH))
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 4
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    role, content, finish, usage = chunks
    empty = {"index": 3, "logprobs": None, "finish_reason": None}
    assert role["choices"] == [{**empty, "delta": {"role": "assistant", "content": ""}}]
    assert content["choices"] == [{**empty, "delta": {"content": text}}]
    assert finish["choices"] == [{**empty, "delta": {}, "finish_reason": "length"}]
    assert [chunk["usage"] for chunk in chunks[:3]] == [None] * 3
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_chunks_mention_no_usage_unless_asked() -> None:
    reply = reply_of(ChatReply, job(), include_usage=False)
    assert all("usage" not in chunk for chunk in events(reply, delta("a", FinishReason.STOP)))


def test_held_back_text_is_sent_later_with_its_logprobs() -> None:
    scored = TokenLogprobs(ord("a"), -float("inf"), 256, ((ord("b"), -0.25),))
    reply = reply_of(ChatReply, job(params=SamplingParams(logprobs=1)), include_usage=False)
    assert reply.choices[0].events(delta("x", logprobs=[TokenLogprobs(ord("x"), -1.0, 1)])) != b""
    assert reply.choices[0].events(delta("", logprobs=[scored])) == b""
    (chunk,) = events(reply, delta("a"))
    assert chunk["choices"][0]["delta"] == {"content": "a"}
    assert chunk["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -9999.0,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": [98]}],
        }
    ]


def test_echo_scores_the_prompt_and_streams_the_same_offsets() -> None:
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    echoing = job(echo="hi!", params=params)
    deltas = [
        delta(
            "a",
            prompt_logprobs=[TokenLogprobs(id, -1.0, 1, ((id, -1.0),)) for id in b"i!"],
            logprobs=[TokenLogprobs(ord("a"), -2.0, 2, ((ord("b"), -0.5),))],
        ),
        delta("b", FinishReason.STOP, logprobs=[TokenLogprobs(ord("b"), -3.0, 7)]),
    ]
    reply = reply_of(CompletionReply, echoing, include_usage=False)
    for each in deltas:
        reply.choices[0].keep(each)
    (whole,) = json.loads(reply.whole())["choices"]
    assert whole["text"] == "hi!ab"
    assert whole["finish_reason"] == "stop"
    assert whole["logprobs"] == {
        "tokens": ["h", "i", "!", "a", "b"],
        "token_logprobs": [None, -1.0, -1.0, -2.0, -3.0],
        "top_logprobs": [None, {"i": -1.0}, {"!": -1.0}, {"b": -0.5, "a": -2.0}, {"b": -3.0}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    reply = reply_of(CompletionReply, echoing, include_usage=False)
    chunks = events(reply, *deltas)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi!ab"
    for key, values in whole["logprobs"].items():
        pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [value for piece in pieces if piece for value in piece[key]] == values
