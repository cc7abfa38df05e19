"""The handler of decisions: each question is a prompt of its own, of which no token is sampled."""

from __future__ import annotations

from starlette.responses import Response

from minisgl.errors import CallerError, InvalidRequestError
from minisgl.server.answers.plan import conversation_of
from minisgl.server.apis.decisions.answer_types import Decision
from minisgl.server.apis.decisions.reading import answer_of, labels, prompt_of
from minisgl.server.apis.decisions.request_types import DecisionRequest
from minisgl.server.apis.responses.answer_types import (
    ResponseInputDetails,
    ResponseOutputDetails,
    ResponseUsage,
)
from minisgl.server.apis.responses.conversation import chat_of
from minisgl.server.apis.responses.request_types import (
    InputItem,
    ReasoningOptions,
    ResponsesRequest,
)
from minisgl.server.apis.responses.tool_box import ToolBox
from minisgl.server.http.access_log import note
from minisgl.server.http.deadlines import limit_of
from minisgl.server.http.encoding import json_response
from minisgl.server.service import Asked, Service

NO_THINKING = ReasoningOptions(effort="none")
THINKS = "This model thinks before each answer, so its first token decides nothing."


async def decisions(service: Service, asked: Asked[DecisionRequest]) -> Response:
    engine, body, form = asked.engine, asked.body, service.state.answer_format
    if engine.tokenizer is None:
        raise CallerError("The model has no tokenizer.")
    if form.messages is not None:
        raise CallerError(THINKS)
    known = labels(engine.tokenizer, max(len(each.options) for each in body.questions))
    given = body.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    if any(item.is_reference for item in items):
        raise InvalidRequestError("input", "cannot refer to items of stored answers.")
    placed = [(item, f"input.{place}") for place, item in enumerate(items)]
    prompts = []
    for index, question in enumerate(body.questions):
        asking = InputItem(role="user", content=prompt_of(question, known))
        request = ResponsesRequest(input="", reasoning=NO_THINKING)
        chat = chat_of(request, [*placed, (asking, f"questions.{index}")], ToolBox(()))
        with chat.fields_named():
            conversation = await conversation_of(engine, chat.body, service.reading, asked.client)
        if conversation.prompt.spans:
            raise InvalidRequestError("input", "cannot have images.")
        prompts.append(conversation.prompt_token_ids)
        if form.reasoning is not None:
            end = engine.tokenizer.decode(prompts[-1][-4:], skip_special_tokens=False)
            if end.rstrip().endswith(form.reasoning.open):
                raise CallerError(THINKS)
    found = await engine.vectors.logits(
        prompts,
        tuple(token_id for _, token_ids in known for token_id in token_ids),
        cache_salt=body.salt,
        tenant=body.tenant(asked.client),
        extras=asked.adapter,
        submitted=limit_of(asked.scope).watch,
    )
    answers = [
        answer_of(question, known, iter(each.vector))
        for question, each in zip(body.questions, found, strict=True)
    ]
    num_input = sum(each.num_prompt_tokens for each in found)
    num_cached = sum(each.num_cached_tokens for each in found)
    note(asked.scope, prompt_tokens=num_input, cached_tokens=num_cached)
    details = ResponseInputDetails(num_cached, 0)
    usage = ResponseUsage(num_input, details, 0, ResponseOutputDetails(0), num_input)
    return json_response(Decision(asked.model, answers, usage))
