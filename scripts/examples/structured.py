"""Has answers follow a regex or a schema: `python scripts/examples/structured.py`.

First with `LLM` in this process, then over HTTP with the openai package. Give the address of a
running server, or let the program start one of the demo model. That model has never seen JSON: its
answers follow the schema, and their values are guesses.
"""

from __future__ import annotations

from typing import Literal

from openai import OpenAI
from openai_client import server  # beside this file
from pydantic import BaseModel, ConfigDict, Field

from minisgl import LLM, SamplingParams, StructuredOutput

SUM = {"role": "user", "content": "What is 17 + 25?"}
CAPITAL = {"role": "user", "content": "What is the capital of France?"}


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a model may add fields of its own

    country: Literal["France", "Italy", "Spain"]
    capital: str = Field(max_length=20)


def main() -> None:
    in_this_process()
    over_http()


def in_this_process() -> None:
    with LLM() as llm:
        regex = StructuredOutput(regex=r"\d+ \+ \d+ = \d+\.")
        output = llm.chat([SUM], SamplingParams(temperature=0, structured=regex))
        print("regex:", output.text)

        params = SamplingParams(temperature=0, max_tokens=100)
        output = llm.chat([CAPITAL], params, response_format=Capital)
        print("schema:", repr(output.parsed))  # a Capital; None if the answer was cut


def over_http() -> None:
    with server() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10) as client:
        model = next(iter(client.models.list())).id
        answer = client.chat.completions.parse(
            model=model,
            messages=[CAPITAL],
            temperature=0,
            max_tokens=100,
            response_format=Capital,
        )
        print("openai:", repr(answer.choices[0].message.parsed))


if __name__ == "__main__":
    main()
