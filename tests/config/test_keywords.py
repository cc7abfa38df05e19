"""The options of LLM: the same as the engine's, with types, and errors in Python's words."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import IntEnum, StrEnum
from os import PathLike
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_overloads, get_type_hints

import numpy
import pytest
import torch
from support.folders import ROOT

from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig, EngineOptions, Text, config_of, option_names
from minisgl.config.keywords import TorchDevice, TorchDtype
from minisgl.errors import ConfigError
from minisgl.sampling_options import ChatOptions, SamplingOptions

BY_NAME = Mapping[str, Text]


def test_the_keywords_are_the_fields_with_their_types_and_choices() -> None:
    keywords, hints = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    specs = {spec.name: spec for spec in fields(EngineConfig)}
    of_keyword = {
        spelling.removeprefix("--").replace("-", "_"): name
        for name, spec in specs.items()
        for spelling in option_names(spec)
    }
    assert {*keywords} == {*of_keyword}
    for keyword, name in of_keyword.items():
        kinds, expected = parts(keywords[keyword]), parts(hints[name])
        literals = [part for part in kinds if get_origin(part) is Literal]
        choices = tuple(value for part in literals for value in get_args(part))
        assert choices == specs[name].metadata["choices"]
        others = {*kinds} - {*literals, TorchDtype, TorchDevice, PathLike[str], BY_NAME}
        of_list = {str} if get_origin(hints[name]) is tuple else set()  # one may stand alone
        assert others == ({*expected} | of_list) - ({str} if choices else set())
        assert (TorchDtype in kinds) == (name == "dtype")
        assert (TorchDevice in kinds) == (name == "device")
        assert (BY_NAME in kinds) == (name == "lora")


def parts(hint: Any) -> tuple[Any, ...]:
    """The types of a union, and the type itself where it is none."""
    return get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)


class Loud(str):
    def __str__(self) -> str:
        return self.upper()


class Precision(StrEnum):
    HALF = "float16"


class Size(IntEnum):
    SMALL = 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": Path("/models/a b")}, {"model": "/models/a b"}),
        ({"model_path": "m", "max_model_len": 9}, {"model": "m", "max_seq_len_override": 9}),
        (
            {"tensor_parallel_size": 2, "pp_size": 3, "enable_expert_parallel": True},
            {"tp": 2, "pp": 3, "ep": True},
        ),
        (
            {"gpu_memory_utilization": 0.5, "cache": "naive"},
            {"memory_ratio": 0.5, "cache_type": "naive"},
        ),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        (
            {"dtype": torch.half, "device": torch.device("cpu")},
            {"dtype": "float16", "device": "cpu"},
        ),
        (
            {"chat_template": Path("t"), "host_cache": 1, "disk_cache": Path("/d")},
            {"chat_template": "t", "host_cache": 1, "disk_cache": "/d"},
        ),
        ({"speculative": PurePosixPath("draft")}, {"speculative": "draft"}),
        ({"lora": {"a": Path("/x y"), Loud("b"): "z=1"}}, {"lora": ("a=/x y", "b=z=1")}),
        ({"lora": ["a=x", Loud("b=y")], "max_loras": 1}, {"lora": ("a=x", "b=y"), "max_loras": 1}),
        ({"lora": "a=x", "image_hosts": "h"}, {"lora": ("a=x",), "image_hosts": ("h",)}),
        ({"model": Loud("m"), "dtype": Precision.HALF}, {"model": "m", "dtype": "float16"}),
        (
            {"tp": numpy.int64(2), "memory_ratio": numpy.float32(0.5), "page_size": Size.SMALL},
            {"tp": 2, "memory_ratio": 0.5, "page_size": 4},
        ),
    ],
    ids=lambda each: ",".join(each) if isinstance(each, dict) else "",
)
def test_paths_dtypes_and_all_spellings_are_taken(
    options: dict[str, Any], said: dict[str, Any]
) -> None:
    config = config_of(options)
    assert config == EngineConfig(**said)
    assert all(type(getattr(config, name)) is type(value) for name, value in said.items())


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (
            (),
            {"tensor_parallel_size": 2, "tp_size": 3},
            "tp_size=3: the same option is given by te",
        ),
        ((), {"tp": 1, "tensor_parallel_size": 2}, "tensor_parallel_size=2: the same option is"),
        (
            *((), {"max_model_len": 9, "max_seq_len_override": 9}),
            "max_seq_len_override=9: the same option is given by max_model_len, too; allowed: one",
        ),
        (("m",), {"model": "n"}, "model='n': the model is the first argument, too; allowed: one"),
        (("m",), {"model_path": "m"}, "model_path='m': the same option is given by model, too"),
    ],
)
def test_an_option_that_is_given_twice_is_refused_by_both_names(
    arguments: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(*arguments, **options)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"foo": 1}, "foo=1: there is no such option; allowed: model, dtype, device"),
        ({"page_sise": 4}, "page_sise=4: there is no such option; did you mean page_size? "),
        ({"max_modl_len": 9}, "max_modl_len=9: there is no such option; did you mean max_model_l"),
        ({"max_num_seqs": 1}, "max_num_seqs=1: there is no such option; did you mean max_running"),
        ({"max_model_len": 0}, "max_model_len=0: allowed: 1 or more"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size='2': allowed: a whole number"),
        ({"dtype": torch.int8}, "dtype=torch.int8: allowed: 'auto', 'bfloat16', 'float16' or 'fl"),
        ({"device": torch.device("cuda:1")}, "device=device(type='cuda', index=1): allowed: 'au"),
        ({"model": b"m"}, "model=b'm': allowed: a text"),
        ({"dtype": "bf16"}, "dtype='bf16': allowed: 'auto', 'bfloat16', 'float16' or 'float32'"),
        ({"tp": True}, "tp=True: allowed: a whole number"),
        ({"lora": 3}, "lora=3: allowed: a list of texts"),
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


@pytest.mark.parametrize(
    ("option", "what_to_do"),
    [
        ({"revision": "v1"}, "download it with `hf download ID --revision"),
        ({"seed": 0}, "a request has its own"),
        ({"tokenizer": "folder"}, "it is read from the folder of the model"),
        ({"trust_remote_code": True}, "leave it out"),
    ],
)
def test_an_option_of_other_engines_is_refused_with_what_to_do(
    option: dict[str, Any], what_to_do: str
) -> None:
    with pytest.raises(ConfigError, match=f"no such option; {what_to_do}"):
        config_of({"max_model_len": 64, **option})


def test_the_keywords_of_sampling_are_the_fields_with_their_types() -> None:
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)


def test_mypy_checks_the_keywords(tmp_path: Path) -> None:
    """Of functions with the signatures of LLM, whose module has too much to check."""
    for function, name, options in (
        (LLM.__init__, "options", EngineOptions),
        (LLM.generate, "sampling", SamplingOptions),
        *(
            (each, "options", ChatOptions)
            for each in (LLM.chat, LLM.stream, *get_overloads(LLM.chat))
        ),
    ):
        annotation = inspect.signature(function, eval_str=True).parameters[name].annotation
        assert annotation == Unpack[options]
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from typing import Unpack\n"
        "from minisgl.config.keywords import EngineOptions, Text\n"
        "from minisgl.sampling_options import ChatOptions, SamplingOptions\n"
        "class Dtype:\n"
        "    is_floating_point: bool\n"
        "    itemsize: int\n"
        "class Device:\n"
        "    type: str\n"
        "    index: int\n"
        'def load(model: Text = "", /, **options: Unpack[EngineOptions]) -> None: ...\n'
        "def generate(**sampling: Unpack[SamplingOptions]) -> None: ...\n"
        "def chat(**options: Unpack[ChatOptions]) -> None: ...\n"
        'load("model", dtype="bfloat16", tp=2, page_size=None)\n'
        'load(model="model", device=Device())\n'
        'load(Path("model"), dtype=Dtype(), chat_template=Path("x"), max_model_len=4)\n'
        'generate(temperature=0, max_tokens=8, stop=["a"], logit_bias={3: 1})\n'
        "chat(temperature=0.5, enable_thinking=False)\n"
        'load(dtype="bf16")  # wrong\n'
        'load(device="gpu")  # wrong\n'
        "load(foo=1)  # wrong\n"
        'load(page_size="4")  # wrong\n'
        'load(tensor_parallel_size="4")  # wrong\n'
        'generate(temperature="hot")  # wrong\n'
        "generate(max_token=8)  # wrong\n"
        "generate(enable_thinking=True)  # wrong\n"
        "chat(stop=5)  # wrong\n"
        "chat(temprature=5)  # wrong\n"
    )
    # With the options of the configuration, whose results for these modules are there already.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": "."},
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = [int(line.partition("script.py:")[2].partition(":")[0]) for line in errors]
    lines = script.read_text().splitlines()
    assert found == [number for number, line in enumerate(lines, 1) if "# wrong" in line]


@pytest.mark.parametrize(
    ("protocol", "value"), [(TorchDtype, torch.bfloat16), (TorchDevice, torch.device("cpu"))]
)
def test_dtypes_and_devices_of_torch_have_the_type_of_the_keyword(
    protocol: type, value: object
) -> None:
    """mypy would take minutes to read torch."""
    names = [name for name in vars(protocol) if isinstance(vars(protocol)[name], property)]
    assert len(names) == 2 and all(hasattr(value, name) for name in names)
