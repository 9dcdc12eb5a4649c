"""A live view of one server: samples of its /metrics, the rates between two, a screen of both."""

from __future__ import annotations

import collections
import dataclasses
import http.client
import itertools
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence

import rich.box
import rich.console
import rich.panel
import rich.table
import rich.text
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_SECONDS = 2.0
_SPARKS = "▁▂▃▄▅▆▇█"
_HISTORY = 60
"""Samples behind the rates that are drawn."""
_BAR_WIDTH = 24
_WIDTH = 96
_FAILED = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
"""Statuses of calls that the server failed on; their callers asked for nothing wrong."""
_GIVEN_UP = ("CANCELLED", "DEADLINE_EXCEEDED")
"""Statuses of calls whose callers left or had no more time."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """All values of one scrape."""

    seconds: float
    """When, by a clock that only moves forward."""
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str, seconds: float) -> Sample:
        """Reads what a scraper would."""
        return cls(
            seconds,
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            },
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of a name that carry `labels`; 0 when there is none."""
        wanted = labels.items()
        return sum(v for (n, have), v in self.values.items() if n == name and wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values of a name by one of its labels."""
        found: dict[str, float] = collections.defaultdict(float)
        for (one, have), value in self.values.items():
            if one == name:
                found[dict(have).get(label, "")] += value
        return dict(found)


def read(url: str) -> Sample:
    """One scrape.

    Raises:
      OSError: nothing answers there, naming the address and the way out.
    """
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            return Sample.parse(answer.read().decode(), time.monotonic())
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason, way = _fault(url, error)
        raise OSError(f"no metrics at {url} ({reason}); {way}") from error


def _fault(url: str, error: Exception) -> tuple[str, str]:
    """What happened, and the way out."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    way = "start the server with --metrics-port and name that address"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate was not accepted: {cause.verify_message}",
            "name the server's own --metrics-port, which is plain http://",
        )
    is_closed = isinstance(cause, http.client.RemoteDisconnected | ConnectionResetError)
    if _ends_tls(cause) or (is_closed and url.startswith("https:")):
        said = getattr(cause, "reason", None) or "it closed the connection"
        return (
            f"it ended TLS: {said}; it may want a client certificate, which is not shown",
            "name the server's own --metrics-port, which is plain http://",
        )
    if isinstance(cause, ssl.SSLError):
        return f"its answer is no TLS: {cause.reason}", "write http://"
    if is_closed:
        return "it closed the connection; it may speak TLS or gRPC", way
    if not isinstance(cause, OSError | str):  # a gRPC port answers in bytes of its own
        return "what answers is not HTTP", way
    return str(cause), way


def _ends_tls(cause: object) -> bool:
    """Whether the other side spoke TLS and then no more: with an alert, or by closing."""
    if not isinstance(cause, ssl.SSLError):
        return False
    reason = getattr(cause, "reason", None)
    return reason is None or any(word in reason for word in ("ALERT", "UNEXPECTED_EOF"))


