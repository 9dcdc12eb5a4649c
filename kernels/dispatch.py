"""Picks an op's first implementation that does not decline, and remembers why others did."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax


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
        *kernels, (last, reference) = self._implementations
        calls = [(name, _traced_once(kernel, **kwargs)) for name, kernel in kernels]
        for name, call in (*calls, (last, functools.partial(reference, **kwargs))):
            try:
                result = call(*args)
            except NotImplementedError as reason:
                self.declined[name] = str(reason)
                continue
            self.counts[name] += 1
            return result
        raise NotImplementedError(
            f"no implementation of {self.op} takes this call: {self.declined}"
        )


@functools.cache
def _traced_once(implementation: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """An inner jit: calls of equal shapes trace, and lower in one program, once.

    Lowering a Mosaic kernel is Python and takes 0.1 to 1 s. XLA puts the call in line again.
    """
    return jax.jit(functools.partial(implementation, **settings))
