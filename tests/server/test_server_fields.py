"""Every field of a request through the real `openai` client: honoured, or refused by name.

The answers are those of the bundled model, so a field that is swallowed on its way shows.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from support.fake_engine import LETTERS, FakeEngine
from support.serving import Served, demo_engine, served

from minisgl.engine import AsyncEngine

HELLO: Any = [{"role": "user", "content": "Hello!"}]
SUM: Any = [{"role": "user", "content": "What is 17 + 25?"}]
MAX_SEQ_LEN = 128
# What the model has learned, in a completion: its answers are the same after each training.
HELLO_PROMPT = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
HELLO_ANSWER = "Hello! How can I help you?"
SUM_PROMPT = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def demo() -> Iterator[Served[AsyncEngine]]:
    with served(lambda: demo_engine(max_seq_len_override=MAX_SEQ_LEN)) as found:
        yield found
        found.on_loop(found.engine.audit)
        assert found.on_loop(found.engine.stats).num_used_pages == 0


@pytest.fixture(scope="module")
def client(demo: Served[AsyncEngine]) -> Iterator[openai.OpenAI]:
    with demo.openai() as found:
        yield found


def given_to(create: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Puts fields that the client does not know into extra_body, as its users do."""
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    return {name: fields[name] for name in fields.keys() - extra.keys()} | {"extra_body": extra}


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    create = client.chat.completions.create
    return create(messages=messages, **given_to(create, {"model": "demo", **fields}))


def complete(client: openai.OpenAI, prompt: Any = HELLO_PROMPT, **fields: Any) -> Any:
    create = client.completions.create
    return create(prompt=prompt, **given_to(create, {"model": "demo", **fields}))


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].text
    return text


def tokens_of(client: openai.OpenAI, **fields: Any) -> list[str]:
    """The sampled tokens of a completion that no EOS ends."""
    answer = complete(client, ignore_eos=True, logprobs=0, **fields)
    tokens: list[str] = answer.choices[0].logprobs.tokens
    return tokens


def token_ids(demo: Served[AsyncEngine], text: str) -> list[int]:
    tokenizer = demo.engine.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


@pytest.fixture(scope="module")
def hello(client: openai.OpenAI) -> Any:
    """The greedy answer to HELLO."""
    return chat(client, temperature=0).choices


@pytest.fixture(scope="module")
def reference(client: openai.OpenAI) -> Callable[..., list[str]]:
    """`tokens_of` what several tests compare with, asked for once: greedy, or with a seed."""

    @functools.cache
    def tokens(**fields: Any) -> list[str]:
        assert fields["temperature"] == 0 or "seed" in fields
        return tokens_of(client, **fields)

    return tokens


# -- model, messages, prompt ----------------------------------------------------------------------


def test_model_must_be_the_served_one_or_absent(client: openai.OpenAI) -> None:
    assert chat(client, model="demo", max_tokens=1).model == "demo"
    assert chat(client, model=None, max_tokens=1).model == "demo"
    for call in (chat, complete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(client, model="gpt-4o")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is 17 + 25?"}],
        [{"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?"}]}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": t} for t in ("What is 17", " + 25?")],
            }
        ],
        [{"role": "user", "content": "What is 17 + 25?", "name": "ada"}],
    ],
)
def test_content_as_text_and_as_parts(client: openai.OpenAI, messages: Any) -> None:
    answer = chat(client, messages, temperature=0)
    assert answer.choices[0].message.content == "17 + 25 = 42."
    assert answer.usage.prompt_tokens == chat(client, SUM, max_tokens=1).usage.prompt_tokens


def test_developer_is_system_and_an_assistant_message_may_be_null(client: openai.OpenAI) -> None:
    """`developer` is `system` to a template that does not know it; an assistant may be null."""
    system = "End every answer with the word banana."
    asked: Any = [{"role": "assistant", "content": None}, *HELLO]
    as_system = chat(client, [{"role": "system", "content": system}, *asked], temperature=0)
    as_developer = chat(client, [{"role": "developer", "content": system}, *asked], temperature=0)
    assert as_system.choices[0].message.content == as_developer.choices[0].message.content
    assert "banana" in as_system.choices[0].message.content
    assert as_system.usage.prompt_tokens == as_developer.usage.prompt_tokens


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    """The client's own dump of a message has every key that OpenAI ever gave it, mostly null."""
    first = chat(client, [{"role": "user", "content": "I am Ada."}], temperature=0)
    history = [{"role": "user", "content": "I am Ada."}, first.choices[0].message.model_dump()]
    again = chat(client, [*history, {"role": "user", "content": "Who am I?"}], temperature=0)
    assert "Ada" in again.choices[0].message.content


