"""Logprobs agree with the text in tokens, bytes and offsets."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_tokenizers import BYTE_TOKENS, TEXTS, byte_level, spelled

from minisgl.request import FinishReason, OutputDelta, SamplingParams, TokenLogprobs
from minisgl.server.answers.alignment import Alignment
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.apis.openai.chat_reply import ChatReply
from minisgl.server.apis.openai.chunked_reply import ChunkedReply
from minisgl.server.apis.openai.completion_reply import CompletionReply
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer

TOKENIZERS = (byte_level(), spelled())
UNKNOWN = 100_000  # an id that is no token, as in a padded vocabulary
STOP_TOKEN = 2


def scored(token_id: int, num_top: int = 0) -> TokenLogprobs:
    top = tuple((rival, -1.0 - rival) for rival in range(token_id, token_id + num_top))
    return TokenLogprobs(token_id, -1.0, 9, top)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [*itertools.chain(*lists)]


def generate(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams
) -> list[OutputDelta]:
    """The engine's deltas for these tokens, one by one; STOP_TOKEN may end the answer."""
    detokenizer = Detokenizer(
        tokenizer,
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        prompt_token_ids=prompt,
    )
    deltas = []
    for count, token_id in enumerate(ids, 1):
        stop: str | int | None = None
        if token_id in params.stop_token_ids:
            text, stop = "", token_id
        else:
            text = detokenizer.push(token_id)
            stop = detokenizer.stopped
        finish = FinishReason.STOP if stop is not None else None
        if count == len(ids) and finish is None:
            finish = FinishReason.LENGTH
        text += detokenizer.flush() if finish else ""
        delta = OutputDelta([token_id], text, count, 0, [scored(token_id, 1)])
        delta.finish_reason, delta.stop_reason = finish, stop
        deltas.append(delta)
        if finish:
            break
    return deltas


def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Merges deltas, as for a slow reader."""
    last = deltas[-1]
    return OutputDelta(
        joined(delta.token_ids for delta in deltas),
        "".join(delta.text for delta in deltas),
        last.num_output_tokens,
        0,
        joined(delta.logprobs for delta in deltas),
        joined(delta.prompt_logprobs for delta in deltas),
        last.finish_reason,
        last.stop_reason,
    )


def answers(
    kind: type[ChunkedReply[Any]],
    job: GenerationJob,
    tokenizer: Tokenizer,
    deltas: Sequence[OutputDelta],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of the whole answer, and those of the chunks."""

    def reply() -> ChunkedReply[Any]:
        return kind([job], model="m", tokenizer=tokenizer, include_usage=False)

    whole, streamed = reply(), reply()
    for delta in deltas:
        whole.choices[0].keep(delta)
    events = b"".join(streamed.choices[0].events(delta) for delta in deltas).decode()
    chunks = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n")[:-1]]
    (choice,) = json.loads(whole.whole())["choices"]
    return choice, [chunk["choices"][0] for chunk in chunks]


@st.composite
def answer(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[OutputDelta], SamplingParams]:
    """Any tokens under any options, with stop strings that are found, in deltas of any size."""
    tokenizer = draw(st.sampled_from(TOKENIZERS))
    some_id = st.integers(0, tokenizer.vocab_size - 1)
    if tokenizer.drops_first_space:
        some_id |= st.sampled_from(BYTE_TOKENS)
    some_ids = st.lists(some_id | st.just(UNKNOWN), min_size=1, max_size=8)
    words = st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text)[:6])
    ids = draw(st.lists(some_ids | words, min_size=1, max_size=4).map(joined))
    skip = draw(st.booleans())
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    stop = []
    if text and draw(st.booleans()):
        begin = draw(st.integers(0, len(text) - 1))
        stop = [text[begin : begin + draw(st.integers(1, 5))]]
    params = SamplingParams(
        logprobs=1,
        stop=stop,
        include_stop=draw(st.booleans()),
        skip_special_tokens=skip,
        stop_token_ids=draw(st.sampled_from([(), (STOP_TOKEN,)])),
    )
    prompt = draw(st.sampled_from([[1], tokenizer.encode("Hello"), [UNKNOWN]]))
    deltas = generate(tokenizer, prompt, ids, params)
    cuts = draw(st.sets(st.integers(1, len(deltas))))
    ends = sorted({*cuts, len(deltas)})
    starts = [0, *ends[:-1]]
    return (
        tokenizer,
        prompt,
        [merged(deltas[a:b]) for a, b in zip(starts, ends, strict=True)],
        params,
    )


