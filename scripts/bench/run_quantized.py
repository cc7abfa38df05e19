"""Measures quantised weights and caches on one GPU, with random weights; a line for each figure.

python scripts/bench/run_quantized.py                                    # all, about an hour
python scripts/bench/run_quantized.py --model Qwen3-14B --weights fp8-block bf16 --kv fp8
python scripts/bench/run_quantized.py --measure latency -- --attn triton

The measurements are `minisgl bench latency` (512 tokens in, 256 out), `minisgl bench` (the standard
workload) and bench_context.py (64 requests of 8,192 tokens), each in a process of its own, the
second repetition. --list shows which there are. What follows -- are options of the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from dummy_config import config_of

DENSE = "bf16"  # weights that are not quantised
MEASURES = ("latency", "offline", "context")


@dataclass(frozen=True)
class Case:
    """A measurement of a model with weights and a KV cache of some formats."""

    model: str
    weights: str  # DENSE, or one of dummy_config's QUANTIZATIONS
    kv: str  # model or fp8
    measure: str  # one of MEASURES

    def __str__(self) -> str:
        return f"{self.model}, weights {self.weights}, KV {self.kv}, {self.measure}"

    def command(self, folder: Path, report: Path, options: Sequence[str]) -> list[str]:
        """What measures the model in `folder`."""
        limits = [] if self.measure == "context" else ["--max-prefill-length", "16384"]
        cache = [] if self.kv == "model" else ["--kv-cache-dtype", self.kv]
        engine = [*limits, *cache, *options, "--json", str(report)]
        if self.measure == "context":
            script = Path(__file__).parent / "bench_context.py"
            return [sys.executable, str(script), str(folder), *engine]
        verb = ["bench", "latency"] if self.measure == "latency" else ["bench"]
        model = ["--model", str(folder), "--load-format", "dummy"]
        return [sys.executable, "-m", "minisgl", *verb, *model, *engine]


CASES = (
    *(
        Case("Qwen3-14B", weights, kv, measure)
        for weights in (DENSE, "fp8-block", "fp8-channel", "int4")
        for kv in ("model", "fp8")
        for measure in ("latency", "offline")
    ),
    *(Case("Qwen3-14B", DENSE, kv, "context") for kv in ("model", "fp8")),
    *(
        Case("Qwen3-32B", weights, kv, measure)
        for weights in ("fp8-block", "fp8-channel")
        for kv in ("model", "fp8")
        for measure in ("latency", "offline")
    ),
    *(
        Case("Qwen3-30B-A3B", weights, "model", measure)
        for weights in ("fp8-block", "fp8-channel")
        for measure in ("latency", "offline")
    ),
)


def figures(case: Case, report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report of --json."""
    if "batches" not in report:
        rate, limit = report["figures"]["output_tokens_per_s"], report["limit"]
        share = limit and limit["share"]
        yield line(case, f"{rate:,.0f} tok/s", share, report["figures"]["energy"])
        return
    for batch in report["batches"]:
        tpot_s, limit_s = batch["figures"]["tpot_s"]["p50"], batch["limit_s"]
        told = f"batch {batch['sizes']['num_requests']}: {tpot_s * 1e3:.3f} ms"
        yield line(case, told, limit_s and limit_s / tpot_s, batch["figures"]["energy"])


def line(case: Case, told: str, share: float | None, energy: dict[str, float] | None) -> str:
    parts = [f"{case}: {told}"]
    parts += [f"{share:.1%} of the limit"] if share else []
    if energy:
        joules = energy["joules_per_output_token"]
        parts.append(f"{energy['mean_watts']:,.0f} W, {joules:.3f} J/token")
    return ", ".join(parts)


def run(case: Case, options: Sequence[str]) -> Iterator[str]:
    """Measure; the lines of the figures. Raises MeasurementError."""
    with tempfile.TemporaryDirectory() as name:
        folder, report = Path(name), Path(name) / "report.json"
        quantization = None if case.weights == DENSE else case.weights
        (folder / "config.json").write_text(json.dumps(config_of(case.model, quantization)))
        command = case.command(folder, report, options)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise MeasurementError(last[-1])
        yield from figures(case, json.loads(report.read_text()))


class MeasurementError(Exception):
    """A benchmark ended with an error, which this is the last line of."""


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases that every given option names."""
    return [
        case
        for case in CASES
        if all(
            wanted is None or getattr(case, name) in wanted
            for name in ("model", "weights", "kv", "measure")
            for wanted in [getattr(arguments, name)]
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "weights", "kv", "measure"):
        values = [*dict.fromkeys(getattr(case, name) for case in CASES)]
        parser.add_argument(f"--{name}", nargs="+", choices=values, help="only these")
    parser.add_argument("--list", action="store_true", help="show what would be measured")
    own, options = split(sys.argv[1:])
    arguments = parser.parse_args(own)
    cases = chosen(arguments)
    if not cases:
        parser.error("no measurement has all of these; --list alone shows which there are")
    failed = False
    for case in cases:
        if arguments.list:
            print(case)
            continue
        try:
            for told in run(case, options):
                print(told, flush=True)
        except MeasurementError as error:
            failed = True
            print(f"{case}: failed: {error}", flush=True)
    return int(failed)


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What comes before --, and after it."""
    if "--" not in arguments:
        return arguments, ()
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