class View:
    """The last samples of one server, drawn as one screen.

    Args:
      title: names the server.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._samples: collections.deque[Sample] = collections.deque(maxlen=_HISTORY)
        self._fault: str | None = None

    def take(self, sample: Sample) -> None:
        """Adds a sample; one of a server that was started anew forgets those before."""
        name = "vllm:generation_tokens_total"
        if self._samples and sample.total(name) < self._samples[-1].total(name):
            self._samples.clear()
        self._samples.append(sample)
        self._fault = None

    def miss(self, reason: str) -> None:
        """Shows why there is no newer sample."""
        self._fault = reason

    def draw(self) -> rich.console.RenderableType:
        """The screen."""
        if not self._samples:
            return rich.panel.Panel(self._fault or "waiting", title=self._title, width=_WIDTH)
        now = self._samples[-1]
        parts: list[rich.console.RenderableType] = [self._load(now), self._speed(now)]
        parts += [self._steps(now), self._ends(now)]
        if self._fault is not None:
            parts.append(rich.text.Text(self._fault, style="bold red"))
        facts = next((dict(key[1]) for key in now.values if key[0] == "treadle:programs"), {})
        title = f"{self._title}  {facts.get('model_name', 'not serving yet')}"
        return rich.panel.Panel(rich.console.Group(*parts), title=title, width=_WIDTH)

    def _load(self, now: Sample) -> rich.console.RenderableType:
        running = now.total("vllm:num_requests_running")
        waiting = now.total("vllm:num_requests_waiting")
        used = now.total("vllm:kv_cache_usage_perc")
        table = _grid("load")
        table.add_row("running", f"{running:,.0f}", "waiting", f"{waiting:,.0f}")
        hits = self._rate("vllm:prefix_cache_hits_total")
        queries = self._rate("vllm:prefix_cache_queries_total")
        share = f"{hits / queries:.0%}" if queries else "–"
        preemptions = now.total("vllm:num_preemptions_total")
        table.add_row("pages in use", _bar(used), "prefix hits", share)
        table.add_row("preemptions", f"{preemptions:,.0f}")
        return table

    def _ends(self, now: Sample) -> rich.console.RenderableType:
        """Calls since the start that did not end well, and the faults the engine itself met."""
        calls = now.by("treadle:calls_total", "code")
        failed, given_up = (
            {code: calls.pop(code, 0.0) for code in codes} for codes in (_FAILED, _GIVEN_UP)
        )
        calls.pop("OK", None)
        faults = {
            "failed launches": now.total("treadle:failed_launches_total"),
            "resumed": now.total("treadle:resumed_requests_total"),
            "late compiles": now.total("treadle:compiles_after_ready_total"),
        }
        table = _titled("since the start")
        table.add_column(width=17, style="dim")
        table.add_column()
        table.add_row("calls failed", _counts(failed, "bold red"))
        table.add_row("calls refused", _counts(calls))
        table.add_row("calls given up", _counts(given_up))
        table.add_row("engine's faults", _counts(faults, "bold red"))
        return table

    def _speed(self, now: Sample) -> rich.console.RenderableType:
        table = _grid("speed")
        name = "vllm:generation_tokens_total"
        rates = self._rates(name)
        table.add_row("output tok/s", f"{self._rate(name):,.0f}", "", sparkline(rates))
        prompts = self._rate("vllm:prompt_tokens_total")
        ended = self._rate("vllm:e2e_request_latency_seconds_count")
        table.add_row("prompt tok/s", f"{prompts:,.0f}", "ended req/s", f"{ended:,.1f}")
        for label, metric in (
            ("first token", "vllm:time_to_first_token_seconds"),
            ("per token", "vllm:time_per_output_token_seconds"),
            ("whole request", "vllm:e2e_request_latency_seconds"),
        ):
            middle, late = (self._quantile(metric, share) for share in (0.5, 0.99))
            table.add_row(label, f"p50 {_duration(middle)}", "", f"p99 {_duration(late)}")
        return table

    def _steps(self, now: Sample) -> rich.console.RenderableType:
        table = _grid("engine")
        lanes = {
            lane: self._rate("treadle:steps_total", lane=lane)
            for lane in sorted(now.by("treadle:steps_total", "lane"))
        }
        busy = {lane: rate for lane, rate in lanes.items() if rate} or {"no step": 0.0}
        steps = ", ".join(f"{lane} {rate:,.0f}/s" for lane, rate in busy.items())
        host, device = (
            self._rate("treadle:rows_total", source=source) for source in ("host", "device")
        )
        table.add_row("steps", steps, "depth", f"{now.total('treadle:launch_depth'):.0f}")
        table.add_row("rows/s, device", f"{device:,.0f}", "rows/s, host", f"{host:,.0f}")
        stages = now.by("treadle:host_step_milliseconds", "stage")
        times = [f"{stage} {value:.2f}" for stage, value in stages.items()]
        table.add_row("host ms", ", ".join(times[:2]), "", ", ".join(times[2:4]))
        table.add_row("", ", ".join(times[4:]))
        return table

    def _rate(self, name: str, **labels: str) -> float:
        """Units per second over the last samples."""
        first, last = self._samples[max(0, len(self._samples) - 6)], self._samples[-1]
        seconds = last.seconds - first.seconds
        return (
            (last.total(name, **labels) - first.total(name, **labels)) / seconds if seconds else 0
        )

    def _rates(self, name: str) -> list[float]:
        """Units per second between each two samples."""
        samples = list(self._samples)
        return [
            (late.total(name) - early.total(name)) / max(late.seconds - early.seconds, 1e-9)
            for early, late in itertools.pairwise(samples)
        ]

    def _quantile(self, name: str, share: float) -> float | None:
        """Of what was observed since the oldest sample, or ever when nothing was."""
        last = self._samples[-1].by(f"{name}_bucket", "le")
        first = self._samples[0].by(f"{name}_bucket", "le")
        recent = {edge: count - first.get(edge, 0.0) for edge, count in last.items()}
        counts = recent if any(recent.values()) else last
        return quantile({float(edge): count for edge, count in counts.items()}, share)


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile of a histogram, by straight lines inside its buckets; None of an empty one.

    Args:
      buckets: cumulative counts by upper edge, infinity included.
      share: 0 to 1.
    """
    edges = sorted(buckets)
    total = buckets[edges[-1]] if edges else 0.0
    if not total:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for edge in edges:
        count = buckets[edge]
        if count >= wanted:
            if math.isinf(edge):
                return low
            return low + (edge - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = edge, count
    return low


def sparkline(values: Sequence[float]) -> str:
    """One character a value, the highest one full."""
    top = max(values, default=0.0)
    if top <= 0.0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round(max(value, 0.0) / top * (len(_SPARKS) - 1))] for value in values)


def watch(
    url: str,
    draw: Callable[[rich.console.RenderableType], None],
    *,
    interval: float,
    count: int | None,
) -> None:
    """Samples and draws until interrupted, or `count` times.

    Raises:
      OSError: nothing answers the first time; later on that is shown and waited out.
    """
    view = View(url)
    view.take(read(url))
    draw(view.draw())
    num_drawn = 1
    while count is None or num_drawn < count:
        time.sleep(interval)
        try:
            view.take(read(url))
        except OSError as error:
            view.miss(str(error))
        draw(view.draw())
        num_drawn += 1


def _counts(counts: Mapping[str, float], style: str = "") -> rich.text.Text:
    words = ", ".join(f"{name} {count:,.0f}" for name, count in sorted(counts.items()) if count)
    return rich.text.Text(words or "none", style if words else "")


def _titled(title: str) -> rich.table.Table:
    return rich.table.Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None
    )


def _grid(title: str) -> rich.table.Table:
    table = _titled(title)
    for width, style in ((17, "dim"), (32, ""), (12, "dim"), (23, "")):
        table.add_column(width=width, style=style, no_wrap=True)
    return table


def _bar(share: float) -> rich.text.Text:
    filled = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    bar = rich.text.Text("█" * filled, style=style)
    return bar + rich.text.Text("·" * (_BAR_WIDTH - filled), "dim") + f" {share:.0%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
