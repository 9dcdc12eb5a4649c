"""Picks an op's first implementation that does not decline, and remembers why others did."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any


class Dispatch:
    """An op's implementations in order of preference; the last one is the reference.

    An implementation declines a call by raising NotImplementedError with its reason. Choices are
    counted at trace time, once per traced call.
    """

    def __init__(self, op: str, implementations: Sequence[tuple[str, Callable[..., Any]]]) -> None:
        self.op = op
        self._implementations = tuple(implementations)
        self.counts: collections.Counter[str] = collections.Counter()
        self.declined: dict[str, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the first implementation that takes the call."""
        for name, implementation in self._implementations:
            try:
                result = implementation(*args, **kwargs)
            except NotImplementedError as reason:
                self.declined[name] = str(reason)
                continue
            self.counts[name] += 1
            return result
        raise NotImplementedError(
            f"no implementation of {self.op} takes this call: {self.declined}"
        )
