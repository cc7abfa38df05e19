"""Checks what client packages do with a minisgl server; run by `try_clients.sh`.

Each package calls a tool, goes on with its result, streams and asks for structured output, by each
API of the server that it speaks. Every model passes that is held to its tools and schemas: no check
depends on what it knows.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
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
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI, OpenAIError
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KEY = "none"
QUESTION = "Which of the two cities is warmer?"
AS_JSON = "Answer in JSON: which of the two cities is warmer?"
MAX_TOKENS = 1500  # enough to think before an answer, and to fit into 2,048 with the prompt

Check = Callable[[str, str], None]  # given the base URL and the model
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__.replace("_", " ")] = function
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


# -- langchain -------------------------------------------------------------------------------------


def langchain(url: str, model: str, api: str) -> Any:
    """api: chat, messages, or the version of what the Responses API's answers become."""
    settings: dict[str, Any] = {"api_key": KEY, "max_tokens": MAX_TOKENS, "max_retries": 0}
    if api == "messages":
        root = url.removesuffix("/v1")
        return ChatAnthropic(base_url=root, model_name=model, timeout=600, **settings)
    if api != "chat":
        settings |= {"use_responses_api": True, "output_version": api}
    return ChatOpenAI(base_url=url, model=model, temperature=0.0, **settings)


def langchain_tools(url: str, model: str, api: str) -> None:
    chat = langchain(url, model, api)
    choice, none = ("any", {"type": "none"}) if api == "messages" else ("required", "none")
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False, strict=True)
    messages: list[Any] = [HumanMessage(QUESTION)]
    messages.append(answer := bound.invoke(messages))
    assert answer.tool_calls, answer
    for call in answer.tool_calls:
        assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo"), call
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    last = chat.bind_tools([weather], tool_choice=none).invoke(messages)
    assert not last.tool_calls and last.usage_metadata, last
    first, *others = bound.stream(QUESTION)
    whole = sum(others, first)
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo"), whole


def langchain_structured(url: str, model: str, api: str) -> None:
    for method in ("json_schema", "function_calling"):
        chat = langchain(url, model, api).with_structured_output(Warmer, method=method)
        assert isinstance(chat.invoke(QUESTION), Warmer), method


CHECKS |= {
    f"{done.__name__.replace('_', ' ')}, {api}": partial(done, api=api)
    for api in ("chat", "v0", "responses/v1", "v1", "messages")
    for done in (langchain_tools, langchain_structured)
}


# -- pydantic-ai -----------------------------------------------------------------------------------


def agent(url: str, model: str, output_type: Any, kind: type[Any]) -> Agent[None, Any]:
    client = kind(model, provider=OpenAIProvider(base_url=url, api_key=KEY))
    settings: Any = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    return Agent(client, output_type=output_type, model_settings=settings, retries=0)


@check
def pydantic_ai_output_and_a_second_turn(url: str, model: str) -> None:
    for kind in (OpenAIChatModel, PydanticResponsesModel):
        for output in (ToolOutput(Warmer), NativeOutput(Warmer)):
            asked = agent(url, model, output, kind)
            first = asked.run_sync(QUESTION)
            assert isinstance(first.output, Warmer)
            second = asked.run_sync("And in winter?", message_history=first.all_messages())
            assert isinstance(second.output, Warmer)


@check
def pydantic_ai_calls_tools(url: str, model: str) -> None:
    asked = agent(url, model, [ToolOutput(Warmer)], OpenAIChatModel)
    asked.tool_plain(weather.func)
    with_tools = asked.run_sync(QUESTION)  # the model may call `weather` before it answers
    assert isinstance(with_tools.output, Warmer)


@check
def pydantic_ai_streams_output(url: str, model: str) -> None:
    async def run() -> Any:
        asked = agent(url, model, ToolOutput(Warmer), PydanticResponsesModel)
        async with asked.run_stream(QUESTION) as result:
            return await result.get_output()

    assert isinstance(asyncio.run(run()), Warmer)


# -- instructor ------------------------------------------------------------------------------------


