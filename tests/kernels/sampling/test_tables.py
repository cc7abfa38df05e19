"""The records of the slot tables."""

from __future__ import annotations

import torch

from minisgl.kernels.sampling.tables import (
    FLOATS,
    INTEGERS,
    RECORD_WORDS,
    SamplingTables,
    column_of,
    masked_of,
    pack_record,
)
from minisgl.request import SAMPLED, SamplingParams


def test_the_numbers_of_the_columns_have_no_gaps_and_no_equals() -> None:
    for columns in (INTEGERS, FLOATS):
        assert sorted(columns.values()) == list(range(len(columns)))


def test_a_record_has_each_parameter_in_its_column() -> None:
    values = {
        parameter.name: min(parameter.kind(place + 1), parameter.kind(parameter.high))
        for place, parameter in enumerate(SAMPLED)
    }
    params = SamplingParams(**values)
    packed = pack_record(params, seed=-9, num_edits=7, num_prompt_tokens=8, masked=True)
    record = torch.frombuffer(bytearray(packed), dtype=torch.int64)
    assert record.shape == (RECORD_WORDS,) and masked_of(record)
    values |= {"seed": -9, "num_edits": 7, "num_prompt_tokens": 8}
    assert {name: column_of(record, name).item() for name in (*INTEGERS, *FLOATS)} == values


def test_a_slot_that_no_request_has_had_is_greedy_with_neutral_parameters() -> None:
    tables = SamplingTables(3, 100, torch.device("cpu"))
    assert not masked_of(tables.records).any()
    for parameter in SAMPLED:
        expected = 0 if parameter.name == "temperature" else parameter.default
        assert column_of(tables.records, parameter.name).tolist() == [expected] * 3


def test_a_filter_below_zero_is_stored_as_off() -> None:
    packed = pack_record(SamplingParams(top_k=-1), seed=0, num_edits=0, num_prompt_tokens=1)
    assert column_of(torch.frombuffer(bytearray(packed), dtype=torch.int64), "top_k") == 0
