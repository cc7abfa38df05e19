"""Plots of a benchmark by matplotlib, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from minisgl.bench.report.tables import PointResult

WIDTH, HEIGHT = 9.0, 4.0  # of one panel, in inches
MIN_SAMPLES = 3  # of a timeline
BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}  # the place of a legend


def plot_points(path: Path, found: Sequence[PointResult], title: str) -> None:
    """Plot throughput against latency of several points, and the latency distribution and, if it
    has enough samples to be a line, the timeline of the last one. title: of the whole picture."""
    last = found[-1]
    panels = [_draw_latencies]
    if len(last.timeline) >= MIN_SAMPLES:
        panels.append(_draw_timeline)
    num_panels = len(panels) + (len(found) > 1)
    figure = Figure(figsize=(WIDTH, HEIGHT * num_panels), layout="constrained")
    figure.suptitle(title, wrap=True)
    axes = list(figure.subplots(num_panels, 1, squeeze=False)[:, 0])
    if len(found) > 1:
        _draw_sweep(axes.pop(0), found)
    for draw, axis in zip(panels, axes, strict=True):
        draw(axis, last)
    figure.savefig(path)


def _draw_sweep(axis: Any, found: Sequence[PointResult]) -> None:
    ordered = sorted(found, key=lambda one: one.figures.output_tokens_per_s)
    throughputs = [one.figures.output_tokens_per_s for one in ordered]
    for name in ("TTFT", "TPOT", "E2E"):
        for part, style in (("p50", "o-"), ("p99", "o--")):
            latencies = [getattr(one.figures, f"{name.lower()}_s") for one in ordered]
            values = [getattr(latency, part) * 1e3 if latency else None for latency in latencies]
            axis.plot(throughputs, values, style, label=f"{name} {part}")
    for one, throughput in zip(ordered, throughputs, strict=True):
        below = (throughput, one.figures.ttft_s.p50 * 1e3)
        axis.annotate(one.point.short(), below, xytext=(0, -12), textcoords="offset points")
    axis.set(
        title="Throughput against latency", xlabel="output tokens/s", ylabel="ms", yscale="log"
    )
    axis.grid(alpha=0.3)
    _write_plain_numbers(axis.yaxis)
    axis.legend(**BESIDE)


def _draw_latencies(axis: Any, one: PointResult) -> None:
    tpots_s = [request.tpot_s for request in one.requests]
    for name, values in {
        "TTFT": [request.ttft_s for request in one.requests],
        "TPOT": [tpot_s for tpot_s in tpots_s if tpot_s],
        "ITL": [itl_s for itl_s in one.itls_s if itl_s],
        "E2E": [request.e2e_s for request in one.requests],
    }.items():
        if values:
            axis.ecdf([value * 1e3 for value in values], label=name)
    axis.set(title=f"Latencies, {one.point}", xlabel="ms", ylabel="share below", xscale="log")
    _write_plain_numbers(axis.xaxis)
    axis.grid(alpha=0.3)
    axis.legend(**BESIDE)


def _draw_timeline(axis: Any, one: PointResult) -> None:
    times = [sample.at_s for sample in one.timeline]
    axis.plot(times, [sample.num_running for sample in one.timeline], ".-", label="running")
    axis.plot(times, [sample.num_queued for sample in one.timeline], ".-", label="queued")
    axis.set(title=f"Timeline, {one.point}", xlabel="s", ylabel="requests")
    axis.grid(alpha=0.3)
    usage = axis.twinx()
    shares = [100 * sample.token_usage for sample in one.timeline]
    usage.plot(times, shares, "k.:", label="token usage")
    usage.set(ylabel="% of the KV cache", ylim=(0, 100))
    # One legend for both axes, and beyond the labels of the second.
    lines = [*axis.get_lines(), *usage.get_lines()]
    place = {**BESIDE, "bbox_to_anchor": (1.1, 1.0)}
    axis.legend(lines, [line.get_label() for line in lines], **place)


def _write_plain_numbers(axis: Any) -> None:
    """Labels such as 200 instead of 2 x 10² on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