@check
def instructor_output_and_a_second_turn(url: str, model: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        server = OpenAI(base_url=url, api_key=KEY, max_retries=0)
        create = instructor.from_openai(server, mode=mode).chat.completions.create
        options: Any = {"model": model, "response_model": Warmer, "max_retries": 0}
        options |= {"max_tokens": MAX_TOKENS, "temperature": 0.0}
        first = create(messages=[{"role": "user", "content": AS_JSON}], **options)
        history = [
            {"role": "user", "content": AS_JSON},
            {"role": "assistant", "content": first.model_dump_json()},
            {"role": "user", "content": "And in winter?"},
        ]
        assert isinstance(create(messages=history, **options), Warmer)


# -- litellm ---------------------------------------------------------------------------------------

FUNCTION = {
    "name": "weather",
    "description": "Looks up the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": FUNCTION}
# One call: a model without sense of its own would go on calling.
REQUIRED = {"tool_choice": "required", "parallel_tool_calls": False}


def lite(url: str, model: str, **options: Any) -> Any:
    """url: with /v1 for OpenAI's API, without for Anthropic's."""
    settings: Any = {"max_tokens": MAX_TOKENS, "num_retries": 0, "api_base": url, "api_key": KEY}
    provider = "openai" if url.endswith("/v1") else "anthropic"
    messages = options.pop("messages", [{"role": "user", "content": QUESTION}])
    return litellm.completion(f"{provider}/{model}", messages=messages, **settings, **options)


@check
def litellm_tools_and_a_second_turn(url: str, model: str) -> None:
    required: Any = {"tools": [TOOL], **REQUIRED}
    for base in (url, url.removesuffix("/v1")):
        message = lite(base, model, **required).choices[0].message
        messages = [{"role": "user", "content": QUESTION}, message.model_dump()]
        for call in message.tool_calls:
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
        last = lite(base, model, messages=messages, tools=[TOOL], tool_choice="none").choices[0]
        assert last.finish_reason in ("stop", "length") and not last.message.tool_calls, last
        whole = litellm.stream_chunk_builder([*lite(base, model, **required, stream=True)])
        assert whole is not None
        [call, *_] = whole.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call


@check
def litellm_structured_output(url: str, model: str) -> None:
    answer = lite(url, model, response_format=Warmer).choices[0].message.content
    Warmer.model_validate_json(answer)


@check
def litellm_responses_tools_and_a_second_turn(url: str, model: str) -> None:
    def respond(asked: Any, **options: Any) -> Any:
        settings: Any = {"max_output_tokens": MAX_TOKENS, "num_retries": 0, **REQUIRED, **options}
        tools: Any = [{"type": "function", **FUNCTION}]
        settings |= {"api_base": url, "api_key": KEY, "tools": tools}
        return litellm.responses(input=asked, model=f"openai/{model}", **settings)

    items = [dict(item) for item in respond(QUESTION).output]
    call = items[-1]
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo"), call
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
    history = [{"role": "user", "content": QUESTION}, *items, result]
    last = respond(history, tool_choice="none")
    assert last.status in ("completed", "incomplete"), last
    kinds = [event.type for event in respond(QUESTION, stream=True)]
    assert kinds[-1] == "response.completed", kinds


# -- openai-agents ---------------------------------------------------------------------------------


def agents_run(url: str, model: str, kind: type[Any], question: Any, **options: Any) -> Any:
    """A run, streamed and whole."""

    async def run() -> Any:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            asked = SdkAgent(name="agent", model=kind(model=model, openai_client=client), **options)
            result = Runner.run_streamed(asked, question, max_turns=2)
            async for _ in result.stream_events():
                pass
            whole = await Runner.run(asked, question, max_turns=2)
            assert type(whole.final_output) is type(result.final_output), whole.final_output
            return result

    return asyncio.run(run())


@check
def openai_agents_call_tools_and_give_output(url: str, model: str) -> None:
    settings = ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS, **REQUIRED)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        # The choice of a tool is free after a call of it, by default.
        options = {"tools": [function_tool(weather.func)], "model_settings": settings}
        result = agents_run(url, model, kind, QUESTION, **options)
        kinds = [item.type for item in result.new_items]
        assert {"tool_call_item", "tool_call_output_item"} <= {*kinds}, kinds
        again = [*result.to_input_list(), {"role": "user", "content": "And in winter?"}]
        assert isinstance(agents_run(url, model, kind, again).final_output, str)
        output = agents_run(url, model, kind, QUESTION, output_type=Warmer).final_output
        assert isinstance(output, Warmer), output


def main() -> int:
    base_url = sys.argv[1].rstrip("/").removesuffix("/v1") + "/v1"
    with OpenAI(base_url=base_url, api_key=KEY) as client:
        try:
            model = sys.argv[2] if len(sys.argv) > 2 else next(iter(client.models.list())).id
            asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]}
            client.chat.completions.create(model=model, max_tokens=1, **asked)
        except OpenAIError as error:
            print(f"The server cannot be tried: {error}", file=sys.stderr)
            return 2
    litellm.suppress_debug_info = True
    set_tracing_disabled(True)
    num_failed = 0
    for name, run in CHECKS.items():
        try:
            run(base_url, model)
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
