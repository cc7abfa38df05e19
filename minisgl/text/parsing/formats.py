"""The ways in which models write tool calls and reasoning: one place for parsers and grammars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from minisgl.text.parsing import gemma_format, harmony
from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.harmony import AnswerSide, read_harmony
from minisgl.text.parsing.json_formats import (
    ARGS,
    BRACE,
    BRACKET,
    CALL_ID,
    END_TOOL_CALL,
    FENCE,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
    read_hermes,
    read_llama3,
    read_mistral,
    read_xlam,
)
from minisgl.text.parsing.named_formats import (
    CALL,
    CALLS,
    END_CALL,
    END_CALLS,
    END_FUNCTION,
    FUNCTION,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALLS,
    KIMI_END_CALL,
    KIMI_END_CALLS,
    KIMI_FUNCTIONS,
    OTHER_CALLS,
    RECIPIENT,
    SEPARATOR,
    TEXT,
    read_deepseek,
    read_functionary_v3_1,
    read_functionary_v3_2,
    read_kimi,
)
from minisgl.text.parsing.python_format import (
    LFM_END,
    LFM_START,
    PYTHON_END,
    PYTHON_START,
    read_lfm2,
    read_pythonic,
)
from minisgl.text.parsing.reader import Reading
from minisgl.text.parsing.tagged_format import (
    DSML,
    DSML_TOKEN,
    GLM,
    MINIMAX,
    SEED,
    XML,
    Tags,
    read_tagged,
)

# A grammar looks for the beginnings of so many tools' calls in a text; with more of them each
# token would take too long, and calls without a marker are the whole answer.
MAX_HELD_IN_TEXT = 64
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ArgumentStyle(Enum):
    """How the arguments of a call are written."""

    JSON = "json"  # an object
    TAGS = "tags"  # the name and the value of each between tags, strings as plain text
    QUOTED = "quoted"  # NAME:VALUE for each, with `,` between them and a token around strings
    PYTHON = "python"  # NAME=LITERAL for each, with `, ` between them


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a model writes its calls:

    begin, then for each call head + name + middle + arguments + tail with `between` after all but
    the last, then end. Where the model says so, a text begins with `text`, and calls after it with
    `after_text`; or a text before calls is `aside`.
    """

    head: str
    middle: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    arguments: ArgumentStyle = ArgumentStyle.JSON
    tags: tuple[str, str, str] = ("", "", "")  # before a name, before its value and after it
    text: str = ""
    after_text: str = ""
    aside: tuple[str, str] = ("", "")  # what is around a text that comes before calls
    single: bool = False  # an answer has one call at most
    numbered: bool = False  # each name has `:` and a number behind it
    json_tag: str = ""  # the second of `tags` where a value is JSON, if it is another one then

    def first(self, name: str) -> str:
        """What comes before the arguments of the first call."""
        return f"{self.begin}{self.head}{name}{self.middle}"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A family's format of tool calls: its facts, and how it is read."""

    name: str
    spelling: CallSpelling
    markers: tuple[str, ...]  # what may be a single token
    openings: tuple[str, ...]  # the markers that begin calls wherever they are
    # Given the opening: a marker, which has been read; one of `in_text`, which comes next; or "".
    # None: a MessageFormat reads them.
    read: Callable[[CallContext, str], Reading[bool]] | None
    closing: str = ""  # without text where it stands after a call
    bare: bool = False  # an answer may begin with calls, without an opening
    in_text: tuple[str, ...] = ()  # what may begin calls of offered tools in a text


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a block of reasoning, and what must follow the closing one."""

    open: str
    close: str
    after: str = ""
    title: str = ""  # what the model writes behind the opening one, which is markup


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How an answer is a chain of messages, whose headers tell reasoning, calls and text apart."""

    markers: tuple[str, ...]
    read: Callable[[CallContext, AnswerSide], Reading[None]]
    start: str  # begins each message, that of the generation prompt as well
    role: str  # follows it
    text: str  # the header of what the user sees
    body: str  # the marker at the end of each header
    efforts: tuple[str, ...]  # how much the model can think, from little to much
    tools: tuple[str, ...]  # that it knows by itself, and nothing here runs

    def nearest_effort(self, effort: str | None) -> str | None:
        """The effort of the model's that is nearest to one of EFFORTS."""
        if effort is None or effort in self.efforts:
            return effort
        wanted = EFFORTS.index(effort)
        return min(self.efforts, key=lambda known: abs(EFFORTS.index(known) - wanted))


THINK = ReasoningFormat("<think>", "</think>")
MAGISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
THOUGHT = ReasoningFormat("<|channel>", "<channel|>", title="thought\n")
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")

