"""Finds stop strings in streamed text, holding back only what may still become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StopMatch:
    """The stop string that completed first."""

    stop: str
    num_tokens: int
    """Tokens fed when it completed; ids and log-probabilities after these are cut."""


@dataclasses.dataclass(frozen=True)
class StopFeed:
    """What one piece of text led to."""

    text: str
    """Text that is safe to emit now."""
    match: StopMatch | None = None


class StopAutomaton:
    """The stop strings of one request as an Aho-Corasick automaton; its choices share it.

    A state is the longest suffix of the text so far that begins some stop string, so its depth is
    exactly what has to be held back. Characters are compared as they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Builds the automaton.

        Args:
          stops: none of them empty; number and lengths are bounded where requests are checked.
        """
        if isinstance(stops, str):
            raise ValueError(f"stop is the string {stops!r}; give a list of strings")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str):
                raise ValueError(f"stop[{index}] must be a string, got {type(stop).__name__}")
            if not stop:
                raise ValueError(f"stop[{index}] is empty; an empty string would stop at once")
        self.stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]  # state of the longest proper suffix that begins a stop string
        self._completed: list[str | None] = [None]  # longest stop string that ends in this state
        for stop in self.stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fallback.append(0)
                self._completed.append(None)
            state = self._next[state][char]
        self._completed[state] = stop

    def _link(self) -> None:
        frontier = list(self._next[0].values())
        # Grows while it is read: breadth first, so that shorter suffixes are linked already.
        for state in frontier:
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                if self._completed[child] is None:
                    self._completed[child] = self._completed[self._fallback[child]]
                frontier.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character; state 0 is the start."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def depth(self, state: int) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return self._depth[state]

    def completed(self, state: int) -> str | None:
        """The longest stop string that ends in this state."""
        return self._completed[state]


class StopStrings:
    """Watches the text of one choice for its request's stop strings.

    The match that completes earliest wins; of those that complete at the same character, the one
    that starts earliest. Emitted texts join to the whole text up to the match, each character once.
    """

    def __init__(self, stops: StopAutomaton | Sequence[str], *, include_stop: bool = False) -> None:
        """Starts at empty text.

        Args:
          stops: stop strings, or their automaton when several choices share them.
          include_stop: whether the emitted text ends with the stop string.
        """
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._num_tokens = 0
        self._match: StopMatch | None = None

    @property
    def match(self) -> StopMatch | None:
        """The match, once there is one."""
        return self._match

    def feed(self, text: str) -> StopFeed:
        """Takes the text of the next token, possibly empty.

        After the match nothing is emitted any more and the match is returned again, so tokens that
        were on their way when it completed do no harm.
        """
        self._num_tokens += 1
        return self._scan(text)

    def flush(self, text: str = "") -> StopFeed:
        """Ends the text: takes what the detokenizer still held and emits all that is held back."""
        last = self._scan(text)
        held, self._held, self._state = self._held, "", 0
        return StopFeed(last.text + held, last.match)

    def _scan(self, text: str) -> StopFeed:
        if self._match is not None:
            return StopFeed("", self._match)
        for index, char in enumerate(text):
            self._state = self._automaton.step(self._state, char)
            stop = self._automaton.completed(self._state)
            if stop is not None:
                return self._matched(stop, self._held + text[: index + 1])
        window = self._held + text
        safe = len(window) - self._automaton.depth(self._state)
        self._held = window[safe:]
        return StopFeed(window[:safe])

    def _matched(self, stop: str, window: str) -> StopFeed:
        self._match = StopMatch(stop, self._num_tokens)
        self._held, self._state = "", 0
        return StopFeed(window if self._include_stop else window.removesuffix(stop), self._match)
