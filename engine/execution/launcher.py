"""Runs calls one after another in a thread of its own; a failed one takes those behind it along."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class _Handed[T]:
    call: Callable[[], T]
    result: concurrent.futures.Future[T]
    failures: list[BaseException]
    """What ended the calls handed over with it; the first one stands for all behind it."""

    def run(self) -> None:
        if not self.failures:
            try:
                self.result.set_result(self.call())
            except BaseException as error:  # whoever waits for the result gets it, whatever it is
                self.failures.append(error)
        if self.failures and not self.result.done():
            self.result.set_exception(self.failures[0])
        del self  # the exception knows this frame, and would keep the call alive through it


class Launcher:
    """Calls in the order they were handed over, each in the launching thread.

    The calls hand one donated state on. After one has failed nothing may run on what it left: every
    later one fails with the same exception, until `reset`. One thread hands over and resets; any
    other thread but the launching one may `drain`.

    The launching thread starts with the first call. It is a daemon, so that a device that hangs
    does not keep the interpreter from exiting, and holds no call, result or owner while it waits.
    """

    def __init__(self) -> None:
        self._calls: queue.Queue[_Handed[Any] | None] = queue.Queue()
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def submit[T](self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Hands a call over and returns at once; its result or exception is in the future."""
        if self._thread is None:
            thread = threading.Thread(
                target=_run, args=(self._calls,), name="treadle-launch", daemon=True
            )
            thread.start()
            self._thread = thread
        handed = _Handed(call, concurrent.futures.Future[T](), self._failures)
        self._calls.put(handed)
        return handed.result

    def drain(self) -> None:
        """Waits until every call handed over has run or failed; raises nothing."""
        self._calls.join()

    def reset(self) -> None:
        """Cancels what has not begun, waits for the call under way and forgets the failure."""
        self._failures.append(concurrent.futures.CancelledError())
        self._calls.join()
        self._failures = []

    def close(self) -> None:
        """The same, and the thread ends; another call would start the next one."""
        self.reset()
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None


def _run(calls: queue.Queue[_Handed[Any] | None]) -> None:
    """The launching thread. It knows the queue and not the launcher."""
    while (handed := calls.get()) is not None:
        handed.run()
        del handed  # first: who has drained finds nothing held here
        calls.task_done()
    calls.task_done()
