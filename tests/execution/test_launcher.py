"""The launching thread: one call after another, none on what a failed one left."""

import concurrent.futures
import gc
import pathlib
import subprocess
import sys
import threading
import weakref

import pytest

from engine.execution.launcher import Launcher

SECONDS = 10.0
"""Long enough for anything that is not stuck."""


@pytest.fixture
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.close()


class Gate:
    """A call that says when it has begun and goes on when it is let."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.opened.wait(SECONDS)
        return "through"


def fail() -> None:
    raise ValueError("the first failure")


def launching_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "treadle-launch"]


def test_calls_run_in_one_daemon_thread_in_the_order_they_came(launcher):
    order: list[int] = []

    def call(number: int) -> threading.Thread:
        order.append(number)
        return threading.current_thread()

    results = [launcher.submit(lambda number=number: call(number)) for number in range(50)]
    threads = {result.result(SECONDS) for result in results}
    assert order == list(range(50)) and len(threads) == 1
    (thread,) = threads
    assert thread.daemon and thread.name == "treadle-launch"


def test_handing_over_waits_for_nothing(launcher):
    gate = Gate()
    first, second = launcher.submit(gate), launcher.submit(lambda: 2)
    assert gate.begun.wait(SECONDS)
    assert not first.done() and not second.done()
    gate.opened.set()
    assert (first.result(SECONDS), second.result(SECONDS)) == ("through", 2)


def test_thread_begins_with_the_first_call_and_ends_with_close():
    before = len(launching_threads())
    launcher = Launcher()
    launcher.drain()
    launcher.close()
    assert len(launching_threads()) == before
    for _ in range(2):  # closed is not the end: another lane may come
        assert launcher.submit(lambda: 1).result(SECONDS) == 1
        assert len(launching_threads()) == before + 1
        launcher.close()
        assert len(launching_threads()) == before


def test_nothing_runs_after_a_failure_until_reset(launcher):
    ran: list[int] = []
    gate = Gate()
    held, failed = launcher.submit(gate), launcher.submit(fail)
    behind = launcher.submit(lambda: ran.append(1))
    gate.opened.set()
    errors = [failed.exception(SECONDS), behind.exception(SECONDS)]
    late = launcher.submit(lambda: ran.append(2))
    errors.append(late.exception(SECONDS))
    assert held.result() == "through" and not ran
    assert str(errors[0]) == "the first failure" and errors[0] is errors[1] is errors[2]
    launcher.reset()
    launcher.submit(lambda: ran.append(3)).result(SECONDS)
    assert ran == [3]


def test_drained_means_that_every_call_has_ended(launcher):
    ran: list[int] = []
    gate = Gate()
    launcher.submit(gate)
    for number in range(20):
        launcher.submit(lambda number=number: ran.append(number))
    failed = launcher.submit(fail)
    threading.Timer(0.05, gate.opened.set).start()
    launcher.drain()
    assert ran == list(range(20)) and failed.done()


def test_reset_cancels_what_has_not_begun_and_waits_for_the_call_under_way(launcher):
    ran: list[int] = []
    gate = Gate()
    held, queued = launcher.submit(gate), launcher.submit(lambda: ran.append(1))
    assert gate.begun.wait(SECONDS)
    threading.Timer(0.05, gate.opened.set).start()
    launcher.reset()
    assert held.done() and held.result() == "through"
    assert isinstance(queued.exception(SECONDS), concurrent.futures.CancelledError)
    assert not ran and launcher.submit(lambda: 4).result(SECONDS) == 4


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_even_an_exit_is_raised_where_the_result_is_awaited(launcher, kind):
    def leave() -> None:
        raise kind("away")

    with pytest.raises(kind, match="away"):
        launcher.submit(leave).result(SECONDS)
    launcher.reset()
    assert launcher.submit(lambda: 5).result(SECONDS) == 5


@pytest.mark.parametrize("is_failing", [False, True])
def test_idle_thread_keeps_neither_call_nor_result_alive(launcher, is_failing):
    class Owner:
        def call(self) -> object:
            return fail() if is_failing else Owner()

    owner = Owner()
    kept = [weakref.ref(owner)]
    gc.disable()  # by counting references alone: no cycle goes through the thread
    try:
        result = launcher.submit(owner.call)
        launcher.drain()
        if is_failing:
            launcher.reset()
        else:
            kept.append(weakref.ref(result.result()))
        del owner, result
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_call_that_hangs_does_not_keep_the_interpreter():
    code = (
        "import threading; from engine.execution.launcher import Launcher; begun, never = "
        "threading.Event(), threading.Event(); launcher = Launcher(); "
        "launcher.submit(lambda: (begun.set(), never.wait())); begun.wait(); print('leaves')"
    )
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")
