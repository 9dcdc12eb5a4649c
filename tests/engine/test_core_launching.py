"""Launches in a thread of their own: queued, failing, aborted and closed, nobody sees it."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from engine.core import OWN_STAGES, Core
from engine.execution.packing import pack_install
from engine.request import Request
from tests.engine import loop
from tests.families import tiny

SECONDS = 30.0
"""Long enough for anything that is not stuck."""
FAULT = "the program fell over"


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        loop.request("short", tiny.random_ids("llama", 5), 9),
        loop.request("chunked", tiny.random_ids("llama", 60), 7),
        loop.request("sampled", tiny.random_ids("llama", 12), 8, temperature=1.0, n=2),
        loop.request("late", tiny.random_ids("llama", 33), 6),
    ]


@pytest.fixture(scope="module")
def expected(llama_core, requests) -> dict[tuple[str, int], tuple[Any, ...]]:
    return said(loop.run(loop.rescheduled(llama_core), requests))


@pytest.fixture
def faked(llama_core, monkeypatch) -> Iterator[Callable[..., Fake]]:
    """Puts a fake before the programs of the shared runner; the next test finds it sound."""
    yield lambda **kinds: Fake(llama_core, monkeypatch, **kinds)
    monkeypatch.undo()
    llama_core.runner.reset_state()


class Fake:
    """Stands before every step program: counts, waits, fails.

    Args:
      before: called with the number of each call, from 1; the program runs when it returns.
      after: the same, when the program has run and its old state is gone.
    """

    def __init__(
        self,
        core: Core,
        monkeypatch: pytest.MonkeyPatch,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.num_calls = 0
        self.threads: set[str] = set()
        self._before, self._after = before, after
        programs = core.runner.programs
        steps = {key: self._faked(program) for key, program in programs.steps.items()}
        monkeypatch.setattr(core.runner, "programs", dataclasses.replace(programs, steps=steps))

    def _faked(self, program: Any) -> Any:
        def call(*args: Any) -> Any:
            self.num_calls += 1
            number = self.num_calls
            self.threads.add(threading.current_thread().name)
            self._before(number)
            result = program(*args)
            self._after(number)
            return result

        return call


def said(outputs: loop.Outputs) -> dict[tuple[str, int], tuple[Any, ...]]:
    return {key: (tuple(one.token_ids), one.finish_reason) for key, one in outputs.items()}


def failing_at(*numbers: int) -> Callable[[int], None]:
    def fail(number: int) -> None:
        if number in numbers:
            raise RuntimeError(FAULT)

    return fail


def finish(core: Core, outputs: loop.Outputs) -> int:
    """Runs to the end as the engine's thread does; returns the failed steps."""
    num_failures = 0
    while not core.is_idle:
        try:
            core.step()
        except RuntimeError as error:
            assert str(error) == FAULT
            num_failures += 1
            core.recover("a fault made for the test")
            core.scheduler.audit()
        loop.take(core, outputs)
    loop.assert_released(core)
    return num_failures


@pytest.mark.parametrize(
    ("lane", "depth", "thread"),
    [
        ("sync", 1, "MainThread"),
        ("overlap", 1, "MainThread"),
        ("overlap", 2, "treadle-launch"),
        ("overlap", 3, "treadle-launch"),
    ],
)
def test_thread_of_its_own_is_for_launches_in_flight(
    llama_core, faked, requests, expected, lane, depth, thread
):
    fake = faked()
    core = loop.rescheduled(llama_core, depth=depth, ids_from_host=lane == "sync")
    names = [one.name for one in threading.enumerate()]
    assert "treadle-launch" not in names, "the lane before had one, which ended with it"
    assert said(loop.run(core, requests)) == expected
    assert fake.threads == {thread}


def test_next_step_is_packed_while_the_last_one_waits_to_be_launched(llama_core, faked, requests):
    gate = threading.Event()
    fake = faked(before=lambda number: assert_opened(gate))
    core = loop.rescheduled(llama_core, depth=3)
    for one in requests:
        core.submit(one)
    assert core.step() and core.step()
    assert core.scheduler.stats.num_in_flight == 2 and fake.num_calls <= 1
    gate.set()
    assert finish(core, {}) == 0


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(SECONDS)


