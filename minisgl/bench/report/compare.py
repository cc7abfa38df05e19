"""`minisgl bench compare`: the figures of two runs side by side, and their differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from minisgl.bench.online.load_config import Point
from minisgl.bench.report.output import flat, make_console
from minisgl.errors import MinisglError

# The figures that are compared, with their headings; those in ms are a thousand times larger.
SHOWN = {
    "input_tokens_per_s": "input tok/s",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "good requests/s",
    **{
        f"{name}_s_{part}": f"{name.upper()} {part} ms"
        for name in ("ttft", "tpot", "itl", "e2e")
        for part in ("mean", "p50", "p90", "p99")
    },
    "energy_mean_watts": "mean watts",
    "energy_joules_per_output_token": "joules per output token",
    "cache_hit_rate": "cache hit rate",
    "graph_share": "share of CUDA graphs",
    "structured_share": "share under a JSON schema",
    "num_retractions": "retractions",
    "num_failed": "failed requests",
    "share_of_limit": "share of the hardware's limit",
}
SETTINGS = (
    *("model", "device", "versions", "environment"),
    *("backends", "engine_options", "bench_options"),
)
# These differ between any two runs.
IGNORED = ("measured_at", "json_file", "csv_file", "plot_file")


class CompareError(MinisglError):
    """A file was not written by `--json` of a benchmark."""

    exit_code = 2


def compare(first: Path, second: Path) -> int:
    """Print figures, ratios and differences. Returns the exit code. Raises CompareError."""
    console = make_console()
    reports = [_read(path) for path in (first, second)]
    points = [dict(_points(report)) for report in reports]
    if all(len(found) == 1 for found in points):
        # One measurement each can be compared, such as an offline run with one over HTTP.
        label = " | ".join(dict.fromkeys(name for found in points for name in found))
        points = [{label: figures} for found in points for figures in found.values()]
    common = [label for label in points[0] if label in points[1]]
    if not common:
        told = [", ".join(point) for point in points]
        raise CompareError(
            f"{first} and {second} have no measurement in common: {told[0]}; {told[1]}"
        )
    console.print(f"A: {first}\nB: {second}")
    for line in differences(*reports):
        console.print(line)
    for label in common:
        console.print(comparison(label, points[0][label], points[1][label]))
    for name, mine, others in (("A", *points), ("B", *reversed(points))):
        if alone := [label for label in mine if label not in others]:
            console.print(f"only in {name}: {', '.join(alone)}")
    return 0


def comparison(label: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """A table with a row for each figure that both have."""
    table = Table(label)
    for heading in ("A", "B", "B / A"):
        table.add_column(heading, justify="right")
    for name, shown in SHOWN.items():
        a, b = first.get(name), second.get(name)
        if a is None or b is None or a == b == 0:
            continue
        factor = 1e3 if shown.endswith(" ms") else 1
        cells = (_number(a * factor), _number(b * factor), f"{b / a:.3f}" if a else "-")
        table.add_row(shown, *cells)
    return table


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Lines with what else differs, as `name: A, B`."""
    for section in SETTINGS:
        a, b = (flat({section: report.get(section)}) for report in (first, second))
        for name in dict.fromkeys((*a, *b)):
            # Each verb has its own options, which the other run may lack.
            known = section != "bench_options" or (name in a and name in b)
            mine, other = a.get(name), b.get(name)
            if mine != other and known and not name.endswith(IGNORED):
                yield f"{name.removeprefix(f'{section}_')}: {mine}, {other}"


def _points(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The label and the figures of each measurement in a file."""
    if "points" in report:
        for point in report["points"]:
            label = str(Point(point["request_rate"], point["max_concurrency"]))
            yield label, _figures(point)
    elif "batches" in report:
        for batch in report["batches"]:
            yield f"batch {batch['sizes']['num_requests']}", _figures(batch)
    else:
        yield "offline", _figures(report)


def _figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    limit = measured.get("limit") or {}
    return flat(measured["figures"]) | {"share_of_limit": limit.get("share")}


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text("utf-8-sig"))
        list(_points(report))
    except OSError as error:
        raise CompareError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        wanted = "allowed: a file that --json of a benchmark wrote"
        raise CompareError(f"{path}: not a benchmark's result; {wanted}") from error
    assert isinstance(report, dict)
    return report


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
