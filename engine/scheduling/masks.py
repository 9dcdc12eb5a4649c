"""Moves grammars past settled ids and makes their next masks beside the step loop."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Collection

import numpy as np

from engine.request import Matcher


@dataclasses.dataclass(frozen=True)
class Followed:
    """Where a grammar stands behind one more id."""

    is_accepted: bool
    is_complete: bool = False
    """Nothing but an end id could follow."""
    mask: np.ndarray | None = None
    """i32[words]: what may come next; None where nothing was asked for."""
    fault: str = ""
    """The limit that the grammar went over."""


class Following:
    """A grammar on its way past an id. Its matcher belongs to it until it is done."""

    def __init__(self, work: Callable[[], Followed], clock: Callable[[], float]) -> None:
        self._work = work
        self._clock = clock
        self._began: float | None = None
        self._ended: float | None = None
        self.result: concurrent.futures.Future[Followed] = concurrent.futures.Future()

    @property
    def seconds(self) -> float:
        """How long it takes or took; a wait for a free thread is not counted."""
        if self._began is None:
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._began

    def run(self) -> None:
        """Does the work, unless it was dropped meanwhile; an exception goes to the result."""
        if not self.result.set_running_or_notify_cancel():
            return
        self._began = self._clock()
        try:
            followed = self._work()
        except Exception as error:
            self._ended = self._clock()
            self.result.set_exception(error)
        else:
            self._ended = self._clock()
            self.result.set_result(followed)

    def drop(self) -> None:
        """Nobody wants it any more; one that has begun ends by itself."""
        self.result.cancel()


class MaskMaker:
    """Follows ids on threads of its own. One thread begins the work and waits for it.

    Args:
      num_threads: grammars moved at once; 0 does the work where it is begun.
      clock: seconds.
    """

    def __init__(
        self, num_threads: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._threads = (
            concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="treadle-mask")
            if num_threads
            else None
        )

    def begin(self, matcher: Matcher, token_id: int, *, is_last: bool) -> Following:
        """Begins to move a matcher past an id; behind the last one no mask is made."""
        work = functools.partial(_follow, matcher, token_id, is_last=is_last)
        following = Following(work, self._clock)
        if self._threads is None:
            following.run()
        else:
            self._threads.submit(following.run)
        return following

    def close(self) -> None:
        """Drops what has not begun; threads end with what they are at."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def wait(several: Collection[Following], seconds: float, *, for_all: bool) -> None:
    """Returns when all of them, or one, are done, or after `seconds`."""
    results = [one.result for one in several]
    when = concurrent.futures.ALL_COMPLETED if for_all else concurrent.futures.FIRST_COMPLETED
    concurrent.futures.wait(results, seconds, return_when=when)


def _follow(matcher: Matcher, token_id: int, *, is_last: bool) -> Followed:
    if not matcher.accept(token_id):
        return Followed(is_accepted=False, fault=matcher.fault)
    if matcher.is_complete or is_last:
        return Followed(is_accepted=True, is_complete=matcher.is_complete)
    mask = matcher.mask()
    return Followed(is_accepted=True, mask=mask, fault=matcher.fault)
