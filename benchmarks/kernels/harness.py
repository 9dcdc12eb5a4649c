"""What the kernels' scripts have in common: checks first, then times, each kept as it comes."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import conditions
from benchmarks.roofline import Ceilings
from engine.execution.timing import elapsed

Checks = Iterator[tuple[str, bool, str]]
"""(what was checked, whether it holds, its figure)."""
_SAMPLES = 5


def run(
    benchmark: str,
    description: str,
    checks: Sequence[Callable[[], Checks]],
    measure: Callable[[Ceilings | None], Iterable[dict[str, Any]]],
    outcome: Callable[[], tuple[str, Any, bool]],
    arguments: Sequence[str] | None,
) -> int:
    """Checks, measures and writes the report after every figure.

    Args:
      benchmark: the report's name.
      description: of the script, for its help.
      checks: run first, all of them.
      measure: yields the figures of one shape after another.
      outcome: (name, value, whether it is as it must be) of which implementations ran.
      arguments: of the command; None: the process's own.

    Returns:
      The exit status: 1 when a check failed or the outcome is not as it must be.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=pathlib.Path, help="where the report goes")
    path = parser.parse_args(arguments).json
    report: dict[str, Any] = {
        "benchmark": benchmark,
        "conditions": conditions.of_machine(),
        "checks": [],
        "results": [],
    }
    for check in checks:
        for name, holds, figure in check():
            report["checks"].append({"check": name, "holds": holds, "error": figure})
            print(f"{'ok' if holds else 'FAILED':>6}  {name}  {figure}", flush=True)
    _write(path, report)
    for figures in measure(Ceilings.of(jax.devices()[0].device_kind)):
        report["results"].append(figures)
        _write(path, report)
    name, value, is_right = outcome()
    report[name] = value
    _write(path, report)
    num_failed = sum(not check["holds"] for check in report["checks"])
    print(f"{len(report['checks'])} checks, {num_failed} failed; {name} {value}")
    return 1 if num_failed or not is_right else 0


def _write(path: pathlib.Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def seconds(call: Callable[[], Any], sample_seconds: float) -> float:
    """Median time of one call, many under way at once.

    Args:
      call: starts the work and returns arrays to wait for.
      sample_seconds: of one sample's calls, about.
    """
    for _ in range(3):  # compiles, runs, records its graph
        jax.block_until_ready(call())
    calls = max(10, int(10 * sample_seconds / elapsed(call, 10)))
    return statistics.median(elapsed(call, calls) / calls for _ in range(_SAMPLES))


def worst_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest relative error along the first axis; infinite when one that must be zero is not."""
    axes = tuple(range(1, expected.ndim))
    error, size = (
        np.sqrt((x**2).sum(axes)) for x in (found.astype(np.float64) - expected, expected)
    )
    if not np.isfinite(error).all() or error[size == 0].any():
        return float("inf")
    return float((error / np.where(size == 0, 1, size)).max())
