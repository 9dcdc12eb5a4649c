"""Draws what a crowd saw: latencies as shares, tokens and requests over time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.serving.load import Seen

_BINS = 80
_INK, _FAINT, _ACCENT, _FAULT = "#1f2933", "#9aa5b1", "#2f6f9f", "#b44d3a"


def write(path: pathlib.Path, seen: Sequence[Seen], title: str) -> None:
    """Writes a PNG of four charts.

    Args:
      path: of the file.
      seen: of `load.drive`, at least one.
      title: conditions, on top.

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib; install the extra `plot`") from error
    figure = matplotlib.figure.Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    good = [one for one in seen if one.code == "OK"]
    firsts = [1e3 * one.first_token_seconds for one in good if one.first_token_seconds is not None]
    means = [1e3 * one.seconds_per_token for one in good if one.seconds_per_token is not None]
    _shares(axes[0, 0], firsts, "time to first token, ms")
    _shares(axes[0, 1], means, "mean time per later token, ms")
    _rate(axes[1, 0], seen)
    _in_flight(axes[1, 1], seen)
    figure.suptitle(title, color=_INK, fontsize=11)
    figure.savefig(path, dpi=120)


def _shares(axis: Any, values: Sequence[float], label: str) -> None:
    """How many requests were at or under each value."""
    ordered = np.sort(np.asarray(values, float))
    shares = 100.0 * np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    axis.step(ordered, shares, where="post", color=_ACCENT)
    for percentile in (50, 99):
        if len(ordered):
            value = float(np.percentile(ordered, percentile))
            axis.axvline(value, color=_FAINT, linestyle=":")
            axis.annotate(
                f"p{percentile} {value:,.1f}",
                (value, 4),
                rotation=90,
                color=_INK,
                fontsize=8,
                ha="right",
            )
    axis.set_ylim(0, 101)
    _label(axis, label, "share of requests, %")


def _rate(axis: Any, seen: Sequence[Seen]) -> None:
    """Output tokens per second over time."""
    arrivals = [arrival for one in seen for arrival in one.arrivals]
    end = max((one.end for one in seen), default=1.0) or 1.0
    counts, edges = np.histogram(
        [when for when, _ in arrivals], _BINS, (0.0, end), weights=[n for _, n in arrivals]
    )
    axis.stairs(counts / np.diff(edges), edges, fill=True, color=_ACCENT, alpha=0.8)
    axis.set_xlim(0, end)
    axis.set_ylim(bottom=0)
    _label(axis, "seconds", "output tokens per second")


def _in_flight(axis: Any, seen: Sequence[Seen]) -> None:
    """Requests that had begun and not ended; faults as marks."""
    times = np.asarray([one.due for one in seen] + [one.end for one in seen])
    steps = np.asarray([1] * len(seen) + [-1] * len(seen))
    order = np.argsort(times, kind="stable")
    axis.step(times[order], np.cumsum(steps[order]), where="post", color=_ACCENT)
    faults = [one.end for one in seen if one.code != "OK"]
    if faults:
        axis.plot(faults, [0] * len(faults), "x", color=_FAULT, label=f"{len(faults)} failed")
        axis.legend(frameon=False)
    axis.set_xlim(0, max(times.max(), 1e-9))
    axis.set_ylim(bottom=0)
    _label(axis, "seconds", "requests in flight")


def _label(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x, color=_INK)
    axis.set_ylabel(y, color=_INK)
    axis.grid(color="#e4e7eb", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
