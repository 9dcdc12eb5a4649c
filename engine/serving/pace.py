"""Keeps an event loop from taking the interpreter away from the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOP_SHARE = 0.5
"""Share of one core that the loop's thread may use before deliveries are spaced out."""
SMALL_COST = 0.002
"""Seconds of computing after which spacing out begins: a few streams are never held back."""
LONGEST_PAUSE = 0.1
"""Seconds that tokens are held back at most."""


class Pace:
    """Spaces deliveries out by what the one before cost; a loop with little to do never waits.

    Each message costs the loop far more than each token in it. Where messages would take more than
    their share, fewer of them with more tokens leave the engine's thread its time: both threads
    share one interpreter, and the steps of all requests wait for that thread.

    Args:
      wall: seconds, by a clock that only moves forward.
      computed: seconds that the loop's thread has computed.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self._wall, self._computed = wall, computed
        self._began = wall()
        self._used = computed()

    def pause(self) -> float:
        """Seconds to wait before the next delivery; on the loop's thread."""
        cost = self._computed() - self._used
        if cost < SMALL_COST:
            return 0.0
        elapsed = self._wall() - self._began
        return min(max(cost / LOOP_SHARE - elapsed, 0.0), LONGEST_PAUSE)

    def mark(self) -> None:
        """A delivery begins; on the loop's thread."""
        self._began, self._used = self._wall(), self._computed()
