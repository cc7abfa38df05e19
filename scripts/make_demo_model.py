"""Creates the bundled demo model: `python scripts/make_demo_model.py [FOLDER]`.

A Qwen3 of about a million parameters with a byte-level BPE tokenizer and a chat template, in the
usual Hugging Face layout. Its weights are random (seeded), so that it answers with nonsense, but
with varied nonsense: every part of the engine has real work to do. The same script, corpus and
libraries give the same files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "scripts" / "demo_corpus.txt"
VOCAB_SIZE = 2048
CONTEXT = 4096
SPECIAL_TOKENS = END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, END_ID = 0, 2  # the trainer puts the special tokens first

# Words with their leading space, single digits, punctuation, white space.
SPLIT = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        CORPUS.read_text(encoding="utf-8").splitlines(keepends=True), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.fill_(2.0)  # peaked attention, so that a wrong position or head shows
            elif "norm" in name:
                weight.fill_(1.0)
            elif "embed_tokens" in name:
                weight.normal_(generator=generator)
            else:  # strong enough that the answer depends on the prompt
                weight.normal_(std=3 * weight.shape[-1] ** -0.5, generator=generator)
    model.bfloat16()
    return model


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_model()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        eos_token_id=[END_ID, END_OF_TEXT_ID],
        pad_token_id=END_OF_TEXT_ID,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # transformers leaves it to its owner alone
    (folder / "minisgl.json").write_text(json.dumps({"demo": True, "trained": False}) + "\n")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{folder}: {num_parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "minisgl" / "assets" / "demo")
