"""Small tokenizers of the two families that checkpoints bring."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello, hello world! 123 456",
    "中文字符测试，你好世界。こんにちは 한국어 Привет мир",
    "naïve café e\u0301 👩‍👩‍👧‍👦 🇦🇹 👍🏽 emoji   spaces\n\nlines\ttabs",
]
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@cache
def byte_level(chat_template: str | None = CHATML) -> Tokenizer:
    """As Llama 3 and Qwen: BPE over bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("a word", normalized=False)])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="</s>", chat_template=chat_template
        )
    )


@cache
def byte_fallback() -> Tokenizer:
    """As Mistral: sentencepiece's spaces, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz,.", "\u2581t", "he", "\u2581the", "é", "中"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