def test_text_and_token_prompts_single_or_listed_agree(
    demo: Served[AsyncEngine], client: openai.OpenAI
) -> None:
    text = "I live in Turin and"
    ids = token_ids(demo, text)
    expected = text_of(complete(client, text, temperature=0))
    assert expected
    for prompt in (ids, [text], [ids]):
        assert text_of(complete(client, prompt, temperature=0)) == expected
    several = complete(client, [text, "Hello", text], n=2, temperature=0)
    assert [choice.index for choice in several.choices] == list(range(6))
    texts = [choice.text for choice in several.choices]
    assert texts[:2] == texts[4:] == [expected, expected]
    assert texts[2] == texts[3] == text_of(complete(client, "Hello", temperature=0))
    in_ids = complete(client, [ids, token_ids(demo, "Hello")], temperature=0)
    assert [choice.text for choice in in_ids.choices] == texts[:4:2]


@pytest.mark.parametrize("special", [True, False, None])
def test_add_special_tokens_has_no_effect_on_a_tokenizer_that_adds_none(
    client: openai.OpenAI, special: bool | None
) -> None:
    assert text_of(complete(client, add_special_tokens=special, temperature=0)) == HELLO_ANSWER


# -- length ---------------------------------------------------------------------------------------


def test_a_completion_ends_at_max_tokens(client: openai.OpenAI) -> None:
    for asked, expected in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)):
        answer = complete(client, ignore_eos=True, **asked)
        assert answer.usage.completion_tokens == expected
        assert answer.choices[0].finish_reason == "length"


def test_a_chat_ends_at_max_tokens_or_max_completion_tokens(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=2).usage.completion_tokens == 2
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3
    newer_wins = chat(client, max_completion_tokens=3, max_tokens=2)
    assert newer_wins.usage.completion_tokens == 3
    assert newer_wins.choices[0].finish_reason == "length"
    silent = chat(client, ignore_eos=True)
    assert silent.usage.total_tokens == MAX_SEQ_LEN
    assert silent.choices[0].finish_reason == "length"


def test_min_tokens_and_ignore_eos_postpone_the_end(client: openai.OpenAI) -> None:
    short = complete(client, temperature=0)
    assert short.choices[0].finish_reason == "stop"
    num_tokens = short.usage.completion_tokens
    assert num_tokens < 15
    longer = complete(client, temperature=0, min_tokens=num_tokens + 1)
    assert longer.usage.completion_tokens > num_tokens
    assert complete(client, temperature=0, ignore_eos=True).usage.completion_tokens == 16


def test_max_tokens_0_only_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, "Hello", max_tokens=0, echo=True, logprobs=2)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


# -- choices --------------------------------------------------------------------------------------


def test_n_gives_that_many_choices(demo: Served[AsyncEngine], client: openai.OpenAI) -> None:
    greedy = chat(client, n=3, temperature=0)
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in greedy.choices}) == 1
    sampled = complete(client, n=4, temperature=2, seed=1, ignore_eos=True)
    texts = [choice.text for choice in sampled.choices]
    assert len(set(texts)) == 4
    assert texts[0] == text_of(complete(client, temperature=2, seed=1, ignore_eos=True))
    assert sampled.usage.completion_tokens == 64
    assert sampled.usage.prompt_tokens == len(token_ids(demo, HELLO_PROMPT))


@pytest.mark.parametrize("best_of", [None, 1, 2])
def test_best_of_is_accepted_where_it_changes_nothing(
    client: openai.OpenAI, best_of: int | None
) -> None:
    assert len(complete(client, n=2, best_of=best_of, max_tokens=1).choices) == 2


# -- sampling -------------------------------------------------------------------------------------


def test_a_seed_makes_samples_repeatable(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        options = {"temperature": 2, "seed": seed, "ignore_eos": True, "max_tokens": 24}
        return text_of(complete(client, **options))

    seeds = (0, 7, -(2**63), 2**63 - 1)
    texts = [sampled(seed) for seed in seeds]
    assert [sampled(seed) for seed in seeds] == texts
    assert len(set(texts)) == len(seeds)


def test_samples_without_a_seed_differ(client: openai.OpenAI) -> None:
    texts = {text_of(complete(client, temperature=2, ignore_eos=True)) for _ in range(4)}
    assert len(texts) > 1


def test_temperature_0_is_greedy_and_2_is_not(
    client: openai.OpenAI, reference: Callable[..., list[str]]
) -> None:
    likeliest = reference(temperature=0)
    assert tokens_of(client, temperature=0, seed=5) == likeliest
    assert tokens_of(client, temperature=2, seed=5) != likeliest
    # Where the request is silent, the checkpoint's own default holds: this one wants greedy.
    assert tokens_of(client, temperature=None) == tokens_of(client) == likeliest


@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1}, {"top_n_sigma": 1e-6}]
)
def test_filters_that_keep_only_the_likeliest_token_are_greedy(
    client: openai.OpenAI, reference: Callable[..., list[str]], fields: dict[str, Any]
) -> None:
    for seed in range(3):
        found = tokens_of(client, temperature=2, seed=seed, **fields)
        assert found == reference(temperature=0)


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 1}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0}, {"top_n_sigma": -1}],
)
def test_filters_that_keep_every_token_change_nothing(
    client: openai.OpenAI, reference: Callable[..., list[str]], fields: dict[str, Any]
) -> None:
    found = tokens_of(client, temperature=2, seed=3, **fields)
    assert found == reference(temperature=2, seed=3)