HERMES = CallFormat(
    "hermes",
    CallSpelling(
        head=f'{TOOL_CALL}\n{{"name": "',
        middle='", "arguments": ',
        tail=f"}}\n{END_TOOL_CALL}",
        between="\n",
    ),
    markers=(TOOL_CALL, END_TOOL_CALL),
    openings=(TOOL_CALL,),
    read=read_hermes,
    closing=END_TOOL_CALL,
)


def _tagged(
    name: str, tags: Tags, spelling: CallSpelling, markers: tuple[str, ...] = ()
) -> CallFormat:
    """A format with tags around names and values; markers: what may be single tokens, by default
    the two around a call."""
    return CallFormat(
        name,
        spelling,
        markers or (tags.call, tags.end_call),
        openings=(tags.call, tags.opening) if tags.function else (tags.call,),
        read=partial(read_tagged, tags),
        closing=tags.end_call,
    )


def _one_block(tags: Tags, after_key: str, json_tag: str = "") -> CallSpelling:
    """All calls of an answer between one pair of markers."""
    return CallSpelling(
        head=tags.opening,
        middle='">\n',
        tail=f"{tags.end_function}\n",
        between="",
        begin=f"{tags.call}\n",
        end=tags.end_call,
        arguments=ArgumentStyle.TAGS,
        tags=(tags.key, after_key, f"{tags.end_parameter}\n"),
        json_tag=json_tag,
    )


