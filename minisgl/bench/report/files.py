"""Writes the results of a benchmark into the files that the options name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from minisgl.bench.config import ReportConfig
from minisgl.bench.report.output import write_csv
from minisgl.bench.report.tables import PointResult
from minisgl.bench.run_info import RunInfo

# Options in the title of a picture, beside the model and the device.
PLOTTED = ("dtype", "quantization", "kv_dtype", "tp", "pp", "ep", "workload", "num_requests")


def write_files(
    json_file: str | None,
    report: ReportConfig,
    run_info: RunInfo,
    results: Mapping[str, Any],
    rows: Sequence[tuple[Mapping[str, Any], PointResult]],
) -> None:
    """Write what --json, --csv and --plot ask for; nothing for an option that was not given.

    `results`: dataclasses, or lists of them, for the JSON file beside `run_info`. `rows`: each
    measurement with the columns that label it in the CSV file.
    """
    if json_file is not None:
        told = {spec.name: getattr(run_info, spec.name) for spec in fields(run_info)}
        content = json.dumps(told | dict(results), indent=1, default=asdict)
        Path(json_file).write_text(content + "\n")
    if report.csv_file is not None:
        write_csv(Path(report.csv_file), [(label, result.figures) for label, result in rows])
    if report.plot_file is not None:
        from minisgl.bench.report.plot import plot_points

        options = {**run_info.bench_options, **run_info.engine_options}
        shown = [run_info.model, run_info.device]
        shown += [f"{name} {options[name]}" for name in PLOTTED if options.get(name)]
        title = " · ".join(shown)
        plot_points(Path(report.plot_file), [result for _, result in rows], title)
