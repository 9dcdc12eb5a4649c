import io
import socket
import threading

import prometheus_client
import pytest
import rich.console

from engine.serving import interceptors, metrics, top
from tests.serving.fake_core import FakeCore, FakeInfo, FakeStats
from tests.serving.running_server import running


def sample(seconds, produced=0, codes=None, **stats):
    """A scrape of a fake engine; `codes` are ended calls by their status."""
    registry = prometheus_client.CollectorRegistry()
    calls = interceptors.Calls(registry)
    for code, count in (codes or {}).items():
        calls._ended.labels("/service/Method", code).inc(count)
    made = metrics.Metrics(registry, FakeInfo(), lambda: FakeStats(**stats))
    made.produce(produced)
    for first in (0.02, 0.02, 0.4):
        made.finish(metrics.FinishedRequest(10, 5, ("stop",), 0.01, first, 1.0, 1.0))
    return top.Sample.parse(prometheus_client.generate_latest(registry).decode(), seconds)


def drawn(view):
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(view.draw())
    return console.file.getvalue()


def rows(text):
    """Words of each line without the frame."""
    return [" ".join(line.strip("│╭╮╰╯─ \n").split()) for line in text.splitlines()]


def test_screen_shows_load_rates_and_faults():
    view = top.View("here")
    view.take(sample(10.0, produced=100, num_running=3, steps={"overlap": 10, "sync": 0}))
    view.take(
        sample(
            12.0,
            produced=700,
            num_running=5,
            num_waiting=7,
            free_pages=16,
            total_pages=64,
            preemptions=4,
            failed_launches=1,
            resumed_requests=5,
            steps={"overlap": 110, "sync": 0},
            device_rows=500,
            host_rows=20,
            host_ms={"schedule": 0.25, "pack": 0.5, "launch": 0.125, "wait": 1.5, "settle": 0.75},
        )
    )
    found = rows(drawn(view))
    assert "running 5 waiting 7" in found
    assert "pages in use ██████████████████······ 75% prefix hits –" in found
    assert "preemptions 4" in found
    assert "output tok/s 300 █" in found
    assert "first token p50 21.2 ms p99 492.5 ms" in found
    assert "steps overlap 50/s depth 2" in found
    assert "rows/s, device 250 rows/s, host 10" in found
    assert "host ms schedule 0.25, pack 0.50 launch 0.12, wait 1.50" in found
    assert "settle 0.75" in found
    assert "engine's faults failed launches 1, resumed 5" in found
    assert "calls failed none" in found


def test_calls_that_did_not_end_well_stand_by_their_status_beside_the_engines_faults():
    view = top.View("here")
    codes = {"OK": 7, "INTERNAL": 3, "CANCELLED": 2, "DEADLINE_EXCEEDED": 1, "UNAVAILABLE": 4}
    codes |= {"INVALID_ARGUMENT": 1234, "RESOURCE_EXHAUSTED": 5, "UNAUTHENTICATED": 6}
    view.take(sample(1.0, codes=codes))
    text = drawn(view)
    found = rows(text)
    assert "calls failed INTERNAL 3" in found
    refused = "INVALID_ARGUMENT 1,234, RESOURCE_EXHAUSTED 5, UNAUTHENTICATED 6, UNAVAILABLE 4"
    # Wrapped, and no status cut off.
    assert f"calls refused {refused}" in " ".join(found)
    assert "calls given up CANCELLED 2, DEADLINE_EXCEEDED 1" in found
    assert "engine's faults none" in found
    assert "OK" not in text


def test_server_that_was_started_anew_does_not_show_negative_rates():
    view = top.View("here")
    view.take(sample(1.0, produced=1000))
    view.take(sample(2.0, produced=10))
    view.take(sample(3.0, produced=60))
    assert "output tok/s 50 █" in rows(drawn(view))


def test_server_that_does_not_answer_is_said_and_the_last_screen_stays():
    view = top.View("here")
    view.miss("nobody there")
    assert "nobody there" in drawn(view)
    view.take(sample(1.0, num_running=3))
    view.miss("no metrics at here")
    assert "no metrics at here" in drawn(view) and "running" in drawn(view)


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, float("inf"): 0.0}, 0.5, None),
        ({1.0: 10.0, float("inf"): 10.0}, 0.5, 0.5),
        ({1.0: 5.0, 2.0: 10.0, float("inf"): 10.0}, 0.75, 1.5),
        ({1.0: 0.0, float("inf"): 4.0}, 0.99, 1.0),
    ],
)
def test_quantile_of_a_histogram(buckets, share, expected):
    assert top.quantile(buckets, share) == expected


def test_sparkline_scales_to_its_highest_value():
    assert top.sparkline([0.0, 7.0, 3.5, -1.0]) == "▁█▅▁"
    assert top.sparkline([0.0, 0.0]) == "▁▁"
    assert top.sparkline([]) == ""


def test_watch_reads_a_running_server():
    screens = []
    with running(FakeCore(), metrics_port=0) as server:
        top.watch(server.metrics_url, screens.append, interval=0.01, count=3)
    assert len(screens) == 3


def test_address_without_metrics_is_named_with_the_way_out():
    with pytest.raises(OSError, match=r"no metrics at http://127.0.0.1:1/metrics .*--metrics-port"):
        top.read("http://127.0.0.1:1/metrics")


def test_port_that_does_not_speak_http_is_said_to():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            connection.recv(1024)
            connection.sendall(b"\x00\x00\x18\x04\x00\xff")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        with pytest.raises(OSError, match=r"what answers is not HTTP.*--metrics-port"):
            top.read(url)
        thread.join()