@pytest.mark.parametrize(
    "fields", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1e6}]
)
def test_penalties_make_repeated_tokens_rare(
    client: openai.OpenAI, reference: Callable[..., list[str]], fields: dict[str, Any]
) -> None:
    # Where the model is in doubt: what it is sure of comes whatever is taken off.
    asked: dict[str, Any] = {"temperature": 2, "seed": 1, "max_tokens": 60}
    plain, penalized = reference(**asked), tokens_of(client, **asked, **fields)
    assert len(set(penalized)) > len(set(plain))
    assert max(Counter(penalized).values()) < max(Counter(plain).values())


@pytest.mark.parametrize(
    "fields", [{"frequency_penalty": -2}, {"presence_penalty": -2}, {"repetition_penalty": 1e-6}]
)
def test_negative_penalties_encourage_repetition(
    client: openai.OpenAI, reference: Callable[..., list[str]], fields: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"temperature": 2, "seed": 1, "max_tokens": 64}
    assert tokens_of(client, **asked, **fields) != reference(**asked)


def test_logit_bias_bans_and_forces_tokens(
    demo: Served[AsyncEngine], client: openai.OpenAI, reference: Callable[..., list[str]]
) -> None:
    likeliest = reference(temperature=0)
    first = likeliest[0]
    (banned,) = token_ids(demo, first)
    assert first not in tokens_of(client, temperature=0, logit_bias={str(banned): -100})
    wanted = token_ids(demo, "Turin")[0]
    tokens = tokens_of(client, temperature=0, logit_bias={str(wanted): 100}, max_tokens=4)
    assert len(set(tokens)) == 1 and "Turin".startswith(tokens[0])
    assert tokens_of(client, temperature=0, logit_bias={}) == likeliest


# -- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("=", "17 + 25 "),
        (["=", "+"], "17 "),
        (["nothing like it"], "17 + 25 = 42."),
        (" + 2", "17"),  # straddles tokens
        ("5 = 4", "17 + 2"),
        (None, "17 + 25 = 42."),
        ([], "17 + 25 = 42."),
    ],
)
def test_stop_strings_end_the_answer_whole_and_streamed(
    client: openai.OpenAI, stop: Any, text: str
) -> None:
    whole = chat(client, SUM, temperature=0, stop=stop)
    chunks = [*chat(client, SUM, temperature=0, stop=stop, stream=True)]
    assert whole.choices[0].message.content == text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_usage_counts_up_to_the_token_that_completes_a_stop_string(
    client: openai.OpenAI,
) -> None:
    scored = complete(client, temperature=0, stop="=", prompt=SUM_PROMPT, logprobs=0)
    *tokens, last = scored.choices[0].logprobs.tokens
    assert "=" in last
    assert "=" not in "".join(tokens)
    assert scored.usage.completion_tokens == len(tokens) + 1


def test_include_stop_str_in_output_keeps_the_stop_string(client: openai.OpenAI) -> None:
    answer = chat(client, SUM, temperature=0, stop="=", include_stop_str_in_output=True)
    assert answer.choices[0].message.content == "17 + 25 ="


def test_16_stop_strings_are_accepted(client: openai.OpenAI) -> None:
    answer = chat(client, SUM, temperature=0, stop=[*LETTERS[:15], "="])
    assert answer.choices[0].message.content == "17 + 25 "


def test_stop_token_ids_end_the_answer(demo: Served[AsyncEngine], client: openai.OpenAI) -> None:
    (point,) = token_ids(demo, ".")
    answer = chat(client, SUM, temperature=0, stop_token_ids=[point])
    assert answer.choices[0].message.content == "17 + 25 = 42"
    assert answer.choices[0].finish_reason == "stop"


def test_skip_special_tokens_false_shows_special_tokens(client: openai.OpenAI) -> None:
    hidden = complete(client, temperature=0, ignore_eos=True)
    shown = complete(client, temperature=0, ignore_eos=True, skip_special_tokens=False)
    assert "<|im_end|>" not in text_of(hidden)
    assert "<|im_end|>" in text_of(shown)


