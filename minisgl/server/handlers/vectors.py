"""The handlers for vectors and scores.

A handler asks the engine while its client waits: what it has asked ends when the client leaves.
"""

from __future__ import annotations

import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Literal, cast

from msgspec import UNSET, Raw
from starlette.responses import Response

from minisgl.engine.turns import Turn
from minisgl.engine.vector_types import Embedding, Score
from minisgl.errors import ContextLengthError
from minisgl.server.apis.vectors import answer_types
from minisgl.server.apis.vectors.answer_types import EmbeddingItem, PromptUsage
from minisgl.server.apis.vectors.request_types import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl.server.http.access_log import note
from minisgl.server.http.deadlines import limit_of
from minisgl.server.http.encoding import encode, json_response
from minisgl.server.http.request_ids import reply_id
from minisgl.server.http.tracing import span_of
from minisgl.server.service import Asked, Service


async def embeddings(service: Service, asked: Asked[EmbeddingRequest]) -> Response:
    body = asked.body
    found = await asked.engine.vectors.embed(
        body.inputs(),
        body.options(),
        cache_salt=body.salt,
        tenant=body.tenant(asked.client),
        extras=asked.adapter,
        submitted=limit_of(asked.scope).watch,
    )
    answer = answer_types.EmbeddingList(
        data=await _encoded_items(found, in_base64=body.encoding_format == "base64"),
        model=asked.model,
        usage=_usage(asked, found),
    )
    return json_response(answer)


async def rerank(
    service: Service, asked: Asked[RerankRequest], version: Literal["1", "2"] = "1"
) -> Response:
    """Answer with the documents, the best ones first."""
    body = asked.body
    texts = body.texts()
    found = await _scores(asked, [(body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda index: -found[index].score)
    # Jina returns the documents unless it is asked not to, the second version of Cohere none.
    with_texts = body.return_documents or (body.return_documents is None and version == "1")
    usage = _usage(asked, found)
    answer = answer_types.RankedList(
        id=f"rerank-{reply_id(asked.scope)}",
        model=asked.model,
        results=[
            answer_types.RankedResult(
                index=index,
                relevance_score=found[index].score,
                document=answer_types.RankedDocument(texts[index]) if with_texts else UNSET,
            )
            for index in order[: body.top_n]
        ],
        usage=usage,
        meta=answer_types.RerankMeta(
            answer_types.APIVersion(version),
            answer_types.TokenCounts(usage.prompt_tokens, 0),
        ),
    )
    return json_response(answer)


async def score(service: Service, asked: Asked[ScoreRequest]) -> Response:
    pairs = asked.body.pairs()
    try:
        found = await _scores(asked, pairs)
    except ContextLengthError as error:
        raise error.with_names(
            prompt_field=error.param.replace("documents", "text_2").replace("query", "text_1")
        ) from None
    answer = answer_types.ScoreList(
        id=f"score-{reply_id(asked.scope)}",
        created=int(time.time()),
        model=asked.model,
        data=[
            answer_types.ScoreItem(index=index, score=each.score)
            for index, each in enumerate(found)
        ],
        usage=_usage(asked, found),
    )
    return json_response(answer)


async def _scores(
    asked: Asked[RerankRequest] | Asked[ScoreRequest], pairs: Sequence[tuple[str, str]]
) -> list[Score]:
    body = asked.body
    return await asked.engine.vectors.rerank(
        pairs,
        body.options(),
        cache_salt=body.salt,
        tenant=body.tenant(asked.client),
        extras=asked.adapter,
        submitted=limit_of(asked.scope).watch,
    )


async def _encoded_items(found: Sequence[Embedding], *, in_base64: bool) -> list[EmbeddingItem]:
    """The items of an answer, encoded already: many vectors take long."""
    turn = Turn()
    items: list[Raw] = []
    for index, each in enumerate(found):
        vector: list[float] | str = each.vector
        if in_base64:
            vector = b64encode(array("f", each.vector).tobytes()).decode()
        items.append(Raw(encode(EmbeddingItem(index=index, embedding=vector))))
        await turn.share()
    return cast("list[EmbeddingItem]", items)


def _usage(asked: Asked[Any], found: Sequence[Embedding] | Sequence[Score]) -> PromptUsage:
    """The usage, which the log tells, too."""
    num_tokens = sum(each.num_prompt_tokens for each in found)
    note(asked.scope, prompt_tokens=num_tokens)
    if (span := span_of(asked.scope)) is not None:
        span.asked(asked.model)
    return PromptUsage(num_tokens, num_tokens)
