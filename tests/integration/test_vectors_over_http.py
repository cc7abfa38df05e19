"""Vectors and scores over HTTP, asked for as clients do, are those of transformers and of LLM."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support.pooled_checkpoints import (
    QUERY,
    WEB_SEARCH,
    card_score,
    hidden_states,
    make_pooled,
    pooled,
    save_modules,
)
from support.serving import Served, demo_engine, served
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minisgl import LLM
from minisgl.engine import AsyncEngine
from minisgl.models.pooling import EmbeddingRules
from minisgl.server.apis.openai.answer_types import ModelList
from minisgl.server.apis.vectors.answer_types import EmbeddingList, RankedList, ScoreList
from minisgl.server.endpoints import ENDPOINTS

TOLERANCE = 1e-5
TEXTS = [
    "The quick brown fox",
    "jumps over the lazy dog, and then it sleeps",
    "Schöne Grüße aus Köln! " * 6,
    "The quick brown fox jumps over the lazy dog, and " * 5,
    "a",
]
DOCUMENTS = ["It sleeps.", "The fox jumps over the lazy dog.", "def f(x):\n    return x + 1", "no"]
ASKED = "What does the dog do?"
# In chunks of 7 tokens, whose pages later requests find.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 1025,
    "page_size": 4,
    "max_prefill_length": 7,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models") / "vectors"
    found.mkdir()
    make_pooled("qwen3", found)
    save_modules(found, "lasttoken")
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


def serving(folder: Path, **options: Any) -> Iterator[Served[AsyncEngine]]:
    options = {**OPTIONS, **options}
    with served(
        lambda: demo_engine(model=str(folder), **options), served_model_name=("small",)
    ) as found:
        yield found
        found.on_loop(found.engine.audit)
        stats = found.on_loop(found.engine.stats)
        assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Served[AsyncEngine]]:
    yield from serving(folder)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[Served[AsyncEngine]]:
    yield from serving(folder, task="rerank")


@pytest.fixture(scope="module")
def client(embedder: Served[AsyncEngine]) -> Iterator[openai.OpenAI]:
    with embedder.openai() as found:
        yield found


@pytest.fixture(scope="module")
def expected(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> Callable[[str | list[int], int | None], Tensor]:
    def vector(given: str | list[int], dimensions: int | None = None) -> Tensor:
        ids = tokenizer.encode(given) if isinstance(given, str) else given
        return pooled(hidden_states(folder, ids), "lasttoken", dimensions=dimensions)

    return vector


def vectors_of(answer: openai.types.CreateEmbeddingResponse) -> Tensor:
    assert [each.index for each in answer.data] == [*range(len(answer.data))]
    return torch.tensor([each.embedding for each in answer.data])


def shown(parameter: str | dict[str, Any]) -> str:
    return parameter[:30] if isinstance(parameter, str) else "-".join(parameter)


def check_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


# -- embeddings -----------------------------------------------------------------------------------


def test_vectors_are_those_of_transformers_alone_in_company_and_again(
    client: openai.OpenAI, expected: Any
) -> None:
    """The package asks for base64 by itself. What comes again finds its pages cached."""
    wanted = torch.stack([expected(text) for text in TEXTS])
    company = client.embeddings.create(model="small", input=TEXTS)
    check_close(vectors_of(company), wanted)
    for text, vector in zip(TEXTS, wanted, strict=True):
        again = client.embeddings.create(model="small", input=text)
        check_close(vectors_of(again)[0], vector)

    def ask(index: int) -> Tensor:
        answer = client.embeddings.create(model="small", input=[TEXTS[index], TEXTS[-1 - index]])
        return vectors_of(answer)

    with ThreadPoolExecutor(len(TEXTS)) as threads:
        for index, found in enumerate(threads.map(ask, range(len(TEXTS)))):
            check_close(found, torch.stack([wanted[index], wanted[-1 - index]]))


def test_vectors_are_those_of_llm(folder: Path, client: openai.OpenAI) -> None:
    with LLM(str(folder), device="cpu", dtype="float32", num_pages=513) as llm:
        wanted = torch.tensor([each.vector for each in llm.embed(TEXTS, dimensions=40)])
    answer = client.embeddings.create(model="small", input=TEXTS, dimensions=40)
    check_close(vectors_of(answer), wanted)


def test_an_answer_is_that_of_openai_in_both_formats(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    num_tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    client.embeddings.create(model="small", input=TEXTS)  # both find as many tokens cached
    raw = client.embeddings.with_raw_response
    plain = raw.create(model="small", input=TEXTS, encoding_format="float", user="me")
    packed = raw.create(model="small", input=TEXTS, encoding_format="base64")
    shapes = []
    for answer in (plain, packed):
        decoded = msgspec.json.decode(answer.content, type=EmbeddingList)
        said = msgspec.json.decode(answer.content)
        assert msgspec.to_builtins(decoded) == said
        assert (said["object"], decoded.model) == ("list", "small")
        assert (decoded.usage.prompt_tokens, decoded.usage.total_tokens) == (num_tokens,) * 2
        shapes.append(decoded)
    for one, two in zip(shapes[0].data, shapes[1].data, strict=True):
        assert isinstance(two.embedding, str)
        floats = np.frombuffer(base64.b64decode(two.embedding), dtype="<f4")
        assert floats.tolist() == one.embedding


def test_an_input_may_be_token_ids(
    client: openai.OpenAI, expected: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """They are taken as they are, as the openai package and LangChain send them."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS[:2]]
    one = client.embeddings.create(model="small", input=ids[0])
    check_close(vectors_of(one)[0], expected(ids[0]))
    several = client.embeddings.create(model="small", input=ids)
    check_close(vectors_of(several), torch.stack([expected(each) for each in ids]))
    assert several.usage.prompt_tokens == sum(map(len, ids))