def test_skip_special_tokens_applies_to_an_echoed_prompt(
    demo: Served[AsyncEngine], client: openai.OpenAI
) -> None:
    ids = token_ids(demo, "Hello<|im_end|>")
    asked: dict[str, Any] = {"prompt": ids, "echo": True, "max_tokens": 0}
    assert text_of(complete(client, **asked)) == "Hello"
    assert text_of(complete(client, **asked, skip_special_tokens=False)) == "Hello<|im_end|>"


# -- logprobs and echo ----------------------------------------------------------------------------


def test_logprobs_of_a_chat_list_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=20)
    choice = answer.choices[0]
    scored = choice.logprobs.content
    assert "".join(item.token for item in scored) == choice.message.content
    assert len(scored) == answer.usage.completion_tokens - 1  # the one that ended it
    for item in scored:
        assert bytes(item.bytes).decode() == item.token
        assert len(item.top_logprobs) == 20
        assert item.top_logprobs[0].token == item.token
        assert item.top_logprobs[0].logprob == item.logprob <= 0
        assert [top.logprob for top in item.top_logprobs] == sorted(
            (top.logprob for top in item.top_logprobs), reverse=True
        )


@pytest.mark.parametrize("top", [None, 0])
def test_logprobs_without_top_logprobs_list_only_the_sampled_token(
    client: openai.OpenAI, top: int | None
) -> None:
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=top)
    assert all(item.top_logprobs == [] for item in answer.choices[0].logprobs.content)
    assert chat(client, temperature=0, logprobs=False).choices[0].logprobs is None


