"""Writes a tokenizer for a folder that has only a config.json, of the vocabulary size found there.

    python scripts/tools/dummy_config.py Qwen3-0.6B FOLDER
    python scripts/tools/dummy_tokenizer.py FOLDER
    minisgl serve --model FOLDER --load-format dummy

Of a model that sees images (Qwen3.8-27B-vision), it writes what processes these, too.

Byte-level BPE without training: the 256 bytes, then words of two letters, of three and so on, each
the merge of a shorter one and a letter. So it reads and writes any text. As in a trained
tokenizer, nearly all tokens (all but 128) are whole characters.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE = "Ġ"  # how byte-level BPE spells it
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SEEING = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 1 << 24, "shortest_edge": 1 << 16},
}


def merges() -> Iterator[tuple[str, str]]:
    """Pairs whose first part is a letter, or what an earlier pair makes; without end."""
    words = [SPACE, *string.ascii_lowercase]
    while True:
        pairs = [(word, letter) for word in words for letter in string.ascii_lowercase]
        yield from pairs
        words = [word + letter for word, letter in pairs]


def make_tokenizer(vocab_size: int, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """special: the last tokens, which text does not spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - len(alphabet) - len(special)
    if num_merges < 0:
        raise ValueError(f"vocab_size {vocab_size}: {len(alphabet) + len(special)} is the least")
    pairs = [*islice(merges(), num_merges)]
    tokens = [*alphabet, *(first + second for first, second in pairs)]
    model = models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Raises OSError, or ValueError, where the config does not say a size or it is too small."""
    config = json.loads((folder / "config.json").read_text())
    tower = config.get("vision_config")
    vocab_size = config.get("text_config", config).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ValueError(f"{folder / 'config.json'} has no vocab_size")
    special = SPECIAL if tower is None else (*SPECIAL, *SEEING)
    make_tokenizer(vocab_size, special).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {"tokenizer_config.json": settings}
    if tower is not None:
        sizes = {name: tower[name] for name in ("patch_size", "temporal_patch_size")}
        merged = {"merge_size": tower["spatial_merge_size"]}
        files["preprocessor_config.json"] = PROCESSOR | sizes | merged
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: dummy_tokenizer.py FOLDER, with a config.json in it")
    try:
        write_tokenizer(Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(f"dummy_tokenizer.py: {error}")


if __name__ == "__main__":
    main()
