import queue
import threading
import time

import numpy as np
import pytest

from engine.config import Limits
from engine.request import Request, SamplingParams
from engine.scheduling.scheduler import QueueFull
from engine.serving.thread import EngineDead, EngineThread
from tests.serving.fake_core import EOS, FakeCore

_SECONDS = 10.0


class Collector:
    """A sink that keeps events until they are asked for."""

    def __init__(self):
        self.events = queue.SimpleQueue()
        self.threads = set()

    def __call__(self, event):
        self.threads.add(threading.current_thread().name)
        self.events.put(event)

    def next(self):
        return self.events.get(timeout=_SECONDS)

    def until_finished(self, n=1):
        deltas, num_finished = [], 0
        while num_finished < n:
            event = self.next()
            if isinstance(event, Exception):
                raise event
            deltas.append(event)
            num_finished += event.finish_reason is not None
        return deltas

    def ids(self):
        return [i for delta in self.until_finished() for i in delta.token_ids]


def request(name="r", prompt=(1, 2, 3), max_tokens=5, **params):
    return Request(
        request_id=name,
        prompt_ids=np.array(prompt, np.int32),
        params=SamplingParams(temperature=0.0, **params),
        stop_ids=(EOS,),
        eos_ids=(EOS,),
        max_tokens=max_tokens,
        seed=0,
    )


@pytest.fixture
def engine():
    """Makes engine threads over fake cores and closes them."""
    made = []

    def make(**options):
        core = FakeCore(**options)
        made.append(EngineThread(lambda: core))
        made[-1].wait_ready(_SECONDS)
        return made[-1], core

    yield make
    for one in made:
        one.close()


def test_deltas_of_a_request_come_in_order_from_the_engines_thread(engine):
    thread, _ = engine(reply=lambda request, choice: (10, 11, 12, 13, EOS))
    sink = Collector()
    thread.submit(request(max_tokens=9), sink)
    assert sink.ids() == [10, 11, 12, 13, EOS]
    assert sink.threads == {"treadle-engine"}


def test_requests_from_many_threads_do_not_mix(engine):
    thread, _ = engine(reply=lambda request, choice: [int(request.prompt_ids[0])] * 4)
    sinks = [Collector() for _ in range(24)]

    def submit(first):
        for index in range(first, 24, 4):
            thread.submit(request(f"r{index}", prompt=[index], max_tokens=4), sinks[index])

    workers = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index, sink in enumerate(sinks):
        assert sink.ids() == [index] * 4


def test_idle_engine_sleeps_and_wakes(engine):
    thread, core = engine()
    first = Collector()
    thread.submit(request(), first)
    first.until_finished()
    looks = []
    step = core.step
    core.step = lambda: looks.append(1) or step()
    time.sleep(0.1)
    # One look may already have been under way.
    assert len(looks) <= 1
    second = Collector()
    thread.submit(request(), second)
    assert len(second.ids()) == 5


def test_abort_ends_a_request_while_it_runs(engine):
    thread, _ = engine(step_seconds=0.001)
    sink, other = Collector(), Collector()
    thread.submit(request("a", max_tokens=10**6), sink)
    thread.submit(request("b", max_tokens=20), other)
    sink.next()
    thread.abort("a")
    assert sink.until_finished()[-1].finish_reason == "abort"
    assert len(other.ids()) == 20


def test_abort_of_one_choice_leaves_the_others(engine):
    thread, core = engine(step_seconds=0.001)
    sink = Collector()
    thread.submit(request(max_tokens=50, n=2), sink)
    sink.next()
    thread.abort("r", "stop", 0)
    ends = {d.choice: d.finish_reason for d in sink.until_finished(2) if d.finish_reason}
    assert ends == {0: "stop", 1: "length"}
    assert core.aborts == [("r", "stop", 0)]


def test_abort_of_an_unknown_request_is_no_error(engine):
    thread, _ = engine()
    thread.abort("nobody")
    sink = Collector()
    thread.submit(request(), sink)
    assert len(sink.ids()) == 5