@settings(max_examples=200, deadline=None)
@given(answer())
def test_logprobs_of_a_chat_spell_its_content(
    answer: tuple[Tokenizer, list[int], list[OutputDelta], SamplingParams],
) -> None:
    tokenizer, prompt, deltas, params = answer
    job = GenerationJob(index=0, k=0, prompt_token_ids=prompt, params=params)
    whole, chunks = answers(ChatReply, job, tokenizer, deltas)
    content = whole["message"]["content"]
    assert content == "".join(delta.text for delta in deltas)
    tokens = whole["logprobs"]["content"]
    assert all(token["bytes"] for token in tokens)
    assert "".join(token["token"] for token in tokens) == content
    data = b"".join(bytes(token["bytes"]) for token in tokens)
    assert data.decode("utf-8", "replace") == content
    if "\ufffd" not in content:
        assert data == content.encode()
    for token in tokens:
        (top,) = token["top_logprobs"]  # the sampled token itself
        assert top == {name: token[name] for name in top}
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == content
    parts = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert joined(parts) == tokens
    assert all(parts)


def drop_first_space(pieces: list[bytes], start: int, end: int) -> None:
    for place in range(start, end):
        if pieces[place]:
            pieces[place] = pieces[place].removeprefix(b" ")
            return


@settings(max_examples=200, deadline=None)
@given(answer(), st.booleans(), st.booleans())
def test_text_offsets_of_a_completion_point_into_its_text(
    answer: tuple[Tokenizer, list[int], list[OutputDelta], SamplingParams],
    echo: bool,
    prompt_is_text: bool,
) -> None:
    tokenizer, prompt, deltas, params = answer
    skip = params.skip_special_tokens
    job = GenerationJob(index=0, k=0, prompt_token_ids=prompt, params=params)
    ids = joined(delta.token_ids for delta in deltas)
    ended = isinstance(deltas[-1].stop_reason, int)
    silent = [False] * (len(ids) - ended) + [True] * ended
    if echo:
        # As a text, the prompt is without the special tokens that its encoding has.
        text = tokenizer.decode(prompt, skip_special_tokens=prompt_is_text or skip)
        job = replace(job, echo=text)
        deltas[0].prompt_logprobs = [*map(scored, prompt[1:])]
        ids = [*prompt, *ids]
        hidden = [not tokenizer.decode([id], skip_special_tokens=True) for id in prompt]
        silent = [one and (prompt_is_text or skip) for one in hidden] + silent
    whole, chunks = answers(CompletionReply, job, tokenizer, deltas)
    text, logprobs = whole["text"], whole["logprobs"]
    assert text == (job.echo or "") + "".join(delta.text for delta in deltas)
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and 0 <= offsets[0] <= offsets[-1] <= len(text)
    table = tokenizer.byte_table(skip_special_tokens=skip)
    own = [b"" if has_none else table[id] for id, has_none in zip(ids, silent, strict=True)]
    num_echoed = len(prompt) if echo else 0
    if tokenizer.drops_first_space:
        drop_first_space(own, 0, num_echoed)
        if not any(table[id] for id in prompt):
            drop_first_space(own, num_echoed, len(own))
    for data, offset in zip(own, offsets, strict=True):
        with contextlib.suppress(UnicodeDecodeError):  # a part of a character
            piece = data.decode()
            assert text[offset : offset + len(piece)] == piece[: len(text) - offset]
    for key, values in logprobs.items():
        parts = [chunk["logprobs"][key] for chunk in chunks if chunk["logprobs"]]
        assert joined(parts) == values
    assert "".join(chunk["text"] for chunk in chunks) == text


def test_an_answer_aborted_before_its_prompt_was_scored_has_empty_logprobs() -> None:
    params = SamplingParams(logprobs=0, prompt_logprobs=0)
    job = GenerationJob(index=0, k=0, prompt_token_ids=[5, 6, 7], params=params, echo="abc")
    reply = CompletionReply([job], model="m", tokenizer=byte_level(), include_usage=False)
    choice = reply.choices[0]
    choice.events(OutputDelta([], "", 0, 0, finish_reason=FinishReason.ABORT))


def chat_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], **params: Any
) -> tuple[str, list[tuple[str, bytes]]]:
    asked = SamplingParams(logprobs=0, **params)
    job = GenerationJob(index=0, k=0, prompt_token_ids=[0], params=asked)
    whole, _ = answers(ChatReply, job, tokenizer, generate(tokenizer, [0], ids, asked))
    tokens = whole["logprobs"]["content"]
    return whole["message"]["content"], [(one["token"], bytes(one["bytes"])) for one in tokens]


def ids_of(tokenizer: Tokenizer, *pieces: bytes) -> list[int]:
    found = {tokenizer.token_bytes(id): id for id in reversed(range(tokenizer.vocab_size))}
    return [found[piece] for piece in pieces]


