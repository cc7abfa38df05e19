"""Small random checkpoints that embed or rerank, and what transformers computes from them.

The rules are those that sentence-transformers and the cards of the models publish; they are written
down here a second time, on whole prompts without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import load_reference, make_checkpoint, spec_named
from support.toy_tokenizers import byte_level_backend
from tokenizers import AddedToken, processors
from torch import Tensor
from transformers import AutoModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
QUERY = "Instruct: Find it\nQuery:"
CARD_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
CARD_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def save_tokenizer(folder: Path, *, appends_end: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with the tokens of Qwen3, which may append the end token."""
    backend = type(byte_level_backend()).from_str(byte_level_backend().to_str())
    backend.add_special_tokens([AddedToken(END, special=True)])
    backend.add_tokens(["yes", "no", "<|im_start|>", "<|im_end|>"])
    if appends_end:
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, backend.token_to_id(END))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=END)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_modules(
    folder: Path,
    mode: str,
    *,
    normalize: bool = True,
    include_prompt: bool = True,
    default_prompt: str | None = None,
) -> None:
    """The files of sentence-transformers."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds[: 2 + normalize])
    ]
    flags = {"lasttoken": False, "mean_tokens": False, "cls_token": False, mode: True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _write(folder / "modules.json", modules)
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": 128,
            **{f"pooling_mode_{name}": value for name, value in flags.items()},
            "include_prompt": include_prompt,
        },
    )
    prompts = {"query": QUERY, "document": ""}
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": default_prompt},
    )


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def make_pooled(name: str, folder: Path, *, bare: bool = False, appends_end: bool = True) -> Path:
    """A checkpoint of the spec of this name with a tokenizer. bare: saved without its head."""
    make_checkpoint(replace(spec_named(name), vocab_size=512), folder)
    if bare:
        body = AutoModel.from_pretrained(folder, dtype=torch.float32)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        body.save_pretrained(folder)
    save_tokenizer(folder, appends_end=appends_end)
    return folder


@torch.inference_mode()
def hidden_states(folder: Path, token_ids: Sequence[int]) -> Tensor:
    """After the last norm: [len(token_ids), hidden_size]."""
    body = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: Tensor = body(torch.tensor([list(token_ids)]), use_cache=False).last_hidden_state
    return found[0]


def pooled(
    rows: Tensor,
    mode: str,
    *,
    first: int = 0,
    dimensions: int | None = None,
    normalize: bool = True,
) -> Tensor:
    """As Pooling and Normalize of sentence-transformers, and its `truncate_dim`."""
    modes: Mapping[str, Any] = {
        "lasttoken": lambda: rows[-1],
        "mean_tokens": lambda: rows[first:].mean(0),
        "cls_token": lambda: rows[0],
    }
    vector: Tensor = modes[mode]()[:dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if normalize else vector


@torch.inference_mode()
def card_score(folder: Path, tokenizer: Any, query: str, document: str, instruction: str) -> float:
    """As the card of Qwen3-Reranker computes it."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    token_ids = encode(CARD_BEFORE) + encode(body) + encode(CARD_AFTER)
    logits = load_reference(folder)(torch.tensor([token_ids])).logits[0, -1]
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    score = torch.nn.functional.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)
    return float(score[1].exp())