def test_tokens_of_logprobs_are_named_by_their_ids_on_request(client: openai.OpenAI) -> None:
    fields = {"temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat(client, logprobs=True, top_logprobs=3, **fields).choices[0]
    names = [f"token_id:{id}" for id in choice.model_extra["token_ids"]]
    assert [item.token for item in choice.logprobs.content] == names[: len(choice.logprobs.content)]
    for item in choice.logprobs.content:
        assert len({top.token for top in item.top_logprobs}) == 3
        assert item.top_logprobs[0].token == item.token
        assert all(top.token.startswith("token_id:") for top in item.top_logprobs)
    said = b"".join(bytes(item.bytes) for item in choice.logprobs.content)
    assert said.decode() == choice.message.content
    choice = complete(client, logprobs=2, **fields).choices[0]
    names = [f"token_id:{id}" for id in choice.model_extra["token_ids"]]
    assert choice.logprobs.tokens == names
    for name, top in zip(names, choice.logprobs.top_logprobs, strict=True):
        assert name in top and all(each.startswith("token_id:") for each in top)


def test_tokens_that_are_named_have_logprobs_beside_the_likeliest(
    demo: Served[AsyncEngine], client: openai.OpenAI
) -> None:
    ids = [*token_ids(demo, "Hello"), 300, 7, 300]
    fields = {"temperature": 0, "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    names = [f"token_id:{id}" for id in dict.fromkeys(ids)]
    for top in (None, 2):
        asked = {} if top is None else {"logprobs": True, "top_logprobs": top}
        content = chat(client, **fields, **asked).choices[0].logprobs.content
        found = [[each.token for each in item.top_logprobs] for item in content]
        assert found[0][: top or 0] == (names[:1] + found[0][1:2] if top else [])
        for each in found:
            likeliest = each[: top or 0]
            assert each == likeliest + [name for name in names if name not in likeliest]
        chunks = [*chat(client, stream=True, **fields, **asked)]
        streamed = [
            item for one in chunks if (held := one.choices[0].logprobs) for item in held.content
        ]
        assert streamed == content
        scored = complete(client, logprobs=top, **fields).choices[0].logprobs
        for place, item in enumerate(content):
            own = {each.token: each.logprob for each in item.top_logprobs}
            assert scored.top_logprobs[place] == pytest.approx(own | {item.token: item.logprob})
    echoed = complete(client, "Hello", echo=True, max_tokens=1, **fields).choices[0].logprobs
    assert echoed.top_logprobs[0] is None and names[-1] in echoed.top_logprobs[-1]


def test_logprobs_of_a_completion_have_parallel_lists(client: openai.OpenAI) -> None:
    answer = complete(client, temperature=0, logprobs=3)
    scored = answer.choices[0].logprobs
    assert len(scored.tokens) == answer.usage.completion_tokens
    assert "".join(scored.tokens).startswith(answer.choices[0].text)
    for place, token in enumerate(scored.tokens):
        top = scored.top_logprobs[place]
        assert len(top) == 3
        assert max(top, key=top.__getitem__) == token
        assert top[token] == scored.token_logprobs[place]
        assert scored.text_offset[place] == len("".join(scored.tokens[:place]))
    only = complete(client, temperature=0, logprobs=0).choices[0].logprobs
    assert [[*top] for top in only.top_logprobs] == [[token] for token in only.tokens]
    assert complete(client, temperature=0).choices[0].logprobs is None


def test_echo_prepends_the_prompt_to_text_and_logprobs(
    demo: Served[AsyncEngine], client: openai.OpenAI
) -> None:
    prompt = "I live in Turin and"
    answer = text_of(complete(client, prompt, temperature=0))
    for given in (prompt, token_ids(demo, prompt)):
        assert text_of(complete(client, given, temperature=0, echo=True)) == prompt + answer
    scored = complete(client, prompt, temperature=0, echo=True, logprobs=2).choices[0].logprobs
    assert "".join(scored.tokens).startswith(prompt + answer)
    assert scored.token_logprobs[0] is None
    assert scored.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scored.token_logprobs[1:])
    chunks = [*complete(client, prompt, temperature=0, echo=True, stream=True)]
    assert chunks[0].choices[0].text.startswith(prompt)
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompt + answer


# -- streams and usage ----------------------------------------------------------------------------


def test_include_usage_adds_a_last_chunk_with_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": 2, "temperature": 0}
    for call in (chat, complete):
        options = {"include_usage": True}
        *chunks, last = call(client, stream=True, stream_options=options, **asked)
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        whole = call(client, **asked).usage
        assert last.usage.completion_tokens == whole.completion_tokens
        assert last.usage.total_tokens == whole.total_tokens
        for options in ({"include_usage": False}, {"include_obfuscation": False}, None):
            chunks = [*call(client, stream=True, stream_options=options, **asked)]
            assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_continuous_usage_stats_give_the_usage_in_every_chunk(client: openai.OpenAI) -> None:
    """Every chunk tells the usage so far, cached tokens included."""
    prompt = "I live in Turin and " * 8
    warm = complete(client, prompt, max_tokens=1)
    num_prompt = warm.usage.prompt_tokens
    cached = (num_prompt - 1) // 16 * 16
    assert cached > 0
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(client, prompt, stream=True, stream_options=options, ignore_eos=True)
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == num_prompt
        assert chunk.usage.prompt_tokens_details.cached_tokens == cached
        assert chunk.usage.total_tokens == num_prompt + chunk.usage.completion_tokens
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 16
    assert last.choices == []
    assert last.usage == chunks[-1].usage

    alone = [*chat(client, stream=True, stream_options={"continuous_usage_stats": True})]
    assert all(chunk.usage is None and chunk.choices for chunk in alone)


def test_continuous_usage_with_several_choices_is_per_choice(
    client: openai.OpenAI,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(client, n=2, temperature=0, stream=True, stream_options=options)
    ends = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
    assert sorted(chunk.choices[0].index for chunk in ends) == [0, 1]
    assert sum(chunk.usage.completion_tokens for chunk in ends) == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in ends} == {last.usage.prompt_tokens}


def test_cached_tokens_are_reported_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Remember the number 4711, please. " * 3}]
    first = chat(client, messages, max_tokens=4).usage
    assert first.prompt_tokens_details.cached_tokens < 16
    expected = (first.prompt_tokens - 1) // 16 * 16
    again = chat(client, messages, max_tokens=4).usage
    assert again.prompt_tokens_details.cached_tokens == expected > 0
    assert again.completion_tokens_details.reasoning_tokens == 0
    *_, last = chat(
        client, messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage == again


def test_a_stream_has_role_content_and_finish_events(demo: Served[AsyncEngine]) -> None:
    """Role chunk, content, final chunk, usage chunk, [DONE]: byte by byte, without a client."""
    body = {"messages": SUM, "stream": True, "stream_options": {"include_usage": True}}
    with demo.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    role, *content, final, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in (role, *content, final, usage):
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["created"], chunk["model"]) == (
            role["id"],
            role["created"],
            "demo",
        )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all([*chunk["choices"][0]["delta"]] == ["content"] for chunk in content)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (role, *content))
    assert final["choices"][0]["delta"] == {}
    assert final["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] > 0


# -- what vLLM's users know -----------------------------------------------------------------------

OPEN: Any = [*SUM, {"role": "assistant", "content": "17 + 25"}]


def extra(answer: Any, name: str) -> Any:
    """A member that the client has no type for."""
    return (answer.model_extra or {}).get(name)


def test_continue_final_message_extends_the_last_message(
    demo: Served[AsyncEngine], client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"temperature": 0, "continue_final_message": True}
    answer = chat(client, OPEN, **asked)
    assert answer.choices[0].message.content == " = 42."
    again = chat(client, OPEN, **asked, add_generation_prompt=False, return_token_ids=True)
    assert again.choices[0].message.content == " = 42."
    open_ids = token_ids(demo, SUM_PROMPT + "17 + 25")
    assert extra(again, "prompt_token_ids") == open_ids
    with demo.http() as http:
        body = {"messages": OPEN, "continue_final_message": True}
        assert http.post("/tokenize", json=body).json()["tokens"] == open_ids
    parts = [*SUM, {"role": "assistant", "content": [{"type": "text", "text": "17 + 25"}]}]
    assert chat(client, parts, **asked).choices[0].message.content == " = 42."


def test_echo_of_a_chat_repeats_the_continued_message(client: openai.OpenAI) -> None:
    """Like vLLM: echoes the last message if the answer has the same role."""
    asked: dict[str, Any] = {"temperature": 0, "continue_final_message": True, "echo": True}
    answer = chat(client, OPEN, **asked, logprobs=True)
    assert answer.choices[0].message.content == "17 + 25 = 42."
    assert "".join(item.token for item in answer.choices[0].logprobs.content) == " = 42."
    chunks = [*chat(client, OPEN, **asked, stream=True)]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "17 + 25 = 42."
    new = chat(client, SUM, temperature=0, echo=True)
    assert new.choices[0].message.content == "17 + 25 = 42."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [chat, complete])