def test_abort_right_behind_submit_is_obeyed(engine):
    thread, _ = engine(step_seconds=0.001)
    sink = Collector()
    thread.submit(request(max_tokens=10**6), sink)
    thread.abort("r")
    assert sink.until_finished()[-1].finish_reason == "abort"


def test_live_request_id_is_refused_and_may_be_used_again_later(engine):
    # SCHED-32: the live request keeps its stream.
    thread, _ = engine(step_seconds=0.001)
    first, second, third = Collector(), Collector(), Collector()
    thread.submit(request(max_tokens=30), first)
    thread.submit(request(max_tokens=30), second)
    error = second.next()
    assert isinstance(error, ValueError)
    assert "request_id 'r' is live already" in str(error)
    assert len(first.ids()) == 30
    thread.submit(request(), third)
    assert len(third.ids()) == 5


def test_abort_by_an_owner_reaches_its_own_request_alone(engine):
    thread, core = engine(step_seconds=0.001)
    first, second = Collector(), Collector()
    thread.submit(request(max_tokens=30), first)
    thread.submit(request(max_tokens=30), second)
    thread.abort("r", owner=second)
    assert len(first.ids()) == 30
    thread.submit(request(max_tokens=30), second)
    thread.abort("r", "stop", 0, owner=first)
    assert isinstance(second.next(), ValueError)
    assert len(second.ids()) == 30
    thread.submit(request(max_tokens=10**6), second)
    thread.abort("r", owner=second)
    assert second.until_finished()[-1].finish_reason == "abort"
    assert len(core.aborts) == 1


def test_request_the_core_refuses_fails_alone(engine):
    thread, _ = engine(limits=Limits(queued_requests=0))
    sink = Collector()
    thread.submit(request(), sink)
    assert isinstance(sink.next(), QueueFull)
    assert thread.healthy


def test_failing_core_fails_every_live_request_by_name_and_marks_the_engine_dead(engine):
    thread, core = engine(fail_at_step=3, step_seconds=0.001)
    sinks = [Collector() for _ in range(3)]
    for index, sink in enumerate(sinks):
        thread.submit(request(f"r{index}", max_tokens=10**6), sink)
    for sink in sinks:
        with pytest.raises(EngineDead, match="3 steps failed in a row, the last one by Runtime"):
            sink.until_finished()
    assert not thread.healthy
    assert "3 steps failed" in thread.failure
    with pytest.raises(EngineDead, match="3 steps failed"):
        thread.submit(request(), Collector())
    with pytest.raises(EngineDead, match="3 steps failed"):
        thread.call(lambda core: core.stats())
    thread.abort("r0")
    thread.close()
    assert core.is_closed


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (RuntimeError("device lost"), "RuntimeError"),
        (ValueError("RESOURCE_EXHAUSTED: 3 GiB asked for"), "running out of device memory"),
        (MemoryError(), "running out of device memory"),
        (AssertionError("a slot is lost"), "AssertionError"),
    ],
    ids=["device", "device memory", "host memory", "our own fault"],
)
@pytest.mark.parametrize("num_failures", [1, 2])
def test_failed_steps_are_recovered_from_and_the_engine_serves_on(
    engine, failure, reason, num_failures
):
    thread, core = engine(fail_at_step=3, num_failures=num_failures, failure=failure)
    sink = Collector()
    thread.submit(request(max_tokens=8), sink)
    assert len(sink.ids()) == 8
    assert thread.healthy
    assert core.recoveries == [reason] * num_failures


def test_recovery_that_fails_ends_the_engine(engine):
    thread, core = engine(fail_at_step=2, num_failures=1)
    core.recover = lambda reason: 1 / 0
    sink = Collector()
    thread.submit(request(max_tokens=8), sink)
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        sink.until_finished()
    assert not thread.healthy


