"""Writes a tokenizer for a folder that has only a config.json, of the vocabulary size found there.

    python scripts/tools/dummy_config.py Qwen3-0.6B FOLDER
    python scripts/tools/dummy_tokenizer.py FOLDER
    minisgl serve --model FOLDER --load-format dummy

Byte-level BPE without training: the 256 bytes, then words of two letters, of three and so on, each
the merge of a shorter one and a letter. So it reads and writes any text. As in a trained
tokenizer, nearly all tokens (all but 128) are whole characters.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE = "Ġ"  # how byte-level BPE spells it
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def merges() -> Iterator[tuple[str, str]]:
    """Pairs whose first part is a letter, or what an earlier pair makes; without end."""
    words = [SPACE, *string.ascii_lowercase]
    while True:
        pairs = [(word, letter) for word in words for letter in string.ascii_lowercase]
        yield from pairs
        words = [word + letter for word, letter in pairs]


def make_tokenizer(vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - len(alphabet) - len(SPECIAL)
    if num_merges < 0:
        raise ValueError(f"vocab_size {vocab_size}: {len(alphabet) + len(SPECIAL)} is the least")
    pairs = [*islice(merges(), num_merges)]
    tokens = [*alphabet, *(first + second for first, second in pairs)]
    model = models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Raises OSError, or ValueError, where the config does not say a size or it is too small."""
    config = json.loads((folder / "config.json").read_text())
    if not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{folder / 'config.json'} has no vocab_size")
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: dummy_tokenizer.py FOLDER, with a config.json in it")
    try:
        write_tokenizer(Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(f"dummy_tokenizer.py: {error}")


if __name__ == "__main__":
    main()