QWEN3_CODER = _tagged(
    "qwen3_coder",
    XML,
    CallSpelling(
        head=f"{XML.call}\n{XML.opening}",
        middle=">\n",
        tail=f"{XML.end_function}\n{XML.end_call}",
        between="\n",
        arguments=ArgumentStyle.TAGS,
        tags=(XML.key, ">\n", f"\n{XML.end_parameter}\n"),
    ),
)
SEED_OSS = _tagged(
    "seed_oss",
    SEED,
    replace(
        QWEN3_CODER.spelling,
        head=f"{SEED.call}\n{SEED.opening}",
        tail=f"{SEED.end_function}\n{SEED.end_call}",
        tags=(SEED.key, ">", f"{SEED.end_parameter}\n"),
    ),
)
MINIMAX_M2 = _tagged("minimax_m2", MINIMAX, _one_block(MINIMAX, '">'))
DEEPSEEK_V32 = _tagged(
    "deepseek_v32",
    DSML,
    _one_block(DSML, '" string="true">', json_tag='" string="false">'),
    markers=(DSML_TOKEN,),
)
GLM45 = _tagged(
    "glm45",
    GLM,
    CallSpelling(
        head=GLM.call,
        middle="\n",
        tail=GLM.end_call,
        between="\n",
        arguments=ArgumentStyle.TAGS,
        tags=(GLM.key, f"{GLM.after_name}\n{GLM.value}", f"{GLM.end_parameter}\n"),
    ),
    markers=(
        *(GLM.call, GLM.end_call, GLM.parameter, GLM.after_name, GLM.value, GLM.end_parameter),
    ),
)
GLM47 = replace(
    GLM45,
    name="glm47",
    spelling=replace(
        GLM45.spelling,
        middle="",
        between="",
        tags=(GLM.key, f"{GLM.after_name}{GLM.value}", GLM.end_parameter),
    ),
)
LLAMA3_JSON = CallFormat(
    "llama3_json",
    CallSpelling(head='{"name": "', middle='", "parameters": ', tail="}", between="; "),
    markers=(PYTHON_TAG,),
    openings=(PYTHON_TAG,),
    read=read_llama3,
    bare=True,
    in_text=(BRACE,),
)
PYTHONIC = CallFormat(
    "pythonic",
    CallSpelling(
        head="",
        middle="(",
        tail=")",
        between=", ",
        begin="[",
        end="]",
        arguments=ArgumentStyle.PYTHON,
    ),
    markers=(PYTHON_START, PYTHON_END),
    openings=(PYTHON_START,),
    read=read_pythonic,
    closing=PYTHON_END,
    bare=True,
    in_text=(BRACKET,),
)
LFM2 = CallFormat(
    "lfm2",
    replace(PYTHONIC.spelling, begin=f"{LFM_START}[", end=f"]{LFM_END}"),
    markers=(LFM_START, LFM_END),
    openings=(LFM_START,),
    read=read_lfm2,
    closing=LFM_END,
)
XLAM = CallFormat(
    "xlam",
    CallSpelling(
        head='{"name": "', middle='", "arguments": ', tail="}", between=", ", begin="[", end="]"
    ),
    markers=(TOOL_CALLS,),
    openings=(TOOL_CALLS,),
    read=read_xlam,
    bare=True,
    in_text=(BRACKET, FENCE),
)
FUNCTIONARY_V3_1 = CallFormat(
    "functionary_v3_1",
    CallSpelling(head=FUNCTION, middle=">", tail=END_FUNCTION, between=""),
    markers=(FUNCTION, PYTHON_TAG),
    openings=(FUNCTION, PYTHON_TAG),
    read=read_functionary_v3_1,
)
# The prompt ends with the RECIPIENT of the first part of the answer.
FUNCTIONARY_V3_2 = CallFormat(
    "functionary_v3_2",
    CallSpelling(head="", middle="\n", tail="", between=RECIPIENT, text=TEXT, after_text=RECIPIENT),
    markers=(),
    openings=(),
    read=read_functionary_v3_2,
    bare=True,
    in_text=(RECIPIENT,),
)
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    CallSpelling(
        head=f"{CALL}function{SEPARATOR}",
        middle="\n```json\n",
        tail=f"\n```{END_CALL}",
        between="\n",
        begin=CALLS,
        end=END_CALLS,
    ),
    markers=(CALLS, OTHER_CALLS, CALL, SEPARATOR, END_CALL, END_CALLS),
    openings=(CALLS, OTHER_CALLS, CALL),
    read=read_deepseek,
    closing=END_CALLS,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    spelling=replace(DEEPSEEK_V3.spelling, head=CALL, middle=SEPARATOR, tail=END_CALL, between=""),
)
KIMI_K2 = CallFormat(
    "kimi_k2",
    CallSpelling(
        head=f"{KIMI_CALL}{KIMI_FUNCTIONS}",
        middle=KIMI_ARGUMENTS,
        tail=KIMI_END_CALL,
        between="",
        begin=KIMI_CALLS,
        end=KIMI_END_CALLS,
        numbered=True,
    ),
    markers=(KIMI_CALLS, KIMI_CALL, KIMI_ARGUMENTS, KIMI_END_CALL, KIMI_END_CALLS),
    openings=(KIMI_CALLS, KIMI_CALL),
    read=read_kimi,
    closing=KIMI_END_CALLS,
)
GEMMA4 = CallFormat(
    "gemma4",
    CallSpelling(
        head=f"{gemma_format.CALL}{gemma_format.PREFIX}",
        middle="{",
        tail="}" + gemma_format.END_CALL,
        between="",
        arguments=ArgumentStyle.QUOTED,
    ),
    markers=(gemma_format.CALL, gemma_format.END_CALL, gemma_format.QUOTE),
    openings=(gemma_format.CALL,),
    read=gemma_format.read_gemma,
    closing=gemma_format.END_CALL,
)
MISTRAL = CallFormat(
    "mistral",
    CallSpelling(head=TOOL_CALLS, middle=ARGS, tail="", between=""),
    markers=(TOOL_CALLS, ARGS, CALL_ID),
    openings=(TOOL_CALLS,),
    read=read_mistral,
)
# Tokenizers before version 11; all that an answer has is read the same.
MISTRAL_LIST = replace(MISTRAL, spelling=replace(XLAM.spelling, begin=f"{TOOL_CALLS}["))
# A call ends the answer, so there is one at most.
HARMONY = CallFormat(
    "harmony",
    CallSpelling(
        head=f"{harmony.CHANNEL}{harmony.COMMENTARY} to={harmony.FUNCTIONS}",
        middle=f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        tail="",
        between="",
        text=harmony.opening(harmony.FINAL),
        aside=(harmony.opening(harmony.COMMENTARY), harmony.NEXT),
        single=True,
    ),
    markers=harmony.MARKERS,
    openings=(),
    read=None,
)
HARMONY_MESSAGES = MessageFormat(
    harmony.MARKERS,
    read_harmony,
    start=harmony.START,
    role=harmony.ROLE,
    text=harmony.opening(harmony.FINAL),
    body=harmony.MESSAGE,
    efforts=("low", "medium", "high"),
    tools=("browser", "python"),
)
ANALYSIS = ReasoningFormat(
    harmony.opening(harmony.ANALYSIS),
    harmony.END,
    after=harmony.NEXT.removeprefix(harmony.END),
)

CALL_FORMATS = (
    HERMES,
    QWEN3_CODER,
    LLAMA3_JSON,
    PYTHONIC,
    MISTRAL,
    XLAM,
    FUNCTIONARY_V3_1,
    FUNCTIONARY_V3_2,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    GEMMA4,
    HARMONY,
    KIMI_K2,
    LFM2,
    MINIMAX_M2,
    SEED_OSS,
)
REASONING_FORMATS = (THINK, MAGISTRAL, THOUGHT, SEED_THINK)
# What begins calls in a text.
OPENINGS = tuple(dict.fromkeys(text for form in CALL_FORMATS for text in form.openings))
