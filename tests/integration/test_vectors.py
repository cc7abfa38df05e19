"""Vectors and scores equal those of transformers with the published rules, whatever shares their
steps, chunks and pages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.forked_ranks import forked_ranks
from support.pooled_checkpoints import (
    END,
    QUERY,
    WEB_SEARCH,
    card_score,
    hidden_states,
    make_pooled,
    pooled,
    save_modules,
)
from torch import Tensor
from transformers import AutoTokenizer

from minisgl import LLM
from minisgl.errors import ConfigError, ContextLengthError, InvalidRequestError
from minisgl.models.pooling import EmbeddingRules
from minisgl.pooling import PooledRows

TOLERANCE = 1e-5
MODES = ("lasttoken", "mean_tokens", "cls_token")
TEXTS = [
    "The quick brown fox",
    "jumps over the lazy dog, and then it sleeps",
    "Schöne Grüße aus Köln! " * 6,
    "The quick brown fox jumps over the lazy dog, and " * 5,
    "a",
]
FOLDER = TemporaryDirectory()
CHUNKED = {"max_prefill_length": 7, "page_size": 4}


@cache
def checkpoint(name: str, mode: str = "", appends_end: bool = True, bare: bool = False) -> Path:
    folder = Path(FOLDER.name) / f"{name}-{mode}-{appends_end}-{bare}"
    folder.mkdir(exist_ok=True)
    make_pooled(name, folder, appends_end=appends_end, bare=bare)
    if mode:
        save_modules(folder, mode)
    return folder


@cache
def token_ids_of(folder: Path, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(folder).encode(text)
    return ids


@cache
def expected(folder: Path, mode: str, text: str, dimensions: int | None = None) -> Tensor:
    return pooled(hidden_states(folder, token_ids_of(folder, text)), mode, dimensions=dimensions)


def loaded(folder: Path, **options: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "num_pages": 513, "page_size": 16, **options}
    with forked_ranks() if "tp" in options else nullcontext():
        return LLM(str(folder), **options)


def vectors(llm: LLM, texts: list[str], **options: Any) -> Tensor:
    return torch.tensor([each.vector for each in llm.embed(texts, **options)])


def check_texts(llm: LLM, folder: Path, mode: str) -> None:
    wanted = torch.stack([expected(folder, mode, text) for text in TEXTS])
    alone = torch.cat([vectors(llm, [text]) for text in TEXTS])
    torch.testing.assert_close(alone, wanted, atol=TOLERANCE, rtol=0)
    company = vectors(llm, TEXTS * 2)
    torch.testing.assert_close(company, wanted.repeat(2, 1), atol=TOLERANCE, rtol=0)
    llm._wait_for(_audit(llm))


async def _audit(llm: LLM) -> None:
    llm.engine.audit()
    stats = llm.engine.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["whole", "in-chunks"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "bare"), [("qwen3", True), ("llama", True), ("mistral", False)], ids=str
)
def test_vectors_are_those_of_transformers(
    name: str, bare: bool, mode: str, options: dict[str, Any]
) -> None:
    folder = checkpoint(name, mode, bare=bare)
    with loaded(folder, **options) as llm:
        assert llm.engine.config.task == "embed"
        check_texts(llm, folder, mode)
        cached = llm.embed(TEXTS[3])[0].num_cached_tokens
        assert (cached > 0) == (mode == "lasttoken")
        if mode != "lasttoken":  # no page can be matched again
            assert llm.engine.stats().num_cached_pages == 0
        else:
            [again] = vectors(llm, [TEXTS[3]])
            torch.testing.assert_close(again, expected(folder, mode, TEXTS[3]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["native", "adopted"])
def test_adopted_models_and_ranks_give_the_same_vectors(impl: str) -> None:
    folder = checkpoint("llama", "lasttoken", bare=True)
    with loaded(folder, model_impl=impl, tp=2) as llm:
        check_texts(llm, folder, "lasttoken")


@pytest.mark.parametrize("appends_end", [True, False])
def test_the_end_token_is_there_once_and_stays_when_a_text_is_cut(appends_end: bool) -> None:
    folder = checkpoint("qwen3", "lasttoken", appends_end)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    ids = [*tokenizer.encode(TEXTS[2], add_special_tokens=False), end]
    with loaded(folder) as llm:
        [whole] = llm.embed(TEXTS[2])
        [cut] = llm.embed(TEXTS[2], truncate_prompt_tokens=9)
        [given] = llm.embed([ids])  # token ids are taken as they are
    assert whole.num_prompt_tokens == len(ids)
    assert cut.num_prompt_tokens == 9
    for found, prompt in ((whole, ids), (given, ids), (cut, [*ids[:8], end])):
        wanted = pooled(hidden_states(folder, prompt), "lasttoken")
        torch.testing.assert_close(torch.tensor(found.vector), wanted, atol=TOLERANCE, rtol=0)


def test_prompts_instructions_and_dimensions_are_those_of_the_checkpoint() -> None:
    folder = checkpoint("qwen3", "lasttoken")
    asked = QUERY + TEXTS[0]
    with loaded(folder) as llm:
        named = vectors(llm, [TEXTS[0]], prompt_name="query")[0]
        instructed = vectors(llm, [TEXTS[0]], instruction="Find it", dimensions=16)[0]
        for options in (
            {"prompt_name": "none"},
            {"prompt_name": "query", "instruction": "both"},
            {"dimensions": 0},
            {"dimensions": 129},
            {"truncate_prompt_tokens": 1},
        ):
            with pytest.raises(InvalidRequestError):
                llm.embed(TEXTS[0], **options)
        with pytest.raises(ContextLengthError):
            llm.embed("a b " * 600)
        with pytest.raises(InvalidRequestError, match="--task embed; this needs generate"):
            llm.generate("a")
        with pytest.raises(InvalidRequestError, match="--task embed; this needs rerank"):
            llm.rerank("a", ["b"])
    torch.testing.assert_close(named, expected(folder, "lasttoken", asked), atol=1e-5, rtol=0)
    wanted = expected(folder, "lasttoken", asked, 16)
    torch.testing.assert_close(instructed, wanted, atol=1e-5, rtol=0)
    assert abs(float(instructed.norm()) - 1) < 1e-5


def test_a_mean_may_leave_out_the_prompt_and_a_vector_may_have_any_length(tmp_path: Path) -> None:
    make_pooled("llama", tmp_path)
    save_modules(
        tmp_path, "mean_tokens", normalize=False, include_prompt=False, default_prompt="query"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(QUERY + TEXTS[1])
    first = len(tokenizer.encode(QUERY, add_special_tokens=False))
    wanted = pooled(hidden_states(tmp_path, ids), "mean_tokens", first=first, normalize=False)
    for options in ({}, CHUNKED):
        with loaded(tmp_path, **options) as llm:
            found = vectors(llm, [TEXTS[1]])[0]
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


DOCUMENTS = ["It sleeps.", "The fox jumps over the lazy dog.", "def f(x):\n    return x + 1", "no"]


@pytest.mark.parametrize(
    "options",
    [{}, CHUNKED, {"tp": 2}, {"tp": 2, "dp_attention": True}, {"model_impl": "adopted"}],
    ids=str,
)
def test_scores_are_those_of_the_card(options: dict[str, Any]) -> None:
    folder = checkpoint("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    query = "What does the dog do?"
    wanted = torch.tensor(
        [card_score(folder, tokenizer, query, document, WEB_SEARCH) for document in DOCUMENTS]
    )
    assert wanted.std() > 0.01
    with loaded(folder, task="rerank", **options) as llm:
        found = llm.rerank(query, DOCUMENTS)
        scores = torch.tensor([each.score for each in found])
        alone = torch.tensor([llm.rerank(query, [each])[0].score for each in DOCUMENTS])
        other = llm.rerank(query, DOCUMENTS[:1], instruction="Find it")[0].score
        llm._wait_for(_audit(llm))
    torch.testing.assert_close(scores, wanted, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(alone, wanted, atol=TOLERANCE, rtol=0)
    instructed = card_score(folder, tokenizer, query, DOCUMENTS[0], "Find it")
    assert abs(other - instructed) < TOLERANCE
    page = options.get("page_size", 16)
    shared = tokenizer.encode(f"<Instruct>: {WEB_SEARCH}\n<Query>: {query}\n<Document>: x")
    # Instruction and query are computed once.
    assert all(each.num_cached_tokens > len(shared) - 2 * page for each in found[1:])


def test_a_model_without_the_words_does_not_rerank(tmp_path: Path) -> None:
    folder = checkpoint("llama", "lasttoken", bare=True)
    with pytest.raises(Exception, match="without a head"):
        loaded(folder, task="rerank")
    with pytest.raises(Exception, match="without a head"):
        loaded(folder, task="generate")
    with pytest.raises(ConfigError, match="allowed: 'auto', 'generate', 'embed' or 'rerank'"):
        loaded(folder, task="classify")


Change = Callable[[EmbeddingRules], EmbeddingRules]


@pytest.mark.parametrize(
    "mistake", ["first-row", "mean-of-rows", "no-norm", "cut-after-norm", "row-before"]
)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    import minisgl.engine.vectors as made
    import minisgl.parts.vectors.device as rows

    folder = checkpoint("qwen3", "lasttoken")
    with loaded(folder) as llm:
        rules = llm.engine.vectors._rules
        if mistake == "first-row":
            rules = replace(rules, rows=PooledRows.FIRST)
        elif mistake == "mean-of-rows":
            rules = replace(rules, rows=PooledRows.MEAN)
        elif mistake == "no-norm":
            rules = replace(rules, normalize=False)
        elif mistake == "row-before":
            right = rows._rows_of
            monkeypatch.setattr(rows, "_rows_of", lambda *given: range(right(*given).start - 1, 0))
        else:
            vector = made.Vectors._vector
            monkeypatch.setattr(
                made.Vectors, "_vector", lambda self, request, n: vector(self, request, None)[:n]
            )
        llm.engine.vectors._rules = rules
        found = vectors(llm, [TEXTS[1]], dimensions=16)[0]
    difference = (found - expected(folder, "lasttoken", TEXTS[1], 16)).abs().max()
    assert float(difference) > 1000 * TOLERANCE
