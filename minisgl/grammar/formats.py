"""The ways in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"


class ArgumentStyle(Enum):
    """How the arguments of a call are written."""

    JSON = "json"  # an object
    XML = "xml"  # `<parameter=NAME>\nVALUE\n</parameter>\n` for each, strings as plain text
    PYTHON = "python"  # NAME=LITERAL for each, with `, ` between them


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a model writes its calls:

    begin, then for each call head + name + middle + arguments + tail with `between` after all but
    the last, then end.
    """

    head: str
    middle: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    arguments: ArgumentStyle = ArgumentStyle.JSON


HERMES = CallSpelling(
    head=f'{TOOL_CALL}\n{{"name": "',
    middle='", "arguments": ',
    tail=f"}}\n{END_TOOL_CALL}",
    between="\n",
)
QWEN3_CODER = CallSpelling(
    head=f"{TOOL_CALL}\n<function=",
    middle=">\n",
    tail=f"</function>\n{END_TOOL_CALL}",
    between="\n",
    arguments=ArgumentStyle.XML,
)
LLAMA3_JSON = CallSpelling(head='{"name": "', middle='", "parameters": ', tail="}", between="; ")
PYTHONIC = CallSpelling(
    head="",
    middle="(",
    tail=")",
    between=", ",
    begin="[",
    end="]",
    arguments=ArgumentStyle.PYTHON,
)
MISTRAL_LIST = CallSpelling(
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    begin=f"{TOOL_CALLS}[",
    end="]",
)
MISTRAL = CallSpelling(head=TOOL_CALLS, middle=ARGS, tail="", between="")
OPENINGS = (TOOL_CALL, TOOL_CALLS)
