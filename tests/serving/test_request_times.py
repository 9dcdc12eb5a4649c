"""The time of a request's first schedule, from the scheduler's own clock to what a caller reads."""

from __future__ import annotations

import types

import pytest

from engine.scheduling.scheduler import Scheduler
from engine.serving.frontend import Prepared
from engine.serving.outputs import OutputAssembler
from tests.scheduling import driver, fake_device


class Engine:
    """A real scheduler over a fake device; time passes only when a test says so.

    Args:
      **changes: of the scheduler's configuration.
    """

    def __init__(self, **changes):
        self.now = 0.0
        config = driver.config(**changes)
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.device = fake_device.FakeDevice(config)
        self.assemblers = {}

    def submit(self, name, prompt, **options):
        prepared = Prepared(driver.request(name, prompt, **options), None)
        self.scheduler.submit(prepared.request)
        self.assemblers[name] = OutputAssembler(prepared, None, self.scheduler.abort)

    def step(self, seconds=1.0):
        """Launches, takes `seconds`, settles; False: there was nothing to launch."""
        schedule = self.scheduler.schedule()
        if schedule is None:
            return False
        self.device.launch(schedule)
        self.now += seconds
        self.scheduler.settle(*self.device.settle())
        self.take()
        return True

    def take(self):
        for delta in self.scheduler.take_deltas():
            self.assemblers[delta.request_id].push(delta, self.now)

    def times(self, name):
        """Queue, first token, last token and end of a request, since its submission."""
        metrics = self.assemblers[name].output().metrics
        return (metrics.queue, metrics.ttft, metrics.last_token, metrics.e2e)


@pytest.fixture
def engine(monkeypatch):
    return engine_with(monkeypatch)


def engine_with(monkeypatch, **changes):
    """An engine whose assemblers read its clock too."""
    made = Engine(**changes)
    clock = types.SimpleNamespace(perf_counter=lambda: made.now, time=lambda: 0.0)
    monkeypatch.setattr("engine.serving.outputs.time", clock)
    return made


def test_a_request_that_runs_at_once_waited_for_nothing(engine):
    engine.now = 7.0
    engine.submit("a", [1, 2, 3], max_tokens=3)
    assert engine.times("a") == (None, None, None, None)
    while engine.step():
        pass
    assert engine.times("a") == (0.0, 1.0, 3.0, 3.0)


def test_queue_time_ends_with_the_first_chunk_not_with_the_place_in_the_step(engine):
    # Both get a slot at once, but the first prompt takes the budget of two steps.
    engine.submit("long", list(range(1, 33)), max_tokens=1)
    engine.submit("behind", [5, 6], max_tokens=1)
    assert engine.step()
    assert engine.scheduler._requests["behind"].choices[0].slot >= 0
    while engine.step():
        pass
    assert engine.times("long") == (0.0, 2.0, 2.0, 2.0)
    assert engine.times("behind") == (2.0, 3.0, 3.0, 3.0)


def test_a_request_waits_until_a_row_is_free(monkeypatch):
    engine = engine_with(monkeypatch, max_rows=1, max_slots=2)
    engine.submit("a", [1], max_tokens=4)
    engine.now = 0.5
    engine.submit("b", [2], max_tokens=2)
    while engine.step():
        pass
    assert engine.times("a") == (0.5, 1.5, 4.5, 4.5)
    assert engine.times("b") == (4.0, 5.0, 6.0, 6.0)


def test_a_preempted_request_keeps_the_time_of_its_first_schedule(engine):
    engine.submit("a", [1, 2], max_tokens=4)
    engine.now = 3.0
    assert engine.step() and engine.step()
    engine.scheduler._preempt(engine.scheduler._requests["a"].choices[0].slot)
    engine.now = 60.0
    while engine.step():
        pass
    assert engine.scheduler.stats.num_preemptions == 1
    assert engine.times("a") == (3.0, 4.0, 62.0, 62.0)


def test_choices_of_a_request_share_the_first_schedule_of_any(engine):
    engine.submit("a", [1, 2, 3, 4, 5, 6], max_tokens=2, n=2)
    while engine.step():
        pass
    # The second choice waits for the pages of the first one's prompt.
    assert engine.times("a") == (0.0, 1.0, 3.0, 3.0)


def test_a_request_aborted_in_the_queue_was_never_scheduled(engine):
    engine.submit("a", [1], max_tokens=4)
    engine.now = 9.0
    engine.scheduler.abort("a")
    engine.take()
    assert engine.times("a") == (None, None, None, 9.0)


def test_a_request_aborted_before_its_first_token_was_scheduled_all_the_same(engine):
    engine.submit("a", list(range(1, 33)), max_tokens=4)
    assert engine.step()
    engine.now = 9.0
    engine.scheduler.abort("a")
    engine.take()
    assert engine.times("a") == (0.0, None, None, 9.0)


def test_a_request_whose_launch_was_lost_keeps_the_time_of_its_first_schedule(engine):
    engine.submit("a", [1, 2], max_tokens=2)
    lost = engine.scheduler.schedule()
    engine.now = 5.0
    engine.scheduler.void([lost], "the device failed")
    while engine.step():
        pass
    assert engine.times("a") == (0.0, 6.0, 7.0, 7.0)