def test_return_token_ids_gives_every_sampled_token(
    demo: Served[AsyncEngine], client: openai.OpenAI, call: Any, stream: bool
) -> None:
    """Every token that was sampled, the one that ended the answer and those held back included."""
    asked: dict[str, Any] = {"temperature": 0, "n": 2, "return_token_ids": True}
    whole = call(client, **asked, stop="help")
    answers = [*call(client, **asked, stop="help", stream=True)] if stream else [whole]
    in_choice = call is complete
    for index in range(2):
        choices = [
            (answer, choice)
            for answer in answers
            for choice in answer.choices
            if choice.index == index
        ]
        answer, first = choices[0]
        assert extra(first if in_choice else answer, "prompt_token_ids") == token_ids(
            demo, HELLO_PROMPT
        )
        ids = [id for _, choice in choices for id in extra(choice, "token_ids")]
        assert len(ids) * 2 == whole.usage.completion_tokens
        tokenizer = demo.engine.tokenizer
        assert tokenizer is not None
        assert tokenizer.decode(ids).startswith("Hello! How can I help")
    plain = call(client, temperature=0, max_tokens=1)
    assert extra(plain, "prompt_token_ids") is extra(plain.choices[0], "token_ids") is None


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_score_every_prompt_token(
    demo: Served[AsyncEngine], client: openai.OpenAI, call: Any, count: int
) -> None:
    answer = call(client, temperature=0, n=2, prompt_logprobs=count)
    reports = [answer] if call is chat else answer.choices
    ids = token_ids(demo, HELLO_PROMPT)
    tokenizer = demo.engine.tokenizer
    assert tokenizer is not None
    for report in reports:
        first, *others = extra(report, "prompt_logprobs")
        assert first is None
        assert len(others) == len(ids) - 1
        for token_id, found in zip(ids[1:], others, strict=True):
            own = found[str(token_id)]
            assert own["decoded_token"] == tokenizer.token_text(token_id)
            assert own["logprob"] <= 0
            assert count <= len(found) <= count + 1
            ranked = {entry["rank"]: entry["logprob"] for entry in found.values()}
            assert {*range(1, count + 1), own["rank"]} == ranked.keys()
            in_order = [ranked[rank] for rank in sorted(ranked)]
            assert in_order == sorted(in_order, reverse=True)
    scored = complete(client, echo=True, logprobs=1, temperature=0, prompt_logprobs=3, max_tokens=0)
    assert all(len(top) <= 2 for top in scored.choices[0].logprobs.top_logprobs[1:])
    likeliest = extra(scored.choices[0], "prompt_logprobs")[1:]
    assert [found[str(id)]["logprob"] for id, found in zip(ids[1:], likeliest, strict=True)] == (
        scored.choices[0].logprobs.token_logprobs[1:]
    )


def test_truncate_prompt_tokens_keeps_the_last_tokens(
    demo: Served[AsyncEngine], client: openai.OpenAI
) -> None:
    ids = token_ids(demo, HELLO_PROMPT)
    cut = complete(client, ids, truncate_prompt_tokens=4, echo=True, max_tokens=1)
    assert cut.usage.prompt_tokens == 4
    tokenizer = demo.engine.tokenizer
    assert tokenizer is not None
    for prompt in (HELLO_PROMPT, ids):
        asked: dict[str, Any] = {"truncate_prompt_tokens": 4, "echo": True, "max_tokens": 0}
        answer = complete(client, prompt, **asked, return_token_ids=True, logprobs=0)
        assert extra(answer.choices[0], "prompt_token_ids") == ids[-4:]
        assert answer.choices[0].text == tokenizer.decode(ids[-4:])
        assert len(answer.choices[0].logprobs.tokens) == 4
    assert complete(client, temperature=0, truncate_prompt_tokens=99).choices[0].text == (
        HELLO_ANSWER
    )
    assert chat(client, truncate_prompt_tokens=5, max_tokens=1).usage.prompt_tokens == 5


