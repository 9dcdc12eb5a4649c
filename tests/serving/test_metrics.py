import concurrent.futures
import functools
import time
import urllib.request

import grpc
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.request import Delta
from engine.serving import metrics
from engine.serving.client import Client
from tests.serving.fake_core import FakeCore, FakeInfo, FakeStats
from tests.serving.running_server import running

_LABELS = {"model_name": "fake", "engine": "0"}


class Scraped:
    """Samples of one registry, read as a scraper reads them."""

    def __init__(self, text):
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        self.names = {name for name, _ in self.samples}

    def __call__(self, name, **labels):
        return self.samples[name, frozenset((_LABELS | labels).items())]


def _scrape(registry):
    return Scraped(prometheus_client.generate_latest(registry).decode())


_IDLE = FakeStats()


def _made(stats=_IDLE):
    registry = prometheus_client.CollectorRegistry()
    return registry, metrics.Metrics(registry, FakeInfo(), lambda: stats)


def _finished(**changes):
    fields = {
        "num_prompt_tokens": 5,
        "num_output_tokens": 8,
        "finish_reasons": ("stop", "length"),
        "queue_seconds": 0.125,
        "first_token_seconds": 0.5,
        "last_token_seconds": 2.0,
        "total_seconds": 2.25,
    }
    return metrics.FinishedRequest(**fields | changes)


def test_a_finished_request_is_counted_under_vllms_names():
    registry, made = _made()
    made.produce(8)
    made.finish(_finished())
    made.produce(1)
    made.finish(_finished(finish_reasons=("stop",), num_output_tokens=1))
    scraped = _scrape(registry)
    assert scraped("vllm:prompt_tokens_total") == 10
    assert scraped("vllm:request_prompt_tokens_sum") == 10
    assert scraped("vllm:request_generation_tokens_sum") == 9
    assert scraped("vllm:request_generation_tokens_bucket", le="1.0") == 1
    assert scraped("vllm:request_decode_time_seconds_sum") == 3.0
    assert scraped("vllm:generation_tokens_total") == 9
    assert scraped("vllm:request_success_total", finished_reason="stop") == 2
    assert scraped("vllm:request_success_total", finished_reason="length") == 1
    assert scraped("vllm:time_to_first_token_seconds_sum") == 1.0
    assert scraped("vllm:e2e_request_latency_seconds_count") == 2
    # Two choices of four tokens each, side by side: three gaps in 1.5 s; one token has none.
    assert scraped("vllm:time_per_output_token_seconds_sum") == 0.5
    assert scraped("vllm:time_per_output_token_seconds_count") == 1


_STAGES = ("queue", "prefill", "decode", "inference")


def _counts(scraped):
    return [int(scraped(f"vllm:request_{stage}_time_seconds_count")) for stage in _STAGES]


def test_stages_of_a_request_join_without_a_gap():
    registry, made = _made()
    made.finish(_finished())
    scraped = _scrape(registry)
    sums = [scraped(f"vllm:request_{stage}_time_seconds_sum") for stage in _STAGES]
    assert sums == [0.125, 0.375, 1.5, 1.875]
    assert _counts(scraped) == [1, 1, 1, 1]
    assert scraped("vllm:e2e_request_latency_seconds_sum") == 2.25


def test_a_request_that_ended_before_its_first_token_has_no_first_token_time():
    registry, made = _made()
    nothing = {"first_token_seconds": None, "last_token_seconds": None, "num_output_tokens": 0}
    made.finish(_finished(finish_reasons=("abort",), **nothing))
    scraped = _scrape(registry)
    assert scraped("vllm:time_to_first_token_seconds_count") == 0
    assert _counts(scraped) == [1, 0, 0, 0]
    made.finish(_finished(finish_reasons=("abort",), queue_seconds=None, **nothing))
    scraped = _scrape(registry)
    assert _counts(scraped) == [1, 0, 0, 0]
    assert scraped("vllm:e2e_request_latency_seconds_count") == 2
    assert scraped("vllm:request_success_total", finished_reason="abort") == 2


def test_counters_of_the_core_are_read_at_every_scrape():
    stats = [FakeStats(num_running=1), FakeStats(num_running=2)]
    registry = prometheus_client.CollectorRegistry()
    metrics.Metrics(registry, FakeInfo(), lambda: stats.pop(0))
    assert _scrape(registry)("vllm:num_requests_running") == 1
    assert _scrape(registry)("vllm:num_requests_running") == 2


