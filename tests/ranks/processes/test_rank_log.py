"""The log lines of ranks."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest

from minisgl.ranks.processes import worker
from minisgl.ranks.processes.rank_log import LogForm, begin_log, own_form, text_form
from minisgl_cli.logs import JSONFormatter, set_up_logging

pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_a_rank_writes_as_the_process_that_has_started_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for form in ("json", "text"):
        set_up_logging(name="replica 1", form=form)
        sent = pickle.dumps(own_form())  # to the process of the rank, which has no handlers yet
        for logger in ("", "minisgl"):
            monkeypatch.setattr(logging.getLogger(logger), "handlers", [])
            monkeypatch.setattr(logging.getLogger(logger), "propagate", True)
        begin_log(3, pickle.loads(sent))
        logging.getLogger("another").warning("It\nis late")
        logging.getLogger("another").info("not shown")
        lines.append(capsys.readouterr().err)
    record = json.loads(lines[0])
    assert [record[name] for name in ("process", "level", "logger", "message")] == [
        "replica 1, rank 3",
        "WARNING",
        "another",
        "It\nis late",
    ]
    assert lines[1].endswith(" WARNING replica 1, rank 3: It\nis late\n")


def test_ranks_of_a_program_write_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "handlers", [logging.StreamHandler()])
    assert own_form() is text_form
    record = logging.makeLogRecord({"msg": "It is late"})
    assert text_form("rank 1").format(record) == "rank 1: It is late"


def test_a_rank_has_the_form_of_the_process_that_has_made_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[int, LogForm]] = []
    ended: list[BaseException] = []
    monkeypatch.setattr(worker, "begin_log", lambda *given: begun.append(given))
    monkeypatch.setattr(worker, "exit_with", lambda _, error: ended.append(error))
    monkeypatch.setattr(worker, "_beat", lambda _: None)
    set_up_logging(form="json")
    nothing: Any = None  # with which a rank fails
    spec = worker.RankSpec(2, nothing, nothing)
    worker.run_rank(spec, nothing)
    [(rank, form)] = begun
    assert rank == 2 and isinstance(form("rank 2"), JSONFormatter)
    assert len(ended) == 1
