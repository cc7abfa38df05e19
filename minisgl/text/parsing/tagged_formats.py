"""The formats of calls that have tags around names and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from minisgl.text.parsing.call_format import ArgumentStyle, CallFormat, CallSpelling
from minisgl.text.parsing.json_formats import END_TOOL_CALL, TOOL_CALL
from minisgl.text.parsing.tagged_reader import XML, Tags, read_tagged

SEED = Tags("<seed:tool_call>", "</seed:tool_call>")
MINIMAX = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    function="<invoke",
    end_function="</invoke>",
    before_name=' name="',
    after_name='"',
)
DSML_TOKEN = "｜DSML｜"
DSML = Tags(
    f"<{DSML_TOKEN}function_calls>",
    f"</{DSML_TOKEN}function_calls>",
    function=f"<{DSML_TOKEN}invoke",
    end_function=f"</{DSML_TOKEN}invoke>",
    parameter=f"<{DSML_TOKEN}parameter",
    end_parameter=f"</{DSML_TOKEN}parameter>",
    before_name=' name="',
    after_name='"',
    tells_type=True,
)
GLM = Tags(
    TOOL_CALL,
    END_TOOL_CALL,
    function="",
    end_function="",
    parameter="<arg_key>",
    end_parameter="</arg_value>",
    before_name="",
    after_name="</arg_key>",
    value="<arg_value>",
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
FORMATS = (QWEN3_CODER, SEED_OSS, MINIMAX_M2, DEEPSEEK_V32, GLM45, GLM47)