def test_dimensions_prompts_and_cuts_take_effect(
    client: openai.OpenAI, expected: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    def ask(text: str, **fields: Any) -> Tensor:
        dimensions = fields.pop("dimensions", openai.omit)
        answer = client.embeddings.create(
            model="small", input=text, dimensions=dimensions, extra_body=fields
        )
        return vectors_of(answer)[0]

    short = ask(TEXTS[1], dimensions=16)
    check_close(short, expected(TEXTS[1], 16))
    assert abs(float(short.norm()) - 1) < TOLERANCE
    check_close(ask(TEXTS[0], prompt_name="query"), expected(QUERY + TEXTS[0]))
    check_close(ask(TEXTS[0], instruction="Find it"), expected(QUERY + TEXTS[0]))
    [*ids, end] = tokenizer.encode(TEXTS[2])
    check_close(ask(TEXTS[2], truncate_prompt_tokens=9), expected([*ids[:8], end]))
    long = "a b " * 600
    [*ids, end] = tokenizer.encode(long)
    check_close(ask(long, truncate_prompt_tokens=-1), expected([*ids[:511], end]))


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": "a b " * 600}, "input", "maximum context length is 512 tokens"),
        ({"input": ["a", "a b " * 600]}, "input[1]", "your input[1] resulted in"),
        ({"input": ["a", "a b " * 9000]}, "input[1]", "your input[1] resulted in"),
        ({"input": [[1], [600]]}, "input[1]", "the token id 600 at position 0 is out of"),
        ({"input": [[1], []]}, "input[1]", "must have at least one token"),
        ({"input": ["a", 1]}, "input", "must be a text, a list of texts, or"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a"] * 2049}, "input", "must have at most 2048 entries"),
        ({"dimensions": 129}, "dimensions", "allowed: 1 to 128"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
        ({"encoding_format": "int8"}, "encoding_format", "allowed: base64 or float"),
        ({"prompt_name": "none"}, "prompt_name", "allowed: query, document"),
        ({"prompt_name": "query", "instruction": "x"}, "instruction", "not allowed with"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "allowed: more than 1, or -1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1"),
        ({"messages": []}, "messages", "is not supported"),
        ({"input_type": "query"}, "input_type", "is not supported"),
        ({"add_special_tokens": False}, "add_special_tokens", "is not supported"),
        ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    ],
    ids=shown,
)
def test_what_is_wrong_is_said_by_name(
    embedder: Served[AsyncEngine], fields: dict[str, Any], param: str, said: str
) -> None:
    with embedder.http() as http:
        response = http.post("/v1/embeddings", json={"input": "a", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and said in error["message"]
    is_long = "context length" in error["message"]
    assert error["code"] == ("context_length_exceeded" if is_long else None)


def test_a_long_input_is_refused_with_both_lengths(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "a b " * 300
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="small", input=text)
    assert f"resulted in {len(tokenizer.encode(text))} tokens" in str(caught.value)
    assert "maximum context length is 512 tokens" in str(caught.value)
    assert "completion" not in str(caught.value)


def test_more_inputs_than_the_queue_holds_take_turns(folder: Path) -> None:
    options = {"max_running_requests": 2, "max_queued_requests": 4}
    for found in serving(folder, **options):
        with found.openai() as client:
            answer = client.embeddings.create(model="small", input=[*map(str, range(40))])
            assert len(answer.data) == 40
            with found.http() as http:
                texts = http.get("/metrics").text
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(texts)
        for sample in family.samples
        if not sample.labels or sample.labels.get("reason") == "length"
    }
    assert samples["minisgl_prompt_tokens_total"] == answer.usage.prompt_tokens
    assert samples["minisgl_requests_finished_total"] == 40
    assert samples["minisgl_generated_tokens_total"] == 0
    assert samples["minisgl_request_seconds_count"] == 40


# -- scores ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    return [card_score(folder, tokenizer, ASKED, each, WEB_SEARCH) for each in DOCUMENTS]


def best_first(wanted: list[float]) -> list[int]:
    return sorted(range(len(wanted)), key=lambda index: -wanted[index])


def posted(served: Served[AsyncEngine], path: str, body: Any, kind: type[Any]) -> Any:
    """The answer, which has the members of its type and no others."""
    with served.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    decoded = msgspec.json.decode(response.content, type=kind)
    assert msgspec.to_builtins(decoded) == response.json()
    return decoded


def test_documents_are_ranked_as_jina_has_it(
    reranker: Served[AsyncEngine], wanted: list[float]
) -> None:
    body = {"model": "small", "query": ASKED, "documents": DOCUMENTS, "top_n": 3}
    answer = posted(reranker, "/v1/rerank", body, RankedList)
    order = best_first(wanted)[:3]
    assert [each.index for each in answer.results] == order
    assert [each.document.text for each in answer.results] == [DOCUMENTS[i] for i in order]
    for each in answer.results:
        assert abs(each.relevance_score - wanted[each.index]) < TOLERANCE
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4 * len(ASKED.split())
    without = posted(reranker, "/v1/rerank", {**body, "return_documents": False}, RankedList)
    assert all(each.document is msgspec.UNSET for each in without.results)


@pytest.mark.parametrize(("path", "version"), [("/v1/rerank", "1"), ("/v2/rerank", "2")])
def test_documents_are_ranked_as_cohere_has_it(
    reranker: Served[AsyncEngine], wanted: list[float], path: str, version: str
) -> None:
    documents = [{"text": each, "title": "left out"} for each in DOCUMENTS]
    body = {
        "model": "small",
        "query": ASKED,
        "documents": documents,
        "rank_fields": ["text"],
        "return_documents": version == "1",
        "priority": 5,
    }
    answer = posted(reranker, path, body, RankedList)
    assert [each.index for each in answer.results] == best_first(wanted)
    assert answer.meta.api_version.version == version
    assert answer.meta.tokens.input_tokens == answer.usage.prompt_tokens
    has_text = [each.document is not msgspec.UNSET for each in answer.results]
    assert has_text == [version == "1"] * 4
    del body["return_documents"]
    [first, *_] = posted(reranker, path, body, RankedList).results
    assert (first.document is msgspec.UNSET) == (version == "2")


def test_pairs_are_scored_one_to_many_and_one_to_one(
    reranker: Served[AsyncEngine],
    wanted: list[float],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    many = posted(reranker, "/v1/score", {"text_1": ASKED, "text_2": DOCUMENTS}, ScoreList)
    assert [each.index for each in many.data] == [*range(4)]
    check_close(torch.tensor([each.score for each in many.data]), torch.tensor(wanted))
    queries = [ASKED, "Which fox?", ASKED, "Yes?"]
    pairs = posted(reranker, "/v1/score", {"text_1": queries, "text_2": DOCUMENTS}, ScoreList)
    scores = [
        card_score(folder, tokenizer, query, document, WEB_SEARCH)
        for query, document in zip(queries, DOCUMENTS, strict=True)
    ]
    check_close(torch.tensor([each.score for each in pairs.data]), torch.tensor(scores))
    one = posted(reranker, "/v1/score", {"text_1": [ASKED], "text_2": DOCUMENTS[1]}, ScoreList)
    assert abs(one.data[0].score - wanted[1]) < TOLERANCE


def test_scores_follow_their_instruction_and_cut_documents(
    reranker: Served[AsyncEngine], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    def ask(document: str, **fields: Any) -> float:
        body = {"text_1": ASKED, "text_2": document, **fields}
        answer = posted(reranker, "/v1/score", body, ScoreList)
        return float(answer.data[0].score)

    instructed = card_score(folder, tokenizer, ASKED, DOCUMENTS[0], "Find it")
    assert abs(ask(DOCUMENTS[0], instruction="Find it") - instructed) < TOLERANCE
    long = "The dog sleeps. " * 300
    ids = tokenizer.encode(f" {long}", add_special_tokens=False)[:5]
    beginning = str(tokenizer.decode(ids)).removeprefix(" ")
    cut = card_score(folder, tokenizer, ASKED, beginning, WEB_SEARCH)
    assert abs(ask(long, max_tokens_per_doc=5) - cut) < TOLERANCE
    assert 0 < ask(long, truncate_prompt_tokens=-1) < 1


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("/v1/rerank", {"documents": []}, "documents", "must not be empty"),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "documents", "at most 2048 entries"),
        ("/v2/rerank", {"documents": [{"title": "a"}]}, "documents.0.text", "is missing"),
        ("/v1/rerank", {"documents": [{"text": "a", "image": "b"}]}, "documents.0.image", "not su"),
        ("/v1/rerank", {"documents": ["a", "a b " * 600]}, "documents[1]", "is 512 tokens"),
        ("/v1/rerank", {"query": "a b " * 600}, "query", "your query resulted"),
        ("/v1/rerank", {"top_n": 0}, "top_n", "at least 1"),
        ("/v1/rerank", {"rank_fields": ["title"]}, "rank_fields.0", "allowed: text"),
        ("/v1/rerank", {"max_chunks_per_doc": 3}, "max_chunks_per_doc", "not supported"),
        ("/v1/score", {"text_1": ["a", "b"]}, "text_1", "as many texts as text_2"),
        ("/v1/score", {"text_2": ["a", "a b " * 600]}, "text_2[1]", "your text_2[1] resulted"),
        ("/v1/score", {"text_1": "a b " * 600}, "text_1", "your text_1 resulted"),
        ("/v1/score", {"text_1": []}, "text_1", "must not be empty"),
        ("/v1/score", {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "more than"),
    ],
    ids=shown,
)
def test_what_is_wrong_with_scores_is_said_by_name(
    reranker: Served[AsyncEngine], path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    whole = {"text_1": "a", "text_2": "b"} if path == "/v1/score" else {"documents": ["b"]}
    with reranker.http() as http:
        response = http.post(path, json={"query": "a"} | whole | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and said in error["message"]


# -- what the model is for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "own"),
    [
        ("embed", ["/v1/embeddings"]),
        ("rerank", ["/v1/rerank", "/v2/rerank", "/v1/score"]),
    ],
)
def test_an_endpoint_of_another_task_says_what_the_model_is_for(
    request: pytest.FixtureRequest, task: str, own: list[str]
) -> None:
    found = request.getfixturevalue("embedder" if task == "embed" else "reranker")
    with found.http() as http:
        for each in (each for each in ENDPOINTS if each.task):
            response = http.post(each.path, json=each.example)
            if each.path in own:
                assert response.status_code == 200, response.text
                continue
            assert response.status_code == 400
            error = response.json()["error"]
            said = error["message"]
            assert f"{each.path} is not available" in said and f"(--task {task})" in said
            assert all(name in said for name in own)
            assert f"minisgl serve --task {each.task}" in said
            if "messages" not in each.path:
                assert error["code"] == "wrong_task"
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        listed = msgspec.json.decode(http.get("/v1/models").content, type=ModelList)
    assert [model.task for model in listed.data] == [task]


# -- mistakes show --------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["no-norm", "cut-after-norm", "row-before", "order"])
def test_a_mistake_shows(
    mistake: str,
    embedder: Served[AsyncEngine],
    client: openai.OpenAI,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace

    import minisgl.parts.vectors.device as rows

    vectors = embedder.engine.vectors
    if mistake == "no-norm":
        rules: EmbeddingRules = replace(vectors._rules, normalize=False)
        monkeypatch.setattr(vectors, "_rules", rules)
    elif mistake == "row-before":
        right = rows._rows_of
        monkeypatch.setattr(rows, "_rows_of", lambda *given: range(right(*given).start - 1, 0))
    elif mistake == "cut-after-norm":
        whole = vectors._vector
        monkeypatch.setattr(vectors, "_vector", lambda request, n: whole(request, None)[:n])
    else:
        compute: Any = vectors._compute

        async def turned(prompts: Any, *given: Any, **options: Any) -> Any:
            return await compute(prompts[::-1], *given, **options)

        monkeypatch.setattr(vectors, "_compute", turned)
    asked = TEXTS[:2]
    answer = client.embeddings.create(model="small", input=asked, dimensions=16)
    wanted = torch.stack([expected(text, 16) for text in asked])
    assert float((vectors_of(answer) - wanted).abs().max()) > 1000 * TOLERANCE


def test_the_answer_of_a_model_without_a_tokenizer_needs_token_ids(
    folder: Path, tmp_path: Path, expected: Any
) -> None:
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith(("tokenizer", "special", "chat")):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").symlink_to(folder / "1_Pooling")
    for found in serving(tmp_path, load_format="dummy"):
        with found.http() as http:
            refused = http.post("/v1/embeddings", json={"input": "a"})
            taken = http.post("/v1/embeddings", json={"input": [1, 2]})
    assert isinstance(refused, httpx.Response)
    assert (
        refused.json()["error"]["message"] == "input: the model has no tokenizer; send token ids."
    )
    assert taken.status_code == 200