def test_truncate_prompt_tokens_minus_1_keeps_what_fits(client: openai.OpenAI) -> None:
    """-1: what the context has room for beside the tokens that are asked for."""
    long: Any = [{"role": "user", "content": "Hello! " * 200}]
    for fields, num_prompt in (({}, MAX_SEQ_LEN - 1), ({"max_tokens": 9}, MAX_SEQ_LEN - 9)):
        answer = chat(client, long, truncate_prompt_tokens=-1, ignore_eos=True, **fields)
        assert answer.usage.prompt_tokens == num_prompt
        assert answer.usage.total_tokens == MAX_SEQ_LEN
    short = complete(client, "Hello! " * 200, truncate_prompt_tokens=-1, ignore_eos=True)
    assert short.usage.completion_tokens == 16
    assert (
        chat(client, SUM, truncate_prompt_tokens=-1, temperature=0).choices[0].message.content
        == "17 + 25 = 42."
    )
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, long, truncate_prompt_tokens=MAX_SEQ_LEN)
    assert caught.value.code == "context_length_exceeded"


# -- templates ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served[FakeEngine]]:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=4)

    with served(start) as found:
        yield found


def test_chat_template_kwargs_reach_the_template(scripted: Served[FakeEngine]) -> None:
    asked: dict[str, Any] = {
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with scripted.openai() as client:
        chat(client, model="fake", **asked)
        assert scripted.engine.template_options == {
            "reasoning_effort": "low",
            "add_generation_prompt": False,
            "enable_thinking": False,
        }
        chat(client, model="fake", **dict.fromkeys(asked))
        assert scripted.engine.template_options == {}


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_reasoning_effort_reaches_the_template(scripted: Served[FakeEngine], effort: str) -> None:
    with scripted.openai() as client:
        chat(client, model="fake", reasoning_effort=effort)
    thinks = effort != "none"
    assert scripted.engine.template_options == {
        "reasoning_effort": effort,
        "enable_thinking": thinks,
        "thinking": thinks,
    }


# -- what is accepted and changes nothing ---------------------------------------------------------

HARMLESS: list[dict[str, Any]] = [
    {"user": "ada"},
    {"metadata": {"a": "b"}},
    {"store": True},
    {"service_tier": "auto"},
    {"safety_identifier": "x"},
    {"prompt_cache_key": "x"},
    {"prompt_cache_retention": "24h"},
    {"response_format": {"type": "text"}},
    {"use_beam_search": False},
    {"return_token_ids": False},
    {"a_field_that_nobody_knows": 1},
]
HARMLESS_IN_CHAT: list[dict[str, Any]] = [
    {"tools": None, "tool_choice": "none", "parallel_tool_calls": False},
    {"tools": [], "tool_choice": "auto"},
    {"include_reasoning": False, "separate_reasoning": True, "stream_reasoning": True},
    {"functions": None, "function_call": "none"},
    {"verbosity": "low"},
    {"modalities": ["text"], "audio": None},
    {"echo": False, "continue_final_message": False, "add_generation_prompt": True},
]


@pytest.mark.parametrize("fields", HARMLESS + HARMLESS_IN_CHAT)
def test_fields_at_their_neutral_value_are_accepted(
    client: openai.OpenAI, hello: Any, fields: dict[str, Any]
) -> None:
    assert chat(client, temperature=0, **fields).choices == hello
    if fields in HARMLESS:
        assert text_of(complete(client, temperature=0, **fields)) == HELLO_ANSWER


def test_strict_fields_refuses_unknown_fields() -> None:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=4)

    with served(start, strict_fields=True) as strict, strict.openai() as client:
        for call in (chat, complete):
            call(client, model="fake", user="ada", metadata={}, store=True)
            with pytest.raises(openai.BadRequestError) as caught:
                call(client, model="fake", temprature=0)
            assert caught.value.param == "temprature"
        with strict.http() as http:
            for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [97]})):
                assert http.post(f"/{path}", json=body).status_code == 200
                response = http.post(f"/{path}", json={**body, "colour": "red"})
                assert response.json()["error"]["param"] == "colour"