def test_a_token_cut_by_a_stop_string_is_listed_with_its_remaining_text() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, b"x", b"two words", b"</s>", b".")
    assert chat_tokens(tokenizer, ids, stop="o word") == ("xtw", [("x", b"x"), ("tw", b"tw")])
    content, tokens = chat_tokens(tokenizer, ids, stop="o word", include_stop=True)
    assert (content, tokens[1]) == ("xtwo word", ("two word", b"two word"))
    assert chat_tokens(tokenizer, ids, stop="xtwo")[1] == []


def test_special_tokens_are_in_the_logprobs_if_they_are_in_the_content() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, b"x", b"</s>", b".", b"<s>")
    assert chat_tokens(tokenizer, ids)[1] == [("x", b"x"), (".", b".")]
    shown = chat_tokens(tokenizer, ids, skip_special_tokens=False)
    assert shown == ("x</s>.<s>", [(t, t.encode()) for t in ("x", "</s>", ".", "<s>")])
    # The token that ends the answer is in no content.
    stop_token_ids = ids[-1:]
    ended = chat_tokens(tokenizer, ids, skip_special_tokens=False, stop_token_ids=stop_token_ids)
    assert [name for name, _ in ended[1]] == ["x", "</s>", "."]


def test_a_character_is_listed_with_the_token_that_completes_it() -> None:
    tokenizer = spelled()
    parts = [bytes([byte]) for byte in "👍".encode()]
    ids = ids_of(tokenizer, b" fox", *parts, b"a")
    content, tokens = chat_tokens(tokenizer, ids)
    assert content == "fox👍a"
    assert tokens == [
        ("fox", b"fox"),
        *(("", part) for part in parts[:3]),
        ("👍", parts[3]),
        ("a", b"a"),
    ]
    # The limit falls into the character.
    content, tokens = chat_tokens(tokenizer, ids[:3])
    assert content == "fox\ufffd"
    assert tokens == [("fox", b"fox"), ("", parts[0]), ("\ufffd", parts[1])]
    # It breaks off.
    content, tokens = chat_tokens(tokenizer, [*ids[:2], *ids_of(tokenizer, b"a")])
    assert (content, tokens[1:]) == ("fox\ufffda", [("\ufffd", parts[0]), ("a", b"a")])


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "spelled"])
@pytest.mark.parametrize("token_id", [3, 130, 190, 240])
def test_the_requested_number_of_top_logprobs_is_given(tokenizer: Tokenizer, token_id: int) -> None:
    """Bytes of characters, tokens with the same text and ids without one do not fall together."""
    same = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"e"]
    assert len(same) == (2 if tokenizer.drops_first_space else 1)
    some = [*same, UNKNOWN, UNKNOWN + 1, *range(token_id, token_id + 20)]
    rivals = [*dict.fromkeys(some)][:20]
    top = tuple((id, -float(place)) for place, id in enumerate(rivals))
    for sampled, num_given in ((rivals[3], 20), (ids_of(tokenizer, b"x")[0], 21)):
        logprobs = [TokenLogprobs(sampled, -0.5, 9, top)]
        delta = OutputDelta([sampled], "x", 1, 0, logprobs, [], FinishReason.LENGTH)
        job = GenerationJob(index=0, k=0, prompt_token_ids=[0], params=SamplingParams(logprobs=20))
        whole, _ = answers(CompletionReply, job, tokenizer, [delta])
        (given_top,) = whole["logprobs"]["top_logprobs"]
        assert len(given_top) == num_given
        assert given_top[whole["logprobs"]["tokens"][0]] == -0.5
        assert sorted(given_top.values(), reverse=True) == sorted(
            [*(logprob for id, logprob in top if id != sampled), -0.5], reverse=True
        )
    parts = ids_of(tokenizer, b"\xf0")
    logprobs = [TokenLogprobs(parts[0], -0.5, 1)]
    delta = OutputDelta(parts, "\ufffd", 1, 0, logprobs, [], FinishReason.LENGTH)
    whole, _ = answers(CompletionReply, job, tokenizer, [delta])
    assert whole["logprobs"]["tokens"] == ["bytes:\\xf0"]


@pytest.mark.parametrize("pieces", [[b"\xed", b"\xa0"], [b"\xed", b"\xa0", b"a"], [b"\xed\xa0"]])
def test_half_of_a_surrogate_pair_is_no_character(pieces: list[bytes]) -> None:
    """The decoder waits for a third byte, though no character has these two."""
    text = b"".join(pieces).decode("utf-8", "replace")
    alignment = Alignment()
    for index, data in enumerate(pieces):
        alignment.add(TokenLogprobs(index, -1.0, 1), data)
    shown = alignment.show(text, finished=True)
    assert [token.data for token in shown] == pieces
    assert "".join(token.text for token in shown) == text