def test_live_requests_that_cannot_run_fail_instead_of_waiting_for_ever(engine):
    thread, core = engine()
    core.step = lambda: False
    sink = Collector()
    thread.submit(request(), sink)
    with pytest.raises(EngineDead, match="requests are live but none of them can run"):
        sink.until_finished()


def test_core_that_does_not_close_cleanly_is_logged(engine, caplog):
    thread, core = engine()
    core.close = lambda: 1 / 0
    thread.close()
    assert "did not close cleanly" in caplog.text


def test_request_handed_in_while_the_engine_dies_is_not_lost():
    is_building, may_fail = threading.Event(), threading.Event()

    def build():
        is_building.set()
        may_fail.wait(_SECONDS)
        raise ValueError("no such model")

    thread = EngineThread(build)
    is_building.wait(_SECONDS)
    sink = Collector()
    thread.submit(request(), sink)
    future = thread.call(lambda core: core.stats())
    assert not thread.is_ready
    may_fail.set()
    assert isinstance(sink.next(), EngineDead)
    with pytest.raises(EngineDead, match="did not start: ValueError: no such model"):
        future.result(_SECONDS)
    with pytest.raises(ValueError, match="no such model"):
        thread.wait_ready(_SECONDS)
    assert not thread.healthy
    thread.close()


def test_requests_handed_in_before_ready_run_when_it_is():
    may_start = threading.Event()

    def build():
        may_start.wait(_SECONDS)
        return FakeCore()

    thread = EngineThread(build)
    sink = Collector()
    thread.submit(request(), sink)
    with pytest.raises(TimeoutError):
        thread.wait_ready(0.01)
    may_start.set()
    assert len(sink.ids()) == 5
    assert thread.healthy
    thread.close()


def test_close_ends_live_requests_closes_the_core_and_is_idempotent(engine):
    thread, core = engine(step_seconds=0.001)
    sink = Collector()
    thread.submit(request(max_tokens=10**6), sink)
    sink.next()
    thread.close()
    thread.close()
    with pytest.raises(EngineDead, match="is closed"):
        sink.until_finished()
    assert core.is_closed
    with pytest.raises(EngineDead, match="is closed"):
        thread.submit(request(), Collector())


def test_close_that_does_not_wait_closes_a_core_still_being_built():
    may_start, core = threading.Event(), FakeCore()

    def build():
        may_start.wait(_SECONDS)
        return core

    thread = EngineThread(build)
    thread.close(0.0)
    may_start.set()
    thread.close()
    assert core.is_closed


def test_sink_that_raises_ends_its_own_request_alone(engine):
    thread, core = engine(step_seconds=0.001)

    def broken(event):
        raise OSError("reader is gone")

    other = Collector()
    thread.submit(request("a", max_tokens=10**6), broken)
    thread.submit(request("b", max_tokens=20), other)
    assert len(other.ids()) == 20
    assert [one[0] for one in core.aborts] == ["a"]
    assert thread.healthy


def test_call_runs_on_the_engines_thread_and_its_error_harms_nobody(engine):
    thread, _ = engine()
    name = thread.call(lambda core: threading.current_thread().name).result(_SECONDS)
    assert name == "treadle-engine"

    def fail(core):
        raise KeyError("wrong question")

    with pytest.raises(KeyError, match="wrong question"):
        thread.call(fail).result(_SECONDS)
    assert thread.healthy


def test_finished_requests_leave_nothing_behind(engine):
    # SCHED-05, SCHED-06: the map of live requests is empty whatever way they went.
    thread, _ = engine()
    for index in range(200):
        sink = Collector()
        thread.submit(request(f"r{index}", max_tokens=1 + index % 3, n=1 + index % 2), sink)
        if index % 5 == 0:
            thread.abort(f"r{index}")
        sink.until_finished(1 + index % 2)
    assert thread.call(lambda core: core.stats().num_running).result(_SECONDS) == 0
    assert thread._live == {}