@pytest.mark.parametrize("is_after", [False, True], ids=["not begun", "donated state lost"])
@pytest.mark.parametrize(("depth", "at"), [(2, 1), (2, 2), (2, 5), (2, 9), (3, 4)])
def test_failed_launch_takes_the_ones_queued_behind_it_along(
    llama_core, faked, monkeypatch, requests, expected, depth, at, is_after
):
    """Call `at` fails once `depth - 1` launches are queued behind it; none of them runs."""
    queued = threading.Event()

    def fail_when_queued(number: int) -> None:
        if number == at:
            assert queued.wait(SECONDS)
            raise RuntimeError(FAULT)

    fake = faked(**{"after" if is_after else "before": fail_when_queued})
    core = loop.rescheduled(llama_core, depth=depth)
    handed, voided = [], []
    launch, void = core.runner.launch, core.scheduler.void

    def watched_launch(packed):
        launched = launch(packed)
        handed.append(packed.schedule.step)
        if len(handed) == at + depth - 1:
            queued.set()
        return launched

    def watched_void(schedules, reason):
        voided.append(([one.step for one in schedules], fake.num_calls))
        void(schedules, reason)

    monkeypatch.setattr(core.runner, "launch", watched_launch)
    monkeypatch.setattr(core.scheduler, "void", watched_void)
    outputs: loop.Outputs = {}
    for one in requests:
        core.submit(one)
    assert finish(core, outputs) == 1
    assert voided == [(handed[at - 1 : at + depth - 1], at)]
    assert said(outputs) == expected
    stats = core.stats()
    assert stats.failed_launches == 1 and 1 <= stats.resumed_requests <= len(requests)
    on_device, on_host = core.runner.device_counters()
    assert on_device > 0 and on_host > 0, "it goes on in the same lane"


def test_request_in_two_failed_calls_ends_and_the_rest_goes_on(
    llama_core, faked, requests, expected
):
    faked(before=failing_at(2, 3))
    core = loop.rescheduled(llama_core)
    outputs: loop.Outputs = {}
    core.submit(requests[0])
    assert finish(core, outputs) == 2
    for one in requests[1:]:
        core.submit(one)
    assert finish(core, outputs) == 0
    failed = outputs.pop(("short", 0))
    assert failed.finish_reason == "error" and failed.error == (
        "request 'short' was in two failed launches, the last one by a fault made for the test"
    )
    assert said(outputs) == {key: one for key, one in expected.items() if key[0] != "short"}


def test_device_whose_every_call_fails_is_given_up(llama_core, faked, requests):
    faked(before=failing_at(*range(3, 99)))
    core = loop.rescheduled(llama_core)
    for i in range(40):
        core.submit(dataclasses.replace(requests[0], request_id=f"r{i}"))
    with pytest.raises(RuntimeError, match="6 steps failed with nothing settled between"):
        finish(core, {})


def test_state_is_made_anew_only_when_no_call_is_under_way(
    llama_core, faked, monkeypatch, requests, expected
):
    events: list[str] = []
    begun = threading.Event()

    def linger(number: int) -> None:
        if number == 1:
            begun.set()
            time.sleep(0.2)
            events.append("call over")

    fake = faked(after=linger)
    core = loop.rescheduled(llama_core, depth=3)
    programs = core.runner.programs

    def fresh() -> Any:
        events.append("fresh")
        return programs.fresh()

    monkeypatch.setattr(core.runner, "programs", dataclasses.replace(programs, fresh=fresh))
    outputs: loop.Outputs = {}
    for one in requests:
        core.submit(one)
    core.step(), core.step()
    assert begun.wait(SECONDS)
    core.recover("a fault made for the test")
    assert events == ["call over", "fresh"]
    assert fake.num_calls == 1, "what was queued behind it is void and was not begun"
    assert finish(core, outputs) == 0
    assert said(outputs) == expected


def test_state_is_read_after_everything_that_was_launched(llama_core, faked, requests):
    faked(before=lambda number: time.sleep(0.05))
    core = loop.rescheduled(llama_core, depth=3)
    before = core.stats()
    for one in requests:
        core.submit(one)
    core.step(), core.step()
    counted = core.runner.device_counters()
    after = core.stats()
    assert core.scheduler.stats.num_in_flight == 2
    assert counted == (
        after.device_rows - before.device_rows,
        after.host_rows - before.host_rows,
    )
    assert sum(counted) > 0
    finish(core, {})


@pytest.mark.parametrize("name", ["run", "install", "state"])
def test_whoever_else_moves_the_state_on_waits_for_what_was_launched(
    llama_core, faked, requests, name
):
    gate = threading.Event()
    fake = faked(before=lambda number: assert_opened(gate) if number == 1 else None)
    core = loop.rescheduled(llama_core, depth=3)
    runner = core.runner
    for one in requests:
        core.submit(one)
    first, second = core.scheduler.schedule(), core.scheduler.schedule()
    assert first is not None and second is not None
    launched = runner.launch(runner.pack(first))
    packed = runner.pack(second)
    threading.Timer(0.1, gate.set).start()
    if name == "run":
        runner.run(packed)
    elif name == "install":
        shape = runner.programs.install_shape
        runner.install(pack_install((), (np.zeros((3, 0), np.int32),) * shape.num_groups, shape))
    else:
        runner.state = runner.programs.fresh()
    assert launched.started.done() and launched.started.exception() is None
    rows = {"run": first.num_rows + second.num_rows, "install": first.num_rows, "state": 0}
    assert sum(runner.device_counters()) == rows[name]
    assert fake.num_calls == (2 if name == "run" else 1)


