"""The READMEs' tables of options and request fields agree with the types."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from typing import Any

import pytest
from gpu_checks import LIST, SHOWN, read_checks
from support.folders import ROOT

from minisgl import __version__
from minisgl.bench.config import BenchConfig, LatencyConfig, OfflineConfig, ReportConfig
from minisgl.bench.online.load_config import LoadConfig
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.config import EngineConfig, option_names
from minisgl.models.adopted.architectures import ADOPTED, TOWERS
from minisgl.models.registry import FAMILIES
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.apis.messages.request_types import MessagesRequest
from minisgl.server.apis.responses.request_types import ResponsesRequest
from minisgl.server.apis.vectors.answer_types import (
    EmbeddingItem,
    EmbeddingList,
    RankedList,
    RankedResult,
    ScoreItem,
    ScoreList,
)
from minisgl.server.apis.vectors.request_types import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl.server.config import ServerConfig
from minisgl.server.endpoints import ENDPOINTS
from minisgl.server.openapi import ERRORS
from minisgl.server.requests.chat_messages import Message
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from minisgl_cli.batch import BatchConfig
from minisgl_cli.chat.config import ChatConfig
from minisgl_cli.options import ConfigFile

README = (ROOT / "README.md").read_text()
SERVER_README = (ROOT / "minisgl/server/README.md").read_text()
CLI, BENCH = "cli/README.md", "minisgl/bench/README.md"
# The page, the heading above the table, and whose options it has.
TABLES: list[tuple[str, str, Any]] = [
    (CLI, "Engine", EngineConfig),
    ("minisgl/server/README.md", "Server", ServerConfig),
    ("minisgl/router/README.md", "Replicas", RouterConfig),
    ("minisgl/ray/README.md", "Ray", RayConfig),
    (CLI, "Chat", ChatConfig),
    (CLI, "Batch", BatchConfig),
    (BENCH, "Benchmark", BenchConfig),
    (BENCH, "Offline", OfflineConfig),
    (BENCH, "Latency", LatencyConfig),
    (BENCH, "Workload", WorkloadConfig),
    (BENCH, "Load", LoadConfig),
    (BENCH, "Report", ReportConfig),
]


def test_the_first_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(README.partition("```python\n")[2].partition("```")[0])
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_the_front_page_is_short() -> None:
    assert len(README.split()) <= 1200


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "[{} other decoders](minisgl/models/README.md#adopted-models)"),
        ("README.md", "the text parts of {1} multimodal models with transformers' code"),
        (
            ".github/COMPARISON.md",
            "[{} other decoders](../minisgl/models/README.md#adopted-models)",
        ),
        (".github/COMPARISON.md", "text parts of {1} multimodal ones"),
        (BENCH, "the [{} other decoders and the {} text parts]"),
    ],
)
def test_pages_count_the_architectures_as_they_are(page: str, words: str) -> None:
    counts = (len(ADOPTED - FAMILIES.keys()), len(TOWERS))
    assert words.format(*counts) in (ROOT / page).read_text()


def test_the_page_of_measurements_names_the_gpus_on_which_checks_have_run() -> None:
    tried = (ROOT / BENCH).read_text().partition("## What was tried\n")[2]
    named = set(re.findall(r"^\| (NVIDIA [\w ]+):", tried, re.MULTILINE))
    runs = [(name, run) for check in read_checks(LIST) for name, run in check.runs.items()]
    assert named == {name for name, run in runs if run.verdict in SHOWN}


def row(spec: Field[Any]) -> str:
    names = ", ".join(f"`{name}`" for name in option_names(spec))
    unset = spec.default in (None, "", ())  # the help says what happens then
    value = ",".join(spec.default) if isinstance(spec.default, tuple) else spec.default
    default = "" if unset else "off" if value is False else f"`{value}`"
    return f"| {names} | {default} | {spec.metadata['help']} |"


def test_the_changelog_begins_with_this_release_and_names_options_that_there_are() -> None:
    log = (ROOT / ".github/CHANGELOG.md").read_text()
    newest, *_ = releases = re.findall(r"^## ([\d.]+) - \d{4}-\d\d-\d\d\n", log, re.MULTILINE)
    assert newest == __version__ and len(releases) == log.count("\n## ")
    notes = (ROOT / ".github/RELEASE_NOTES.md").read_text()
    assert notes.startswith(f"# minisgl {newest}\n")
    specs = (spec for _, _, config in TABLES for spec in fields(config))
    there = {"--config"}.union(*map(option_names, specs))
    upgrading = notes.partition("## What is gone")[0]
    for text in (log.partition("### Removed")[0], upgrading):
        assert {*re.findall(r"--[a-z][a-z-]+", text)} - there == set()


@pytest.mark.parametrize(
    ("file", "heading", "config"),
    TABLES,
)
def test_the_option_tables_list_every_option_with_default_and_help(
    file: str, heading: str, config: Any
) -> None:
    section = (ROOT / file).read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    expected = [row(spec) for spec in fields(config)]
    assert rows == expected, "The table should be:\n" + "\n".join(expected)


def test_the_option_of_the_config_file_is_documented_as_its_help_says() -> None:
    (of_file,) = ConfigFile.__metadata__
    assert f"\n| `--config` |  | {of_file.help} |\n" in (ROOT / CLI).read_text()


def test_the_server_reference_lists_every_request_field() -> None:
    section = SERVER_README.partition("### In detail\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_.]+)", section))
    named |= {name.rpartition(".")[2] for name in named}
    # The bodies of requests, and StreamOptions and Message, which are inside them.
    structs = (
        *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
        *(StreamOptions, Message),
    )
    fields = {name for struct in structs for name in struct.__struct_fields__}
    assert fields - named == {"role", "tokens"}  # said of `messages`, and of the endpoint


def test_the_server_reference_names_every_field_of_the_messages_api() -> None:
    section = SERVER_README.partition("## Anthropic's Messages API\n")[2].partition("\n## ")[0]
    for field in MessagesRequest.__struct_fields__:
        assert f"`{field}`" in section or f"`{field}." in section, field


def test_the_server_reference_lists_every_field_of_the_responses_api() -> None:
    section = SERVER_README.partition("## The Responses API\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)", section))
    assert not {*ResponsesRequest.__struct_fields__} - named


def test_the_server_reference_lists_every_field_of_vectors_and_scores() -> None:
    section = SERVER_README.partition("## Vectors and scores\n")[2].partition("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    fields = {*EmbeddingRequest.__struct_fields__, *RerankRequest.__struct_fields__}
    assert {*re.findall(r"`([a-z_0-9]+)`", rows)} == fields | {*ScoreRequest.__struct_fields__}
    for kind in (EmbeddingList, EmbeddingItem, RankedList, RankedResult, ScoreList, ScoreItem):
        for field in kind.__struct_fields__:
            assert f'"{field}"' in section, field


def test_the_server_reference_names_the_modules_that_there_are() -> None:
    section = SERVER_README.partition("## The modules\n")[2]
    server, named = ROOT / "minisgl/server", dict[str, set[str]]()
    for row in section.splitlines():
        if row.startswith("| `"):
            _, first, about, _ = row.split("|")
            folder, is_folder, _ = first.strip(" `").partition("/")
            names = about if is_folder else first
            own = named.setdefault(folder if is_folder else "", set())
            own.update(re.findall(r"`([a-z_]+)`", names))
    for folder in ("", "http", "requests", "answers"):
        assert named[folder] == {path.stem for path in (server / folder).glob("[a-z]*.py")}


def test_the_server_reference_lists_every_endpoint_and_status() -> None:
    section = SERVER_README.partition("## Endpoints\n")[2].partition("\n## ")[0]
    _, _, no_key = section.partition("`GET /` and `GET /docs`")
    for each in ENDPOINTS:
        shown = re.sub(r"{(\w+)}", lambda found: found[1].upper(), each.shown_path)
        assert f"`{each.method} {shown}`" in section
        assert (f"`{shown}`" in no_key) == each.is_open
    section = SERVER_README.partition("## Errors\n")[2].partition("\n## ")[0]
    firsts = [row.split("|")[1] for row in section.splitlines() if row.startswith(("| 4", "| 5"))]
    documented = {int(status) for first in firsts for status in first.split(",")}
    assert documented == {*ERRORS, 405}
