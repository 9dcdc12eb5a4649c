"""Prometheus metrics of one engine: the names vLLM dashboards read, plus Treadle's own."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import prometheus_client
import prometheus_client.core
import prometheus_client.registry

from engine.request import FinishReason

if TYPE_CHECKING:
    from engine.core import CoreStats, EngineInfo

_ENGINE = "0"
"""Label `engine`: a server runs one."""

# 1 ms (a decode step) to 500 s (a long queue).
_SECONDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1.0, 2.5, 5.0))
_TOKENS = tuple(base * 10.0**power for power in range(6) for base in (1.0, 2.0, 5.0))


@dataclasses.dataclass(frozen=True)
class FinishedRequest:
    """What the metrics keep of one request that ended."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Over all choices."""
    finish_reasons: tuple[FinishReason, ...]
    """One per choice: stop, length, abort or error."""
    queue_seconds: float | None
    """From arrival to the first step that was scheduled with it; None when there was none."""
    first_token_seconds: float | None
    """From arrival to the first token; None when there was none."""
    last_token_seconds: float | None
    """From arrival to the last token; None when there was none."""
    total_seconds: float
    """From arrival to the end."""


class Metrics:
    """Counts requests as they end and reads the core's counters when scraped.

    Args:
      registry: one per engine, so that several engines of one process do not meet.
      info: facts of the engine; the model's name labels every sample.
      read_stats: the core's counters now, None when it cannot answer; called by the scraper.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        info: EngineInfo,
        read_stats: Callable[[], CoreStats | None],
    ) -> None:
        labels = {"model_name": info.model_name, "engine": _ENGINE}
        names = tuple(labels)

        # Bound here, so that a scrape before the first request shows zeros rather than nothing.
        def counter(name: str, text: str) -> prometheus_client.Counter:
            made = prometheus_client.Counter(name, text, names, registry=registry)
            return made.labels(**labels)

        def seconds(name: str, text: str) -> prometheus_client.Histogram:
            made = prometheus_client.Histogram(
                name, text, names, registry=registry, buckets=_SECONDS
            )
            return made.labels(**labels)

        def tokens(name: str, text: str) -> prometheus_client.Histogram:
            made = prometheus_client.Histogram(
                name, text, names, registry=registry, buckets=_TOKENS
            )
            return made.labels(**labels)

        def counters(name: str, text: str, extra: str) -> Callable[[str], Any]:
            made = prometheus_client.Counter(name, text, (*names, extra), registry=registry)
            return lambda value: made.labels(**labels, **{extra: value})

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._output_tokens = counter("vllm:generation_tokens", "Tokens produced.")
        self._success = counters(
            "vllm:request_success", "Choices ended, by their reason.", "finished_reason"
        )
        for reason in typing.get_args(FinishReason):
            self._success(reason)
        self._first_token = seconds(
            "vllm:time_to_first_token_seconds", "Arrival to the first token."
        )
        self._per_token = seconds(
            "vllm:time_per_output_token_seconds",
            "Mean time between two tokens of a request's choices.",
        )
        self._queue = seconds(
            "vllm:request_queue_time_seconds", "Arrival to the first scheduled step."
        )
        self._prefill = seconds(
            "vllm:request_prefill_time_seconds", "First scheduled step to the first token."
        )
        self._decode = seconds("vllm:request_decode_time_seconds", "First token to the last token.")
        self._inference = seconds(
            "vllm:request_inference_time_seconds", "First scheduled step to the last token."
        )
        self._latency = seconds("vllm:e2e_request_latency_seconds", "Arrival to the end.")
        self._prompt_lens = tokens("vllm:request_prompt_tokens", "Prompt tokens of a request.")
        self._output_lens = tokens("vllm:request_generation_tokens", "Tokens made for a request.")
        self._refused = counters("treadle:requests_refused", "Requests not taken.", "code")
        registry.register(_CoreCollector(info, labels, read_stats))

    def produce(self, num_tokens: int) -> None:
        """Counts tokens on their way to a caller."""
        self._output_tokens.inc(num_tokens)

    def finish(self, request: FinishedRequest) -> None:
        """Counts one request that ended, whose tokens are counted by then."""
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._prompt_lens.observe(request.num_prompt_tokens)
        self._output_lens.observe(request.num_output_tokens)
        for reason in request.finish_reasons:
            self._success(reason).inc()
        self._latency.observe(request.total_seconds)
        queue, first = request.queue_seconds, request.first_token_seconds
        last = request.last_token_seconds
        if queue is None:  # left before any step
            return
        self._queue.observe(queue)
        if first is None or last is None:
            return
        self._first_token.observe(first)
        self._prefill.observe(first - queue)
        self._decode.observe(last - first)
        self._inference.observe(last - queue)
        # Choices run side by side, so a token of one is a token of each in the same time.
        per_choice = request.num_output_tokens / max(len(request.finish_reasons), 1)
        if per_choice > 1:
            self._per_token.observe((last - first) / (per_choice - 1))

    def refuse(self, code: str) -> None:
        """Counts one request that was not taken.

        Args:
          code: status code by name, as `INVALID_ARGUMENT`.
        """
        self._refused(code).inc()


@contextlib.contextmanager
def listening(
    registry: prometheus_client.CollectorRegistry, port: int, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Serves `GET /metrics` on `host`; gives the port, which the system picks for port 0.

    Raises:
      OSError: naming the port and the way out.
    """
    try:
        server, thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise OSError(
            f"metrics port {host}:{port} cannot be used ({error.strerror}); "
            "choose another --metrics-port"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _CoreCollector(prometheus_client.registry.Collector):
    """Turns the core's counters into samples at scrape time; the step loop pays nothing."""

    def __init__(
        self,
        info: EngineInfo,
        labels: Mapping[str, str],
        read_stats: Callable[[], CoreStats | None],
    ) -> None:
        self._info = info
        self._names = tuple(labels)
        self._values = tuple(labels.values())
        self._read_stats = read_stats

    def describe(self) -> Iterator[prometheus_client.core.Metric]:
        """Nothing, so that registration does not ask the core."""
        return iter(())

    def collect(self) -> Iterator[prometheus_client.core.Metric]:
        """Samples of one scrape."""
        info = self._info
        facts = {
            "page_size": str(info.page_size),
            "num_pages": str(info.num_pages),
            "enable_prefix_caching": str(info.prefix_cache),
            "cache_dtype": info.dtype,
        }
        yield self._gauge("vllm:cache_config_info", "Settings of the cache.", 1, facts)
        yield self._gauge("treadle:launch_depth", "Launches in flight at most.", info.depth)
        yield self._gauge("treadle:programs", "Compiled step programs.", info.num_programs)
        stats = self._read_stats()
        if stats is not None:
            yield from self._read(stats)

    def _read(self, stats: CoreStats) -> Iterator[prometheus_client.core.Metric]:
        used = 1.0 - stats.free_pages / max(stats.total_pages, 1)
        yield self._gauge("vllm:num_requests_running", "Choices in the step.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Choices in the queue.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of pages in use, 1 is all.", used)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("vllm:num_preemptions", "Requests preempted.", stats.preemptions),
            (
                "treadle:failed_launches",
                "Failures of the device that were recovered from.",
                stats.failed_launches,
            ),
            (
                "treadle:resumed_requests",
                "Requests that ran again after one.",
                stats.resumed_requests,
            ),
            (
                "treadle:compiles_after_ready",
                "Compilations by the engine after it was ready; anything but 0 is a fault.",
                stats.compiles_after_ready,
            ),
            (
                "treadle:foreign_compiles",
                "Compilations by others in this process after it was ready.",
                stats.foreign_compiles,
            ),
        ):
            yield self._counter(name, text, {"": value})
        yield self._counter("treadle:steps", "Steps by lane.", stats.steps, "lane")
        rows = {"device": stats.device_rows, "host": stats.host_rows}
        yield self._counter("treadle:rows", "Rows by where their newest id was.", rows, "source")
        host = prometheus_client.core.GaugeMetricFamily(
            "treadle:host_step_milliseconds",
            "Median time of one step, by stage; launch runs beside the others or in hand_over.",
            labels=(*self._names, "stage"),
        )
        for stage, milliseconds in stats.host_ms.items():
            host.add_metric((*self._values, stage), milliseconds)
        yield host

    def _gauge(
        self, name: str, text: str, value: float, facts: Mapping[str, str] | None = None
    ) -> prometheus_client.core.Metric:
        extra = dict(facts or {})
        family = prometheus_client.core.GaugeMetricFamily(name, text, labels=(*self._names, *extra))
        family.add_metric((*self._values, *extra.values()), value)
        return family

    def _counter(
        self, name: str, text: str, values: Mapping[str, Any], label: str | None = None
    ) -> prometheus_client.core.Metric:
        labels = self._names if label is None else (*self._names, label)
        family = prometheus_client.core.CounterMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric(self._values if label is None else (*self._values, key), value)
        return family
