"""Small tokenizers of the two families, trained when a test needs one."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from minisgl.text.tokenizer import Tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps. ",
    "Schöne Grüße aus Köln! Ça va très bien, merci. ",
    "日本語のテキスト、中文文本。한국어 문장입니다. ",
    "Families 👨‍👩‍👧 and flags 🇩🇪 and skin 👍🏽 and e\u0301 accents. ",
    "def f(x):\n    return x + 1\n\n\tEND ",
)
BYTE_TOKENS = range(3, 259)  # of `spelled`: the id of each byte
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<s>{{ message.role }}: {{ message.content }}</s>"
    "{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<s>assistant: {{ mood }}{% endif %}"
)


def wrap(backend: Backend, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


@cache
def trained_byte_level() -> str:
    """A byte-level BPE, as JSON."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend.to_str()


@cache
def byte_level_backend() -> Backend:
    """A byte-level BPE, as in GPT-2, Llama 3 and Qwen, with tokens added."""
    backend = Backend.from_str(trained_byte_level())
    added = ("<think>", "two words", "日本", "abab")
    backend.add_tokens([AddedToken(token) for token in added])
    return backend


@cache
def spelled_backend() -> Backend:
    """As in Llama 2 and Mistral: U+2581 for a space, <0x0A> for a byte without a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    trained = json.loads(backend.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    backend = Backend(
        models.BPE(
            vocab={name: token_id for token_id, name in enumerate(names)},
            merges=[tuple(merge) for merge in trained["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(wrap(byte_level_backend()), "toy")


@cache
def spelled() -> Tokenizer:
    return Tokenizer(wrap(spelled_backend()), "toy")


@cache
def with_tokens(
    *texts: str, special: tuple[str, ...] = (), chat_template: str | None = TEMPLATE
) -> Tokenizer:
    """A byte-level one with a token for each of these texts; decoding may skip the special."""
    backend = Backend.from_str(trained_byte_level())
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return Tokenizer(wrap(backend, chat_template), "toy")
