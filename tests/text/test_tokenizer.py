"""The tokenizer against the library that it wraps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy_tokenizers import (
    BYTE_TOKENS,
    TEXTS,
    byte_level,
    byte_level_backend,
    spelled,
    spelled_backend,
    wrap,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from minisgl.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.text.rendering import render
from minisgl.text.tokenizer import ADDED_TOKENS, MAX_SHORT_CHARS, Tokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))


@pytest.fixture(params=[byte_level, spelled], ids=["byte-level", "spelled"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.param()
    return made


def with_decoder(backend: Backend, decoder: decoders.Decoder | None) -> Tokenizer:
    changed = Backend.from_str(backend.to_str())
    changed.decoder = decoder
    return Tokenizer(wrap(changed), "toy")


# -- ids and text ---------------------------------------------------------------------------------


@given(UNICODE)
def test_any_text_survives_both_ways(text: str) -> None:
    for tokenizer in (byte_level(), spelled()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.data())
def test_byte_level_decoding_equals_the_library_for_any_ids(data: st.DataObject) -> None:
    backend = byte_level_backend()
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 5)))
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert byte_level().decode(ids, skip_special_tokens=skip) == expected


def test_byte_level_decoding_equals_the_library_for_every_kind_of_broken_utf8() -> None:
    """Each pair and triple of bytes at the borders of what RFC 3629 allows."""
    backend, tokenizer = byte_level_backend(), byte_level()
    borders = (0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF)
    leads = (0xF0, 0xF1, 0xF4, 0xF5, 0xFF)
    id_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [id_of[bytes([byte])] for byte in borders + leads]
    for first in ids:
        for second in ids:
            for third in ids:
                broken = [first, second, third, ids[0]]
                assert tokenizer.decode(broken) == backend.decode(broken)


@given(st.data())
def test_spelled_decoding_equals_the_library_where_the_bytes_are_utf8(data: st.DataObject) -> None:
    backend, tokenizer = spelled_backend(), spelled()
    words = st.lists(st.integers(BYTE_TOKENS.stop, backend.get_vocab_size() + 5)) | UNICODE.map(
        lambda text: tokenizer.encode(text)
    )
    ids = [token_id for word in data.draw(st.lists(words)) for token_id in word]
    assert tokenizer.decode(ids) == backend.decode(ids)


def test_an_invalid_byte_does_not_change_adjacent_characters() -> None:
    data = "日".encode() + b"\xff" + "本".encode()[:2]
    ids = [BYTE_TOKENS[byte] for byte in data]
    assert spelled().decode(ids) == "日\ufffd\ufffd"


def test_encoding_equals_that_of_transformers(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.encode(text) == tokenizer._tokenizer(text)["input_ids"]
    assert tokenizer.encode("") == tokenizer._tokenizer("")["input_ids"]


def test_special_tokens_of_the_post_processor_can_be_left_out() -> None:
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(wrap(backend))
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [tokenizer.bos_token_id, *plain]
    assert tokenizer.chat(HELLO) == byte_level().chat(HELLO)  # the template writes its own


def test_truncation_and_padding_of_the_file_are_disabled() -> None:
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=99)
    assert Tokenizer(wrap(backend)).encode(TEXTS[0]) == byte_level().encode(TEXTS[0])


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        tokenizer.encode("half of \ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        tokenizer.chat([{"role": "user", "content": "half of \ud83d"}])
    assert caught.value.param == "messages"


def test_a_token_has_exact_bytes_and_a_readable_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日 né", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).strip() == "日 né".encode()
    assert tokenizer.token_text(tokenizer.encode("日a")[-1]) == "a"
    assert tokenizer.token_bytes(tokenizer.eos_token_id or 0) == b"</s>"
    for unknown in (tokenizer.vocab_size, 2**32, 2**80, -1):
        assert tokenizer.token_bytes(unknown) == b""
        assert tokenizer.token_text(unknown) == tokenizer.decode([unknown]) == ""


def test_part_of_a_character_decodes_to_a_replacement_character() -> None:
    assert spelled().token_text(BYTE_TOKENS[0x0A]) == "\n"
    assert spelled().token_text(BYTE_TOKENS[0xE6]) == "\ufffd"


def test_added_tokens_decode_as_written_and_only_special_ones_are_skipped() -> None:
    text = "<s><think>two words日本</s>"
    ids = byte_level().encode(text)
    assert len(ids) == 5
    assert byte_level().decode(ids, skip_special_tokens=False) == text
    assert byte_level().decode(ids) == "<think>two words日本"


def test_only_one_leading_space_is_dropped() -> None:
    assert spelled().decode(spelled().encode("  two")) == "  two"
    assert spelled().decode([*spelled().encode("a"), *spelled().encode("b")]) == "a b"


def test_vocab_size_special_tokens_and_chat_template_are_reported(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer._tokenizer)
    assert tokenizer.token_bytes(tokenizer.bos_token_id or 0) == b"<s>"
    assert tokenizer.eos_token_id == tokenizer.encode("</s>")[-1]
    assert tokenizer.has_chat_template


# -- decoders -------------------------------------------------------------------------------------


def test_a_metaspace_decoder_is_supported() -> None:
    for scheme, text in (("always", "a b"), ("first", "a b"), ("never", " a b")):
        decoder = decoders.Metaspace(prepend_scheme=scheme)
        assert with_decoder(spelled_backend(), decoder).decode(spelled().encode("a b")) == text


def test_a_decoder_without_byte_fallback_shows_byte_tokens_as_text() -> None:
    tokenizer = with_decoder(spelled_backend(), decoders.Replace("▁", " "))
    assert tokenizer.decode(tokenizer.encode("\n")) == " <0x0A>"


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Strip("x", 1, 0)])]
)
def test_a_decoder_that_cannot_be_computed_from_bytes_is_refused(
    decoder: decoders.Decoder | None,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^toy: the tokenizer.*decoder"):
        with_decoder(spelled_backend(), decoder)


# -- chat -----------------------------------------------------------------------------------------


def chat_text(messages: list[dict[str, Any]], **options: Any) -> str:
    return byte_level().decode(byte_level().chat(messages, **options), skip_special_tokens=False)


HELLO = [{"role": "user", "content": "Hello!"}]


def test_chat_renders_the_template_and_adds_no_special_tokens_of_its_own() -> None:
    assert chat_text(HELLO) == "<s>user: Hello!</s><s>assistant: "
    assert chat_text(HELLO, add_generation_prompt=False) == "<s>user: Hello!</s>"


def test_template_options_reach_the_template() -> None:
    assert chat_text(HELLO, mood="Gladly").endswith("assistant: Gladly")
    assert "1 tools" in chat_text(HELLO, tools=[{"type": "function"}])
    open_ended = chat_text(HELLO, add_generation_prompt=False, continue_final_message=True)
    assert open_ended == "<s>user: Hello!"


@pytest.mark.parametrize("option", ["chat_template", "tokenize", "return_tensors", "conversation"])
def test_reserved_template_options_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: "{{ 1 }}"}
    with pytest.raises(InvalidRequestError, match=f"{option} cannot be set") as caught:
        byte_level().chat(HELLO, **options)
    assert caught.value.param == "chat_template_kwargs"


def test_text_content_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    assert chat_text([{"role": "user", "content": parts}]) == chat_text(HELLO)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "type image_url is not supported"),
        ({"type": "text"}, "type text is not supported|content part"),
        ("Hello!", "content part"),
    ],
)
def test_content_parts_other_than_text_are_refused(part: object, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        byte_level().chat([{"role": "user", "content": [part]}])


def test_the_developer_role_becomes_system_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert chat_text([message]).startswith("<s>system: Be brief.</s>")
    template = "{% for m in messages %}{{ m.role }}{% endfor %}{# developer #}"
    knowing = Tokenizer(wrap(byte_level_backend(), template))
    assert knowing.decode(knowing.chat([message])) == "developer"
    assert message["role"] == "developer"


def test_the_error_message_of_a_template_is_reported() -> None:
    with pytest.raises(InvalidRequestError, match=r"refuses them: no role tool$") as caught:
        byte_level().chat([{"role": "tool", "content": "42"}])
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match=r"must not be empty"):
        byte_level().chat([])


def test_a_message_that_cannot_be_continued_is_refused_without_quoting_it() -> None:
    assert chat_text(HELLO, continue_final_message=True) == "<s>user: Hello!"
    assert chat_text(HELLO, continue_final_message=False).endswith("</s><s>assistant: ")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt: true") as caught:
        chat_text(HELLO, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"
    forgetful = Tokenizer(wrap(byte_level_backend(), "{{ messages[0].content[:3] }}"))
    with pytest.raises(InvalidRequestError, match="changes the end") as caught:
        forgetful.chat(HELLO, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    assert "Hel" not in str(caught.value) and caught.value.__cause__ is None


def test_the_template_of_a_processor_is_taken_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    wrap(byte_level_backend(), None).save_pretrained(tmp_path)
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.chat(HELLO)) == "Hello!"
    assert Tokenizer.load(tmp_path, chat_template="own").chat_template_text == "own"
    for text in ("", "[]", "{}", '{"chat_template": 1}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"chat_template\.json cannot be read"):
            Tokenizer.load(tmp_path)
    wrap(byte_level_backend()).save_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).chat(HELLO) == byte_level().chat(HELLO)


def test_control_tokens_of_the_template_are_told_from_those_of_texts() -> None:
    template = "<s>{{ messages[0].content }}<think>{{ messages[0].content }}"
    tokenizer = Tokenizer(wrap(byte_level_backend(), template))
    for text, signed in (("no", False), ("a <think> b", True)):
        call = tokenizer.template_call([{"role": "user", "content": text}])
        rendered = render(call)
        assert rendered.startswith("<s>") != signed
        assert tokenizer.count_control(rendered, "<think>") == 1
        around = tokenizer.surround_control(rendered, "<think>", "(", ")")
        expected = f"<s>{text}(<think>){text}"
        assert tokenizer.decode(tokenizer.encode(around), skip_special_tokens=False) == expected
        assert tokenizer.opening(rendered) == []


def test_a_text_begins_as_a_processor_of_transformers_lets_it() -> None:
    backend = Backend.from_str(byte_level_backend().to_str())
    first = backend.token_to_id("<s>")
    assert first is not None
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    for post_processor, expected in ((begin, [first]), (None, [])):
        if post_processor is not None:
            backend.post_processor = post_processor
        else:
            backend = Backend.from_str(byte_level_backend().to_str())
        tokenizer = Tokenizer(wrap(backend))
        for text in ("Hello", "a <s> b"):
            assert tokenizer.opening(text) == expected
        assert tokenizer.opening("<s>Hello") == []


def test_a_model_without_a_chat_template_is_refused() -> None:
    tokenizer = Tokenizer(wrap(byte_level_backend(), None), "base-model")
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match=r"base-model has no chat .*/v1/completions"):
        tokenizer.chat(HELLO)


# -- threads and files ----------------------------------------------------------------------------


def test_concurrent_threads_get_the_same_results(tokenizer: Tokenizer) -> None:
    def work(index: int) -> tuple[list[int], list[int], str]:
        text = TEXTS[index % len(TEXTS)] * 20
        ids = tokenizer.encode(text)
        return ids, tokenizer.chat([{"role": "user", "content": text}]), tokenizer.decode(ids)

    expected = [work(index) for index in range(len(TEXTS))]
    with ThreadPoolExecutor(8) as pool:
        for index, got in enumerate(pool.map(work, range(100))):
            assert got == expected[index % len(TEXTS)]


class WatchedBackend:
    """Counts the calls that have begun and ended."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_begun = self.num_ended = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.num_begun += 1
            try:
                return method(*arguments, **options)
            finally:
                self.num_ended += 1

        return counted