def test_the_core_is_shown_whole():
    stats = FakeStats(
        num_running=3,
        num_waiting=4,
        free_pages=16,
        total_pages=64,
        prefix_queries=100,
        prefix_hits=40,
        preemptions=2,
        failed_launches=3,
        resumed_requests=9,
        steps={"overlap": 7, "sync": 1},
        device_rows=11,
        host_rows=12,
        compiles_after_ready=0,
        foreign_compiles=5,
        host_ms={"schedule": 0.25},
    )
    scraped = _scrape(_made(stats)[0])
    assert scraped("vllm:num_requests_waiting") == 4
    assert scraped("vllm:kv_cache_usage_perc") == 0.75
    assert scraped("vllm:prefix_cache_queries_total") == 100
    assert scraped("vllm:prefix_cache_hits_total") == 40
    assert scraped("vllm:num_preemptions_total") == 2
    assert scraped("treadle:failed_launches_total") == 3
    assert scraped("treadle:resumed_requests_total") == 9
    assert scraped("treadle:steps_total", lane="overlap") == 7
    assert scraped("treadle:steps_total", lane="sync") == 1
    assert scraped("treadle:rows_total", source="device") == 11
    assert scraped("treadle:rows_total", source="host") == 12
    assert scraped("treadle:compiles_after_ready_total") == 0
    assert scraped("treadle:foreign_compiles_total") == 5
    assert scraped("treadle:launch_depth") == 2
    assert scraped("treadle:programs") == 3
    assert scraped("treadle:host_step_milliseconds", stage="schedule") == 0.25
    assert "vllm:cache_config_info" in scraped.names


def test_a_core_that_does_not_answer_leaves_the_rest_standing():
    registry, made = _made(stats=None)
    made.finish(_finished())
    scraped = _scrape(registry)
    assert "vllm:num_requests_running" not in scraped.names
    assert scraped("vllm:prompt_tokens_total") == 5


def test_two_engines_of_one_process_do_not_meet():
    (first, one), (second, _) = _made(), _made()
    one.finish(_finished())
    assert _scrape(first)("vllm:prompt_tokens_total") == 5
    assert _scrape(second)("vllm:prompt_tokens_total") == 0


def test_a_server_shows_what_it_served_refused_and_lost():
    core = FakeCore(step_seconds=0.002)
    with running(core, metrics_port=0) as server, Client(server.address, timeout=20.0) as client:
        client.generate([1, 2, 3], {"max_tokens": 4})
        with pytest.raises(ValueError, match="top_p"):
            client.generate([1], {"top_p": 2.0})
        stream = client.stream([1, 2], {"max_tokens": 200})
        next(stream)
        stream.close()
        scraped = _until_counted(server, "abort")
    assert scraped("vllm:request_success_total", finished_reason="length") == 1
    assert scraped("vllm:prompt_tokens_total") == 5
    assert scraped("vllm:generation_tokens_total") >= 5
    assert scraped("treadle:requests_refused_total", code="INVALID_ARGUMENT") == 1
    assert scraped("treadle:steps_total", lane="overlap") == core.num_steps


def test_every_stage_of_every_finished_request_of_a_server_is_timed():
    core = FakeCore(info=FakeInfo(max_rows=2), step_seconds=0.002)
    with running(core, metrics_port=0) as server, Client(server.address, timeout=20.0) as client:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            ask = functools.partial(client.generate, params={"max_tokens": 5})
            list(pool.map(ask, [[i] for i in range(1, 13)]))
        scraped = _until_counted(server, "length")
    assert scraped("vllm:request_success_total", finished_reason="length") == 12
    assert _counts(scraped) == [12, 12, 12, 12]

    def total(name):
        return scraped(f"vllm:{name}_seconds_sum")

    stages = {stage: total(f"request_{stage}_time") for stage in _STAGES}
    assert all(seconds > 0 for seconds in stages.values())
    assert stages["queue"] + stages["prefill"] == pytest.approx(total("time_to_first_token"))
    assert stages["prefill"] + stages["decode"] == pytest.approx(stages["inference"])
    assert stages["queue"] + stages["inference"] <= total("e2e_request_latency") + 1e-9


def test_a_request_that_failed_in_the_engine_counts_as_error():
    core = BreaksAfterTwo()
    with running(core, metrics_port=0) as server, Client(server.address, timeout=20.0) as client:
        with pytest.raises(grpc.RpcError):
            client.generate([1], {"max_tokens": 9})
        with pytest.raises(grpc.RpcError):
            list(client.stream([1], {"max_tokens": 9}))
        scraped = _until_counted(server, "error")
    assert scraped("vllm:request_success_total", finished_reason="abort") == 0
    assert scraped("treadle:requests_refused_total", code="INTERNAL") == 2


class BreaksAfterTwo(FakeCore):
    """Fails every request after its second token."""

    def poll(self):
        return [self._broken(delta) for delta in super().poll()]

    def _broken(self, delta):
        time.sleep(0.01)
        choice = next(
            (one for one in self._live() if one.request.request_id == delta.request_id), None
        )
        if choice is None or len(choice.ids) < 3:
            return delta
        self._running.remove(choice)
        return Delta(delta.request_id, delta.choice, finish_reason="error", error="not finite")


def _until_counted(server, reason):
    """The first scrape that knows of a choice ended for `reason`, with the engine idle again."""
    end = time.monotonic() + 20.0
    while True:
        with urllib.request.urlopen(server.metrics_url, timeout=20.0) as answer:
            scraped = Scraped(answer.read().decode())
        key = frozenset((_LABELS | {"finished_reason": reason}).items())
        is_idle = (
            scraped.samples.get(("vllm:num_requests_running", frozenset(_LABELS.items()))) == 0
        )
        if is_idle and ("vllm:request_success_total", key) in scraped.samples:
            return scraped
        assert time.monotonic() < end
        time.sleep(0.02)
