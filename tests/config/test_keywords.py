"""The options of LLM: the same as the engine's, with types, and errors in Python's words."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

import pytest

from minisgl import LLM
from minisgl.config import EngineConfig, EngineOptions
from minisgl.errors import ConfigError


def test_the_keywords_are_the_fields_with_their_types_and_choices() -> None:
    keywords, hints = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    del hints["model"]  # the positional argument
    assert list(keywords) == list(hints)
    for spec in fields(EngineConfig)[1:]:
        keyword, hint = keywords[spec.name], hints[spec.name]
        parts = get_args(keyword) if get_origin(keyword) is not Literal else (keyword,)
        literals = [part for part in parts if get_origin(part) is Literal]
        choices = tuple(value for part in literals for value in get_args(part))
        assert choices == spec.metadata["choices"]
        if choices:
            assert (NoneType in parts) is (NoneType in get_args(hint))
        else:
            assert keyword == hint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"foo": 1}, "foo=1: there is no such option; allowed: model, dtype, device"),
        ({"page_sise": 4}, "page_sise=4: there is no such option; did you mean page_size? "),
        ({"max_model_len": 9}, "max_model_len=9: there is no such option; did you mean max_seq_l"),
        ({"gpu_memory_utilization": 1}, "gpu_memory_utilization=1: there is no such option; did y"),
        ({"dtype": "bf16"}, "dtype='bf16': allowed: 'auto', 'bfloat16', 'float16' or 'float32'"),
        ({"tp": "2"}, "tp='2': allowed: a whole number"),
        ({"disk_cache": "x"}, "disk_cache='x': it keeps what falls out of host_cache, which is"),
        ({"chat_template": "no"}, "chat_template='no': there is no such file; allowed: a file"),
        ({"device": "cpu", "attn": "fi"}, "attn='fi': "),
    ],
)
def test_a_wrong_keyword_is_refused_in_words_of_python(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**options)
    assert str(refused.value).startswith(said)
    assert "--" not in str(refused.value)


def test_mypy_checks_the_keywords(tmp_path: Path) -> None:
    """Of a function with the signature of LLM, whose module has too much to check."""
    signature = inspect.signature(LLM.__init__, eval_str=True)
    assert signature.parameters["options"].annotation == Unpack[EngineOptions]
    script = tmp_path / "script.py"
    script.write_text(
        "from typing import Unpack\n"
        "from minisgl.config.keywords import EngineOptions\n"
        'def load(model: str = "", **options: Unpack[EngineOptions]) -> None: ...\n'
        'load("model", dtype="bfloat16", tp=2, page_size=None)\n'
        'load(dtype="bf16")\n'
        "load(foo=1)\n"
        'load(page_size="4")\n'
    )
    quick = ("--follow-imports=silent", "--ignore-missing-imports", "--no-error-summary")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *quick, str(script)], capture_output=True, text=True
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.partition("script.py:")[2][:2] for line in errors] == ["5:", "6:", "7:"]