def test_new_weights_serve_no_step_that_was_launched_before(llama_core, faked, requests, expected):
    gate = threading.Event()
    faked(before=lambda number: assert_opened(gate))
    core = loop.rescheduled(llama_core, depth=3)
    old = core.runner.params
    core.submit(requests[0])
    core.step(), core.step()
    threading.Timer(0.1, gate.set).start()
    core.runner.replace_params(jax.tree.map(lambda x: jax.device_put(x * 0, x.sharding), old))
    outputs: loop.Outputs = {}
    core.step(), core.step()
    core.runner.replace_params(old)
    assert finish(core, outputs) == 0
    # The prompt and the first decode step were launched on the old ones, the third was not.
    found, truth = outputs["short", 0].token_ids, expected["short", 0][0]
    assert tuple(found[:2]) == truth[:2] and found[2] == 0 != truth[2]


def test_step_is_packed_against_what_was_handed_over(llama_core, faked, monkeypatch, requests):
    """The table entries that travel are the same, however late the calls are."""

    def recorded(core: Core) -> list[int]:
        pack, counts = core.runner.pack, []

        def watched(schedule):
            packed = pack(schedule)
            changes = [*packed.changes.before, *packed.changes.within]
            counts.append(sum(one.shape[1] for one in changes))
            return packed

        with monkeypatch.context() as patch:
            patch.setattr(core.runner, "pack", watched)
            loop.run(core, requests)
        return counts

    prompt = recorded(loop.rescheduled(llama_core))
    faked(before=lambda number: time.sleep(0.01))
    late = recorded(loop.rescheduled(llama_core))
    assert prompt == late and sum(prompt) > 0 and 0 in prompt


def test_compile_of_the_launching_thread_is_the_engines_own(llama_core, faked, requests):
    def compiling(number: int) -> None:
        if number == 1:
            jax.jit(lambda x: x * 3 + 43)(np.int32(1))

    faked(before=compiling)
    core = loop.rescheduled(llama_core)
    guard = core.runner.guard
    own, others = guard.num_own, guard.num_others
    try:
        core.submit(requests[0])
        with pytest.raises(RuntimeError, match="1 compiles after ready on the engine's thread"):
            core.step(), core.step()
        assert (guard.num_own, guard.num_others) == (own + 1, others)
    finally:
        guard.num_own = own
        core.recover("the test is over")
    assert finish(core, {}) == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_abort_before_the_call_has_begun_disturbs_nobody(
    llama_core, faked, requests, expected, depth
):
    gate = threading.Event()
    faked(before=lambda number: assert_opened(gate))
    core = loop.rescheduled(llama_core, depth=depth)
    outputs: loop.Outputs = {}
    for one in requests:
        core.submit(one)
    for _ in range(depth - 1):
        core.step()
    core.abort("chunked")
    gate.set()
    assert finish(core, outputs) == 0
    assert outputs.pop(("chunked", 0)).finish_reason == "abort"
    assert said(outputs) == {key: one for key, one in expected.items() if key[0] != "chunked"}


def test_call_beside_the_steps_thread_is_none_of_its_time(llama_core, faked, requests):
    faked(before=lambda number: time.sleep(0.02))
    for depth in (1, 2):
        core = loop.rescheduled(llama_core, depth=depth)
        loop.run(core, requests)
        host_ms = core.stats().host_ms
        assert host_ms.keys() - set(OWN_STAGES) == {"launch", "wait"}
        assert host_ms["launch"] >= 20.0
        assert (host_ms["hand_over"] >= host_ms["launch"]) == (depth == 1)
        assert (host_ms["hand_over"] < 20.0) == (depth == 2)


@pytest.mark.parametrize("is_failing", [False, True], ids=["queued", "failed"])
def test_close_with_calls_not_begun_gives_memory_and_thread_back(
    tiny_llama, monkeypatch, requests, is_failing
):
    gc.collect()
    before = live_bytes(), threading.active_count()
    other = loop.start(tiny_llama, page_size=4, max_model_len=96, num_pages=60, depth=3)
    fault = failing_at(1) if is_failing else lambda number: time.sleep(0.05)
    with monkeypatch.context() as patch:
        Fake(other, patch, before=fault)
        other.submit(requests[0])
        other.step(), other.step()
        if is_failing:
            with pytest.raises(RuntimeError, match=FAULT):
                other.close()
        else:
            other.close()
    gone = weakref.ref(other.runner)
    del other
    gc.collect()
    assert (live_bytes(), threading.active_count()) == before and gone() is None


def live_bytes() -> tuple[int, int]:
    """Arrays alive in the process, and their bytes."""
    arrays = [one for one in jax.live_arrays() if not one.is_deleted()]
    return len(arrays), sum(one.nbytes for one in arrays)
