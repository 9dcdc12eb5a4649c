"""What changes in the prefix cache, as records that flow from the engine's thread to a reader."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import NamedTuple

from engine.scheduling.config import GroupConfig

MAX_EVENTS = 65_536
"""Records a reader may leave unread before it has to begin anew: some seconds of a full engine."""


class PageStored(NamedTuple):
    """A page whose content every request to come may read."""

    group: int
    key: bytes
    """16 bytes, of its ids and everything before them."""
    parent: bytes | None
    """Key of the page before it; None for the first of a sequence."""
    place: int
    """Index of the page in its sequence."""
    token_ids: bytes
    """i32[page_size], in the machine's own byte order."""
    cache_salt: bytes


class PageRemoved(NamedTuple):
    """A page that was given to a new owner."""

    group: int
    key: bytes


class CacheCleared(NamedTuple):
    """Every page is forgotten."""


CacheEvent = PageStored | PageRemoved | CacheCleared


@dataclasses.dataclass(frozen=True)
class CacheContent:
    """The prefix cache at one moment."""

    groups: tuple[GroupConfig, ...]
    pages: tuple[PageStored, ...]
    """By group; a page stands behind the page before it in its sequence."""


class CacheWatch:
    """One reader's buffer: filled on the engine's thread, emptied on any other.

    Args:
      notify: told once when there is news, on the engine's thread: wake the reader and return.
      max_events: records kept for a slow reader; past them it has to watch anew.
    """

    def __init__(self, notify: Callable[[], None], max_events: int = MAX_EVENTS) -> None:
        self._notify = notify
        self._max_events = max_events
        self._events: collections.deque[CacheEvent] = collections.deque()
        self._is_behind = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forgets what was not read; events from now on follow the content read at this moment."""
        with self._lock:
            self._events.clear()
            self._is_behind = False

    def add(self, event: CacheEvent) -> None:
        """Takes one event."""
        with self._lock:
            if self._is_behind:
                return
            is_news = not self._events
            if len(self._events) < self._max_events:
                self._events.append(event)
            else:
                self._events.clear()
                self._is_behind = is_news = True
        if is_news:
            self._notify()

    def take(self) -> list[CacheEvent] | None:
        """Everything since the last call; None when the reader fell behind and must watch anew."""
        with self._lock:
            if self._is_behind:
                return None
            events = list(self._events)
            self._events.clear()
        return events
