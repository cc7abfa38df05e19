"""The files of `scripts/deploy`: queries on the metrics of a server, options, probes and times."""

from __future__ import annotations

import asyncio
import configparser
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from support.folders import ROOT, SCRIPTS
from support.promql import Scrape, Vector, evaluated, scraped, selectors
from support.routing import routing
from support.serving import demo_engine
from typer.testing import CliRunner

from minisgl.server.config import ServerConfig
from minisgl.server.endpoints import ENDPOINTS
from minisgl.server.metrics import ABOUT
from minisgl_cli.main import app

DEPLOY = SCRIPTS / "deploy"
DASHBOARD = json.loads((DEPLOY / "dashboard.json").read_text())
[GROUP] = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
[DEPLOYMENT, SERVICE, _] = yaml.safe_load_all((DEPLOY / "kubernetes" / "minisgl.yaml").read_text())
KEDA = yaml.safe_load((DEPLOY / "kubernetes" / "keda.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
OWN_LABELS = {"job": "minisgl", "instance": "server:1919"}
VARIABLES = {"$job": "minisgl", "$instance": ".*", "$__rate_interval": "1m"}
# Metrics that a server without a GPU and without drafts does not have.
MISSING = {
    *("minisgl_gpu_memory_used_bytes", "minisgl_gpu_memory_total_bytes"),
    *("minisgl_drafted_tokens_total", "minisgl_accepted_draft_tokens_total"),
}
DRAIN_S = next(spec for spec in fields(ServerConfig) if spec.name == "drain_timeout").default


class Scrapes(NamedTuple):
    before: Scrape
    after: Scrape


def panel_queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield f"{panel['title']} {target['refId']}", query


PANELS = dict(panel_queries())
QUERIES = {
    **PANELS,
    **{name: rule["expr"] for name, rule in ALERTS.items()},
    "KEDA": KEDA["spec"]["triggers"][0]["metadata"]["query"],
}


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Scrapes:
    """Metrics of a router and its replica before and after some requests."""

    async def pages() -> list[str]:
        folder = tmp_path_factory.mktemp("router")
        async with (
            await demo_engine() as engine,
            routing(folder, engine) as (url, _, _replicas),  # type: ignore[arg-type]
            httpx.AsyncClient(base_url=url) as client,
        ):
            before = (await client.get("/metrics")).text
            for prompt in ("Hello", "Hello, you", "Hello"):
                body = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.post("/v1/completions", json={})).status_code == 400
            return [before, (await client.get("/metrics")).text]

    return Scrapes(*(scraped(page, **OWN_LABELS) for page in asyncio.run(pages())))


# -- queries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_exist(scrapes: Scrapes, name: str) -> None:
    found = [*selectors(QUERIES[name])]
    assert found
    for metric, labels in found:
        if metric in MISSING:
            assert metric.removeprefix("minisgl_").removesuffix("_total") in ABOUT
            continue
        samples = scrapes.after[metric]
        known = {label for key in samples for label, _ in key}
        assert {*labels} <= known, metric
    grouped = re.findall(r"by \(([^)]*)\)", QUERIES[name])
    names = {label.strip() for group in grouped for label in group.split(",")}
    assert names <= {"instance", "le", "status", "reason"}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_shows_a_figure_of_a_server_that_has_worked(scrapes: Scrapes, name: str) -> None:
    value = evaluated(PANELS[name], *scrapes)
    if {metric for metric, _ in selectors(PANELS[name])} & MISSING:
        assert value == {}
    else:
        assert value and all(math.isfinite(each) and each >= 0 for each in value.values())


def test_panels_show_what_was_done(scrapes: Scrapes) -> None:
    def only(name: str) -> float:
        [value] = evaluated(PANELS[name], *scrapes).values()
        return value

    assert only("Tokens B") == pytest.approx(27 / 60)
    assert only("Replicas A") == 1
    assert 0 < only("Time to first token A") <= only("Time to first token C")
    statuses = evaluated(PANELS["Answers by status A"], *scrapes)
    assert statuses[frozenset({("status", "400")})] == pytest.approx(1 / 60)


def changed(scrape: Scrape, metric: str, value: float, **labels: str) -> Scrape:
    """A scrape in which all samples of a metric with these labels have another value."""
    found = {
        key: value if labels.items() <= dict(key).items() else old
        for key, old in scrape[metric].items()
    }
    assert found != scrape[metric]
    return {**scrape, metric: found}


RESPONSES = "minisgl_http_responses_total"
FIRES: dict[str, tuple[tuple[str, float, dict[str, str]], ...]] = {
    "MinisglDown": (("up", 0, {}),),
    "MinisglReplicaNotReady": (("minisgl_router_replica_ready", 0, {}),),
    "MinisglReplicaRestarts": (("minisgl_router_replica_starts_total", 9, {}),),
    "MinisglStuck": (
        ("minisgl_running_requests", 3, {}),
        ("minisgl_generated_tokens_total", 0, {}),
    ),
    "MinisglErrors": ((RESPONSES, 50, {"status": "500"}),),
    "MinisglRefuses": ((RESPONSES, 50, {"status": "429"}),),
    "MinisglWaits": tuple(
        ("minisgl_request_queue_seconds_bucket", 99 * (float(bound) > 15), {"le": bound})
        for bound in ("10.0", "20.0", "+Inf")
    ),
    "MinisglFirstTokenLate": tuple(
        ("minisgl_time_to_first_token_seconds_bucket", 99 * (float(bound) > 25), {"le": bound})
        for bound in ("20.0", "30.0", "60.0", "120.0", "+Inf")
    ),
    "MinisglRetracts": (("minisgl_retractions_total", 99, {}),),
    "MinisglFilesShort": (("process_open_fds", 1e9, {}),),
}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_for_what_it_says_and_not_for_a_server_that_works(
    scrapes: Scrapes, name: str
) -> None:
    before, now = scrapes
    for status in ("429", "500"):  # which the server has not answered with
        key = frozenset({**OWN_LABELS, "replica": "0", "route": "x", "status": status}.items())
        before = {**before, RESPONSES: {**before.get(RESPONSES, {}), key: 0.0}}
        now = {**now, RESPONSES: {**now[RESPONSES], key: 0.0}}
    expression = ALERTS[name]["expr"]
    assert evaluated(expression, before, now) == {}
    for metric, value, labels in FIRES[name]:
        now = changed(now, metric, value, **labels)
    fired: Vector = evaluated(expression, before, now)
    assert len(fired) >= 1
    shown = re.findall(r"\$labels\.(\w+)", ALERTS[name]["annotations"]["summary"])
    assert all({*shown} <= {label for label, _ in key} for key in fired)


def test_the_alerts_are_as_prometheus_wants_them() -> None:
    for rule in ALERTS.values():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_the_panels_have_places_and_ids_of_their_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*places}) == len({*ids}) == len(places)
    for panel in DASHBOARD["panels"]:
        assert panel["description"] and panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == ["A", "B", "C"][: len(letters)]