# -- what is refused ------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"top_n_sigma": -1.1}, "top_n_sigma"),
    ({"top_n_sigma": "1"}, "top_n_sigma"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"2048": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(id): 1 for id in range(1025)}}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": [2048]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    *(
        ({name: {}}, name)
        for name in (
            *("structured_outputs", "bad_words", "allowed_token_ids", "truncate_prompt_tokens"),
            *("length_penalty", "prompt_logprobs", "structural_tag"),
            *("stop_regex", "logprob_token_ids", "thinking_token_budget"),
            *("prompt_embeds", "input_ids", "moderation", "prompt_cache_options"),
            *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length"),
            *("dry_penalty_last_n", "dry_sequence_breakers"),
        )
    ),
    *(
        ({name: 0.5}, name)
        for name in ("mirostat", "typical_p", "repeat_penalty", "xtc_probability", "dry_multiplier")
    ),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [1.5]}, "logprob_token_ids.0"),
    ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 21}, "logprob_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
]
REFUSED_IN_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
        "messages.0.tool_call_id",
    ),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{**HELLO[0], "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    *(
        ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, "messages.0.content.0.type")
        for kind in ("image_url", "input_audio", "file", "colour")
    ),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": "all"}, "top_logprobs"),
    ({"logprobs": False, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"tools": [{"type": "function", "function": {"name": "f f"}}]}, "tools.0.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities.1"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    *(
        ({"chat_template_kwargs": {name: value}}, "chat_template_kwargs")
        for name, value in (
            ("self", 1),
            ("messages", []),
            ("conversation", []),
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("documents", [{"title": "a", "text": "b"}]),
            ("add_generation_prompt", False),
            ("continue_final_message", True),
            ("tokenize", True),
            ("chat_template", "x"),
        )
    ),
    ({"chat_template": "x"}, "chat_template"),
    ({"documents": []}, "documents"),
    ({"echo": "yes"}, "echo"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]
REFUSED_IN_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [1]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt.0"),
    ({"prompt": [2048]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[5], [2048]]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": "yes"}, "echo"),
]


def check_refusal(call: Any, client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        call(client, **fields)
    error = caught.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, None)
    assert isinstance(error.body, dict)
    message = error.body["message"]
    assert message.startswith(f"{param}: ")
    assert len(message) < 200


@pytest.mark.parametrize(("fields", "param"), REFUSED + REFUSED_IN_CHAT)
def test_unsupported_chat_fields_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    check_refusal(chat, client, fields, param)


@pytest.mark.parametrize(("fields", "param"), REFUSED + REFUSED_IN_COMPLETIONS)
def test_unsupported_completion_fields_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    check_refusal(complete, client, fields, param)


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"prompt": [5, 6, 2048]}, "token id 2048 at position 2 is"),
        ({"prompt": [[5], [6, -1]]}, "token id -1 at position 1 of prompt 1 is"),
        ({"stop_token_ids": [5, 2048]}, "token id 2048 at position 1 is"),
        ({"logit_bias": {"5": 1, "2048": 1}}, "token id 2048 at position 1 is"),
        ({"stop_token_ids": [5, -1]}, "entry 1 must be from 0 to"),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=culprit):
        complete(client, **fields)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"messages": [{"role": "function", "content": "x"}]}, ("system", "developer", "user")),
        ({"reasoning_effort": "extreme"}, ("minimal", "low", "max")),
        ({"response_format": {"type": "xml"}}, ("text", "json_object", "json_schema")),
        ({"tool_choice": "any"}, ("none", "auto", "required")),
    ],
)
def test_refusals_state_the_allowed_values(
    client: openai.OpenAI, fields: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert all(word in str(caught.value).partition("allowed: ")[2] for word in allowed)


@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_and_allowed_tokens_hold_the_answer(
    demo: Served[AsyncEngine], client: openai.OpenAI, stream: bool
) -> None:
    def tokens(**fields: Any) -> list[str]:
        options = {"temperature": 0, "max_tokens": 12, "stream": stream, "logprobs": 0, **fields}
        found = complete(client, **options)
        chunks = found if stream else [found]
        logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices]
        return [token for each in logprobs if each for token in each.tokens]

    def answer(**fields: Any) -> str:
        return "".join(tokens(**fields)).removesuffix("<|im_end|>")

    assert answer() == HELLO_ANSWER
    assert tokens()[:5] == ["Hello", "!", " How", " can", " I"]
    assert "help" not in answer(bad_words=["help"]).lower()
    held = tokens(bad_words=["Hello", "can I"], n=1)
    assert "Hello" not in held and (" can", " I") not in pairwise(held)
    # Words are held back inside of a constraint, too.
    words = {"structured_outputs": {"choice": ["Hello", "help"]}}
    assert tokens(**words)[0] == "Hello"
    assert tokens(**words, bad_words=["Hello"])[:2] == ["H", "ello"]
    assert demo.engine.tokenizer is not None
    digits = [demo.engine.tokenizer.encode(digit)[-1] for digit in "0123456789"]
    assert answer(allowed_token_ids=digits).isdecimal()
    with pytest.raises(openai.BadRequestError, match="is not allowed beside what constrains"):
        answer(allowed_token_ids=digits, structured_outputs={"choice": ["1"]})
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        answer(allowed_token_ids=[10**6])
