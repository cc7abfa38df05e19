"""A toy model of the harmony format: its vocabulary and a chat template of the published form."""

from __future__ import annotations

from support.toy_tokenizers import with_tokens

from minisgl.text.parsing.harmony import MARKERS
from minisgl.text.tokenizer import Tokenizer

# A message with calls shows its first one only, and has reasoning or a text in the analysis; this
# is left out once a final answer has followed. The result of a call names the last one's function.
TEMPLATE = """\
<|start|>system<|message|>You are a toy.

Reasoning: {{ reasoning_effort or 'medium' }}
{%- if builtin_tools %}{{ builtin_tools | tojson }}{% endif %}<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {
{%- for tool in tools %}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{%- endfor %}
}<|end|>
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('one of content and thinking') }}
{%- endif %}
{%- set final = namespace(follows=false) %}
{%- for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}
{%- set final.follows = true %}
{%- endif %}
{%- endfor %}
{%- if (message.content or message.thinking) and not final.follows %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) }}
{{- '<|end|>' }}
{%- endif %}
{%- set called = message.tool_calls[0].function %}
{%- set last.name = called.name %}
{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
{{- called.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if '<|channel|>' in message.content %}{{ raise_exception('markup in content') }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif loop.first %}
{{- '<|start|>developer<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def gpt_oss() -> Tokenizer:
    return with_tokens(special=MARKERS, chat_template=TEMPLATE)
