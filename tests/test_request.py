"""Validation of sampling parameters."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from minisgl.errors import InvalidRequestError
from minisgl.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    ToolCall,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 1.5),
        ("top_n_sigma", -1.1),
        ("top_n_sigma", 100.5),
        ("top_n_sigma", math.nan),
        ("top_n_sigma", "2"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**63),
        ("min_tokens", -1),
        ("min_tokens", 2**63),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("logprobs", 129),
        ("prompt_logprobs", -1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", (7,)),
        ("stop", 5),
        ("bad_words", 5),
        ("allowed_token_ids", 5),
        ("stop_token_ids", (-1,)),
        ("logprob_token_ids", (-1,)),
        ("logprob_token_ids", 5),
        ("logprob_token_ids", (1,) * (MAX_LOGPROBS + 1)),
        ("stop_token_ids", "12"),
        ("logit_bias", 5),
        ("logit_bias", [1]),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ],
)
def test_an_invalid_sampling_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("make", "named", "said"),
    [
        (
            SamplingParams,
            {"temprature": 1},
            "temprature: is no sampling parameter; did you mean te",
        ),
        (SamplingParams, {"max_token": 8, "seed": 1}, "max_token: is no sampling parameter; did y"),
        (SamplingParams, {"use_beam_search": True}, "use_beam_search: is no sampling parameter."),
        (
            SamplingParams,
            {"best_of": 2, "n": 2},
            "n: is no sampling parameter; LLM.generate and LLM",
        ),
        (SamplingParams, {"guided_json": {}}, "guided_json: is no sampling parameter."),
        (StructuredOutput, {"jsonschema": {}}, "jsonschema: is no field of a StructuredOutput; di"),
        (partial(replace, SamplingParams()), {"top": 1}, "top: is no sampling parameter; did you"),
    ],
)
def test_a_keyword_that_is_no_field_is_refused_by_name(
    make: Any, named: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        make(**named)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutput])
def test_values_without_a_keyword_are_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"takes its fields by name: \w+=0\.5\.$"):
        kind(0.5, 0.9)


def test_none_stands_for_no_values() -> None:
    fields = dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "bad_words"))
    params: Any = SamplingParams
    assert params(**fields, allowed_token_ids=None) == SamplingParams()


def test_sampling_params_are_a_dataclass_like_any_other() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert list(inspect.signature(SamplingParams).parameters) == [
        each.name for each in fields(params)
    ]


def test_each_choice_has_its_own_seed() -> None:
    params = SamplingParams(seed=7)
    seeds = [params.for_choice(k).seed for k in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert seeds == [params.for_choice(k).seed for k in range(128)]
    assert SamplingParams().for_choice(3).seed is None


@pytest.mark.parametrize("text", ["Paris.", "a\nb\u2028c\r", "long " * 10_000, "🙂" * 500, ""])
def test_the_repr_of_an_output_is_one_short_line(text: str) -> None:
    calls = [ToolCall("f", "{}")]
    output = RequestOutput([1] * 9000, [2] * 300, text, "stop", tool_calls=calls)
    shown = repr(output)
    assert shown.startswith(f"RequestOutput({text[:80]!r}"[:-1])
    assert shown.endswith(", stop, 9000 + 300 tokens, 1 tool call)")
    assert len(shown) < 600 and len(shown.splitlines()) == 1


def test_contradicting_sampling_fields_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="more than max_tokens 3"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_the_limits_of_each_range_are_allowed() -> None:
    SamplingParams(temperature=2, top_p=0, min_p=1, top_k=-1, seed=-(2**63), logprobs=20)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100})


def test_later_changes_of_the_callers_objects_have_no_effect() -> None:
    bias, stop = {1: 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[1], stop[0] = 99.0, "y"
    assert params.logit_bias == {1: 1.0} and params.stop == ("x",)
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured: takes one of json_schema, .*; none was given"),
        ({"regex": "a", "choice": ["b"]}, "2 were given: regex, choice"),
        (
            {"json_schema": {}, "json_object": True, "field": "json_schema"},
            "json_schema: takes one",
        ),
        ({"json_schema": [1]}, "structured.json_schema: must be a JSON schema"),
        ({"regex": 5}, "structured.regex: must be a text"),
        ({"choice": []}, "structured.choice: must be a list of one or more texts"),
        ({"choice": "ab"}, "structured.choice: must be a list of one or more texts"),
        ({"choice": ["a"] * 8193}, "structured.choice: must have at most 8192 entries"),
        ({"choice": ["a", 1]}, "structured.choice: must be a list of one or more texts"),
        ({"json_object": 1}, "structured.json_object: must be true or false"),
        ({"json_object": True, "whitespace_pattern": 1}, "whitespace_pattern: must be a text"),
    ],
)
def test_a_constraint_is_exactly_one_and_of_its_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutput(**fields)


def test_a_broken_call_cuts_what_the_model_ended_and_nothing_else() -> None:
    ends = {reason: reason.with_broken_call() for reason in FinishReason}
    assert ends.pop(FinishReason.STOP) is FinishReason.LENGTH
    assert all(before is after for before, after in ends.items())