@pytest.mark.parametrize("way", ["encode", "chat"])
def test_other_threads_run_while_a_long_text_is_tokenized(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GIL is released, so that the event loop can serve other requests."""
    tokenizer = byte_level()
    text = "Hello, you! " * 50_000
    library = WatchedBackend(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", library)
    with ThreadPoolExecutor(1) as pool:
        if way == "encode":
            running = pool.submit(tokenizer.encode, text)
        else:
            running = pool.submit(tokenizer.chat, [{"role": "user", "content": text}])
        turns: Counter[int] = Counter()  # of this thread, by the call during which it had them
        while not running.done():
            time.sleep(1e-3)
            if library.num_begun > library.num_ended:
                turns[library.num_begun] += 1
    # Hundreds; a call that keeps the GIL leaves a few of them, when it begins and ends.
    assert max(turns.values()) > 20


def test_a_long_text_has_the_tokens_of_the_library() -> None:
    backend = byte_level_backend()
    for length in (MAX_SHORT_CHARS, MAX_SHORT_CHARS + 1):
        for text in TEXTS:
            long = (text * length)[:length]
            assert byte_level().encode(long) == backend.encode(long).ids
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level().encode("a" * MAX_SHORT_CHARS + "\ud800")


def test_load_reads_what_was_saved(tmp_path: Path) -> None:
    assert not Tokenizer.found_in(tmp_path)
    wrap(spelled_backend()).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert Tokenizer.found_in(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == spelled().encode(text)
    assert tokenizer.chat(HELLO) == spelled().chat(HELLO)
    assert tokenizer.drops_first_space


def test_load_explains_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_importing_the_modules_does_not_import_torch() -> None:
    code = "import sys, minisgl.text.detokenizer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ADDED_TOKENS)
@pytest.mark.parametrize("text", ["[]", "null", "5"])
def test_a_file_that_is_no_object_is_refused_in_words(tmp_path: Path, name: str, text: str) -> None:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: it is no JSON object\.$"):
        Tokenizer.load(folder)
