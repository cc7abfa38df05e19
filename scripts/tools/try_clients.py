"""Checks what client packages do with a minisgl server; run by `try_clients.sh`.

Every model passes that is held to its tools and schemas: no check depends on what it knows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import instructor
import litellm
from agents import Agent as SdkAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from anthropic import APIStatusError as AnthropicStatusError
from instructor.core import IncompleteOutputException
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import (
    APIStatusError,
    AsyncOpenAI,
    LengthFinishReasonError,
    OpenAI,
    OpenAIError,
)
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KEY = "none"
QUESTION = "Which of the two cities is warmer?"
AS_JSON = "Answer in JSON: which of the two cities is warmer?"
MAX_TOKENS = 1500  # enough to think before an answer, and to fit into 2,048 with the prompt
WRONG = 9.0  # no temperature

Check = Callable[[str, str], None]  # given the base URL and the model
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


class Warmer(BaseModel):
    """The warmer city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    certain: bool


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Looks up the weather of a city."""
    return f"It is 18 degrees in {city}."


def raises(kind: type[Exception] | tuple[type[Exception], ...], work: Callable[[], Any]) -> str:
    """The message of the error that `work` must raise."""
    try:
        result = work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no error, but {result!r}")


# -- langchain-openai ------------------------------------------------------------------------------


def langchain(url: str, model: str, **options: Any) -> ChatOpenAI:
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **options}
    return ChatOpenAI(base_url=url, api_key=KEY, model=model, max_retries=0, **settings)


@check
def langchain_bind_tools_and_a_second_turn(url: str, model: str) -> None:
    chat = langchain(url, model)
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = chat.bind_tools(
        [weather], tool_choice="required", parallel_tool_calls=False, strict=True
    ).invoke(messages)
    assert isinstance(answer, AIMessage) and answer.tool_calls, answer
    messages.append(answer)
    for call in answer.tool_calls:
        assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo"), call
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    last = chat.bind_tools([weather], tool_choice="none").invoke(messages)
    assert not last.tool_calls and last.usage_metadata, last


@check
def langchain_streams_calls(url: str, model: str) -> None:
    whole: Any = None
    bound = langchain(url, model).bind_tools(
        [weather], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo"), whole


@check
def langchain_structured_output_by_schema(url: str, model: str) -> None:
    chat = langchain(url, model).with_structured_output(Warmer, method="json_schema")
    assert isinstance(chat.invoke(QUESTION), Warmer)


@check
def langchain_structured_output_by_function_calling(url: str, model: str) -> None:
    chat = langchain(url, model).with_structured_output(Warmer, method="function_calling")
    assert isinstance(chat.invoke(QUESTION), Warmer)


@check
def langchain_structured_output_by_json_mode(url: str, model: str) -> None:
    chat = langchain(url, model, max_tokens=None).with_structured_output(
        {"type": "object"}, method="json_mode", include_raw=True
    )
    try:
        answer = chat.invoke(AS_JSON)
    except LengthFinishReasonError:  # any object is allowed, and a small model finds no end
        return
    assert isinstance(answer["parsed"], dict), answer


@check
def langchain_reports_an_error(url: str, model: str) -> None:
    said = raises(APIStatusError, lambda: langchain(url, model, temperature=WRONG).invoke(QUESTION))
    assert "temperature" in said, said


@check
def langchain_reports_a_cut_answer(url: str, model: str) -> None:
    cut = langchain(url, model, max_tokens=2).with_structured_output(Warmer, method="json_schema")
    raises(LengthFinishReasonError, lambda: cut.invoke(QUESTION))


# -- pydantic-ai -----------------------------------------------------------------------------------


def agent(
    url: str, model: str, output_type: Any, kind: type[Any] = OpenAIChatModel, **settings: Any
) -> Agent[None, Any]:
    client = kind(model, provider=OpenAIProvider(base_url=url, api_key=KEY))
    chosen: Any = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **settings}
    return Agent(client, output_type=output_type, model_settings=chosen, retries=0)


def ask_twice(asked: Agent[None, Any]) -> None:
    first = asked.run_sync(QUESTION)
    assert isinstance(first.output, Warmer)
    second = asked.run_sync("And in winter?", message_history=first.all_messages())
    assert isinstance(second.output, Warmer)


@check
def pydantic_ai_output_by_a_tool_and_a_second_turn(url: str, model: str) -> None:
    ask_twice(agent(url, model, ToolOutput(Warmer)))


@check
def pydantic_ai_output_by_a_schema(url: str, model: str) -> None:
    assert isinstance(agent(url, model, NativeOutput(Warmer)).run_sync(QUESTION).output, Warmer)


@check
def pydantic_ai_calls_tools(url: str, model: str) -> None:
    asked = agent(url, model, [ToolOutput(Warmer)])
    asked.tool_plain(weather.func)
    with_tools = asked.run_sync(QUESTION)  # the model may call `weather` before it answers
    assert isinstance(with_tools.output, Warmer)


@check
def pydantic_ai_reports_an_error(url: str, model: str) -> None:
    wrong = agent(url, model, str, temperature=WRONG)
    assert "temperature" in raises(ModelHTTPError, lambda: wrong.run_sync(QUESTION))


@check
def pydantic_ai_reports_a_cut_answer(url: str, model: str) -> None:
    cut = agent(url, model, ToolOutput(Warmer), max_tokens=2)
    raises(UnexpectedModelBehavior, lambda: cut.run_sync(QUESTION))


# -- instructor ------------------------------------------------------------------------------------


def instructed(url: str, model: str, mode: instructor.Mode, **options: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=mode)
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "max_retries": 0, **options}
    messages = settings.pop("messages", [{"role": "user", "content": AS_JSON}])
    return client.chat.completions.create(
        model=model, response_model=Warmer, messages=messages, **settings
    )


@check
def instructor_by_tools_and_a_second_turn(url: str, model: str) -> None:
    first = instructed(url, model, instructor.Mode.TOOLS)
    history = [
        {"role": "user", "content": AS_JSON},
        {"role": "assistant", "content": first.model_dump_json()},
        {"role": "user", "content": "And in winter?"},
    ]
    assert isinstance(instructed(url, model, instructor.Mode.TOOLS, messages=history), Warmer)


@check
def instructor_by_schema(url: str, model: str) -> None:
    assert isinstance(instructed(url, model, instructor.Mode.JSON_SCHEMA), Warmer)


@check
def instructor_reports_an_error(url: str, model: str) -> None:
    said = raises(
        Exception,  # its own, around that of openai
        lambda: instructed(url, model, instructor.Mode.TOOLS, temperature=WRONG),
    )
    assert "temperature" in said, said


@check
def instructor_reports_a_cut_answer(url: str, model: str) -> None:
    raises(
        IncompleteOutputException,
        lambda: instructed(url, model, instructor.Mode.TOOLS, max_tokens=2),
    )


# -- litellm ---------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# One call: a model without sense of its own would go on calling.
REQUIRED = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def lite(url: str, model: str, **options: Any) -> Any:
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "num_retries": 0, **options}
    messages = settings.pop("messages", [{"role": "user", "content": QUESTION}])
    return litellm.completion(
        f"openai/{model}", messages=messages, api_base=url, api_key=KEY, **settings
    )


@check
def litellm_tools_and_a_second_turn(url: str, model: str) -> None:
    message = lite(url, model, **REQUIRED).choices[0].message
    messages = [{"role": "user", "content": QUESTION}, message.model_dump()]
    for call in message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
    last = lite(url, model, messages=messages, tools=[TOOL], tool_choice="none").choices[0]
    assert last.finish_reason in ("stop", "length") and not last.message.tool_calls, last


@check
def litellm_streams_calls(url: str, model: str) -> None:
    chunks = [*lite(url, model, **REQUIRED, stream=True)]
    whole = litellm.stream_chunk_builder(chunks)
    assert whole is not None
    [call, *_] = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call


@check
def litellm_structured_output(url: str, model: str) -> None:
    answer = lite(url, model, response_format=Warmer).choices[0].message.content
    Warmer.model_validate_json(answer)


@check
def litellm_reports_an_error(url: str, model: str) -> None:
    said = raises(litellm.BadRequestError, lambda: lite(url, model, temperature=WRONG))
    assert "temperature" in said, said


@check
def litellm_reports_a_cut_answer(url: str, model: str) -> None:
    cut = lite(url, model, response_format=Warmer, max_tokens=2)
    assert cut.choices[0].finish_reason == "length", cut


# -- the Responses API -----------------------------------------------------------------------------


def held(**settings: Any) -> ModelSettings:
    """One call: a model without sense of its own would go on calling."""
    return ModelSettings(tool_choice="required", parallel_tool_calls=False, **settings)


def agents_run(url: str, model: str, kind: type[Any], question: Any, **options: Any) -> Any:
    """A run of an agent of the package openai-agents, in either of its modes."""

    async def run() -> Any:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            agent = SdkAgent(name="agent", model=kind(model=model, openai_client=client), **options)
            result = Runner.run_streamed(agent, question, max_turns=2)
            async for _ in result.stream_events():
                pass
            whole = await Runner.run(agent, question, max_turns=2)
            assert type(whole.final_output) is type(result.final_output), whole.final_output
            return result

    return asyncio.run(run())


@check
def openai_agents_call_tools_in_both_modes(url: str, model: str) -> None:
    looked_up = function_tool(weather.func)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        settings = held(temperature=0.0, max_tokens=MAX_TOKENS)
        options = {"tools": [looked_up], "model_settings": settings}
        # The choice of a tool is free after a call of it, by default.
        result = agents_run(url, model, kind, QUESTION, **options)
        kinds = [item.type for item in result.new_items]
        assert {"tool_call_item", "tool_call_output_item"} <= {*kinds}, kinds
        again = [*result.to_input_list(), {"role": "user", "content": "And in winter?"}]
        assert isinstance(agents_run(url, model, kind, again).final_output, str)


@check
def openai_agents_structured_output_in_both_modes(url: str, model: str) -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        result = agents_run(url, model, kind, QUESTION, output_type=Warmer)
        assert isinstance(result.final_output, Warmer), result.final_output


@check
def openai_agents_report_an_error(url: str, model: str) -> None:
    wrong = {"model_settings": ModelSettings(temperature=WRONG)}
    run = functools.partial(agents_run, url, model, OpenAIResponsesModel, QUESTION, **wrong)
    assert "temperature" in raises(APIStatusError, run)


@check
def langchain_responses_bind_tools_and_a_second_turn(url: str, model: str) -> None:
    for version in ("v0", "responses/v1", "v1"):
        chat = langchain(url, model, use_responses_api=True, output_version=version)
        bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
        messages: list[Any] = [HumanMessage(QUESTION)]
        answer = bound.invoke(messages)
        assert isinstance(answer, AIMessage) and answer.tool_calls, answer
        messages.append(answer)
        for call in answer.tool_calls:
            assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo"), call
            messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
        last = chat.bind_tools([weather], tool_choice="none").invoke(messages)
        assert not last.tool_calls and last.usage_metadata, last
        whole: Any = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo"), whole


@check
def langchain_responses_structured_output(url: str, model: str) -> None:
    chat = langchain(url, model, use_responses_api=True)
    for method in ("json_schema", "function_calling"):
        structured = chat.with_structured_output(Warmer, method=method)
        assert isinstance(structured.invoke(QUESTION), Warmer), method


@check
def pydantic_ai_responses_output_and_a_second_turn(url: str, model: str) -> None:
    for output in (ToolOutput(Warmer), NativeOutput(Warmer)):
        ask_twice(agent(url, model, output, kind=PydanticResponsesModel))


@check
def pydantic_ai_responses_streams_output(url: str, model: str) -> None:
    async def run() -> Any:
        asked = agent(url, model, ToolOutput(Warmer), kind=PydanticResponsesModel)
        async with asked.run_stream(QUESTION) as result:
            return await result.get_output()

    assert isinstance(asyncio.run(run()), Warmer)


def lite_responses(url: str, model: str, **options: Any) -> Any:
    settings = {"input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 0.0, **options}
    return litellm.responses(
        model=f"openai/{model}", api_base=url, api_key=KEY, num_retries=0, **settings
    )


@check
def litellm_responses_tools_and_a_second_turn(url: str, model: str) -> None:
    required = {**REQUIRED, "tools": [{"type": "function", **TOOL["function"]}]}
    items = [dict(item) for item in lite_responses(url, model, **required).output]
    call = items[-1]
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo"), call
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
    history = [{"role": "user", "content": QUESTION}, *items, result]
    last = lite_responses(url, model, **{**required, "tool_choice": "none"}, input=history)
    assert last.status in ("completed", "incomplete"), last
    kinds = [event.type for event in lite_responses(url, model, **required, stream=True)]
    assert kinds[-1] == "response.completed", kinds


@check
def litellm_responses_reports_an_error_and_a_cut_answer(url: str, model: str) -> None:
    wrong: Any = {"temperature": WRONG}
    said = raises(litellm.BadRequestError, lambda: lite_responses(url, model, **wrong))
    assert "temperature" in said, said
    cut = lite_responses(url, model, max_output_tokens=1)
    assert cut.incomplete_details.reason == "max_output_tokens", cut


# -- the Messages API ------------------------------------------------------------------------------


def root(url: str) -> str:
    return url.removesuffix("/v1")


def langchain_messages(url: str, model: str, **options: Any) -> ChatAnthropic:
    settings = {"max_tokens": MAX_TOKENS, **options}
    return ChatAnthropic(
        base_url=root(url), api_key=KEY, model_name=model, max_retries=0, timeout=600, **settings
    )


@check
def langchain_anthropic_bind_tools_and_a_second_turn(url: str, model: str) -> None:
    chat = langchain_messages(url, model)
    messages: list[Any] = [HumanMessage(QUESTION)]
    bound = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    answer = bound.invoke(messages)
    assert isinstance(answer, AIMessage) and answer.tool_calls, answer
    messages.append(answer)
    for call in answer.tool_calls:
        assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo"), call
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    last = chat.bind_tools([weather], tool_choice={"type": "none"}).invoke(messages)
    assert not last.tool_calls and last.usage_metadata, last


@check
def langchain_anthropic_streams_calls(url: str, model: str) -> None:
    whole: Any = None
    bound = langchain_messages(url, model).bind_tools([weather], tool_choice="weather", strict=True)
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo"), whole
    assert whole.response_metadata["stop_reason"] == "tool_use", whole
    assert whole.usage_metadata["output_tokens"], whole


@check
def langchain_anthropic_structured_output(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        chat = langchain_messages(url, model).with_structured_output(Warmer, method=method)
        assert isinstance(chat.invoke(QUESTION), Warmer), method


@check
def langchain_anthropic_reports_an_error_and_a_cut_answer(url: str, model: str) -> None:
    wrong = langchain_messages(url, model, temperature=WRONG)
    said = raises(AnthropicStatusError, lambda: wrong.invoke(QUESTION))
    assert "temperature" in said, said
    cut = langchain_messages(url, model, max_tokens=2).invoke(QUESTION)
    assert cut.response_metadata["stop_reason"] == "max_tokens", cut


def lite_messages(url: str, model: str, **options: Any) -> Any:
    settings = {"max_tokens": MAX_TOKENS, "num_retries": 0, **options}
    messages = settings.pop("messages", [{"role": "user", "content": QUESTION}])
    return litellm.completion(
        f"anthropic/{model}", messages=messages, api_base=root(url), api_key=KEY, **settings
    )


@check
def litellm_anthropic_tools_and_a_second_turn(url: str, model: str) -> None:
    message = lite_messages(url, model, **REQUIRED).choices[0].message
    messages = [{"role": "user", "content": QUESTION}, message.model_dump()]
    for call in message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
    last = lite_messages(url, model, messages=messages, tools=[TOOL], tool_choice="none")
    assert last.choices[0].finish_reason in ("stop", "length"), last
    assert not last.choices[0].message.tool_calls, last


@check
def litellm_anthropic_streams_calls(url: str, model: str) -> None:
    whole = litellm.stream_chunk_builder([*lite_messages(url, model, **REQUIRED, stream=True)])
    assert whole is not None
    [call, *_] = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call


@check
def litellm_anthropic_reports_an_error_and_a_cut_answer(url: str, model: str) -> None:
    wrong: Any = {"temperature": WRONG}
    said = raises(litellm.BadRequestError, lambda: lite_messages(url, model, **wrong))
    assert "temperature" in said, said
    cut = lite_messages(url, model, max_tokens=2)
    assert cut.choices[0].finish_reason == "length", cut


def main() -> int:
    base_url = sys.argv[1].rstrip("/").removesuffix("/v1") + "/v1"
    with OpenAI(base_url=base_url, api_key=KEY) as client:
        model = sys.argv[2] if len(sys.argv) > 2 else next(iter(client.models.list())).id
        try:
            asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]}
            client.chat.completions.create(model=model, max_tokens=1, **asked)
        except OpenAIError as error:
            print(f"The server cannot be tried: {error}", file=sys.stderr)
            return 2
    litellm.suppress_debug_info = True
    set_tracing_disabled(True)
    num_failed = 0
    for one in CHECKS:
        name = one.__name__.replace("_", " ")
        try:
            one(base_url, model)
        except Exception as error:  # a package may raise anything
            num_failed += 1
            reason = " ".join(str(error).split())[:200]
            print(f"FAIL  {name}: {type(error).__name__}: {reason}", flush=True)
        else:
            print(f"ok    {name}", flush=True)
    print(f"{len(CHECKS) - num_failed} of {len(CHECKS)} checks passed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