# -- how it is started and ended -------------------------------------------------------------------


def check_options(arguments: list[str]) -> None:
    program, *options = arguments
    assert program == "serve"
    result = CliRunner().invoke(app, ["config", *options])
    assert result.exit_code == 0, result.output


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None, strict=False)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read_string((DEPLOY / "minisgl.service").read_text())
    return read


def test_every_command_has_options_of_serve(tmp_path: Path) -> None:
    check_options(CONTAINER["args"])
    check_options(COMPOSE["services"]["minisgl"]["command"])
    (tmp_path / "keys").write_text("key")
    started = unit()["Service"]["ExecStart"].replace("%d", str(tmp_path))
    check_options(shlex.split(started)[1:])


def test_there_is_time_to_drain() -> None:
    [_, pause_s] = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["terminationGracePeriodSeconds"] >= int(pause_s) + DRAIN_S + 10
    assert int(unit()["Service"]["TimeoutStopSec"]) >= DRAIN_S + 10
    assert (
        int(COMPOSE["services"]["minisgl"]["stop_grace_period"].removesuffix("s")) >= DRAIN_S + 10
    )
    assert unit()["Service"]["RestartPreventExitStatus"] == "2"


def test_probes_need_no_key_and_nothing_kills_a_server_that_loads() -> None:
    open_paths = {each.path for each in ENDPOINTS if each.is_open}
    [port] = CONTAINER["ports"]
    for name in ("startupProbe", "readinessProbe"):
        probe = CONTAINER[name]["httpGet"]
        assert probe["path"] in open_paths and probe["port"] == port["name"]
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert "livenessProbe" not in CONTAINER
    dockerfile = (SCRIPTS / "Dockerfile").read_text()
    default = next(spec for spec in fields(ServerConfig) if spec.name == "port").default
    assert "HEALTHCHECK --interval=10s --timeout=5s --start-period=1h CMD" in dockerfile
    assert f"http://127.0.0.1:{default}/health" in dockerfile and "/health" in open_paths
    assert port["containerPort"] == default
    assert COMPOSE["services"]["minisgl"]["ports"] == [f"127.0.0.1:{default}:{default}"]


def test_the_manifests_refer_to_each_other() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert KEDA["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    # Kubernetes sets variables with the names of services, which the server would read.
    assert SERVICE["metadata"]["name"] != "minisgl-serve"


def test_compose_mounts_files_that_exist_and_scrapes_the_server() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file()
        for config in service.get("configs", ()):
            assert yaml.safe_load(COMPOSE["configs"][config["source"]]["content"])
    content = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    [scrape] = content["scrape_configs"]
    assert scrape["job_name"] == "minisgl"
    assert scrape["static_configs"] == [{"targets": ["minisgl:1919"]}]


def test_the_locked_versions_are_allowed_and_name_every_requirement() -> None:
    lines = (DEPLOY / "versions.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        name = re.sub("[-_.]+", "-", requirement.name.lower())
        assert requirement.specifier.contains(locked[name]), text
