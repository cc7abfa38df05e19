"""The demo model's tokenizer: byte-level BPE with single digits, and the chat template."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo_model.conversation import conversation
from demo_model.data import MAX_TOKENS
from demo_model.world import World

VOCAB_SIZE = 2048
NUM_CONVERSATIONS = 20_000
# The trainer assigns them the first ids; demo_model/data.py uses these.
SPECIAL_TOKENS = END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Tags of calls, words with their leading space, single digits, punctuation, white space.
SPLIT = Regex(r"</?tool_call>| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")

# A line for each tool; calls as in the format of Hermes.
CHAT_TEMPLATE = (
    f"{{% if tools %}}{START}tools"
    "{% for tool in tools %}{% set it = tool.function %}{% set its = it.parameters or {} %}"
    "{{ '\\n' ~ it.name }}("
    "{% for key, value in (its.properties or {}).items() %}"
    "{{ ', ' if not loop.first }}{{ key }}{{ '?' if key not in (its.required or its.properties) }}"
    ": {{ value.type or 'any' }}"
    "{% endfor %}): {{ it.description }}"
    f"{{% endfor %}}{END}\n{{% endif %}}"
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] or '' }}}}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    f"{{% endfor %}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)


def make_tokenizer(folder: Path, seed: int = 0) -> None:
    """Train a tokenizer on generated conversations, and write its files into `folder`."""
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
    tokenizer.train_from_iterator(_texts(seed), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _texts(seed: int) -> Iterator[str]:
    world = World(random.Random(seed))
    for _ in range(NUM_CONVERSATIONS):
        for message in conversation(world).messages():
            yield f"{message['role']}\n{message['content']}"
