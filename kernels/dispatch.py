"""Picks an op's first implementation that does not decline, and remembers why others did."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kernels.tuning import FORMULA, TUNING, Choice, Tunable


class Dispatch:
    """An op's implementations in order of preference; the last one is the reference.

    An implementation declines a call by raising NotImplementedError with its reason. Choices are
    counted at trace time, once per traced call. What was measured for the call's shape on this
    device decides which of them is asked first, and with which settings; see `kernels.tuning`.
    """

    def __init__(
        self,
        op: str,
        implementations: Sequence[tuple[str, Callable[..., Any]]],
        tunable: Tunable | None = None,
    ) -> None:
        self.op = op
        self.tunable = tunable
        self._implementations = tuple(implementations)
        self.counts: collections.Counter[str] = collections.Counter()
        self.declined: dict[str, str] = {}

    def __call__(self, *args: Any, choice: Choice | None = None, **kwargs: Any) -> Any:
        """Runs the first implementation that takes the call.

        Args:
          *args: arrays of the call.
          choice: None: what was measured, or else the formulas.
          **kwargs: everything static of it.

        Raises:
          NotImplementedError: none takes it, with their reasons.
          ValueError: what is kept as measured is no candidate.
        """
        choice = self._measured(args, kwargs) if choice is None else choice
        *kernels, (last, reference) = self._implementations
        # Python's sort leaves the others in their order.
        kernels.sort(key=lambda implementation: implementation[0] != choice.form)
        own = {choice.form: dict(choice.settings)}
        calls = [
            (name, _traced_once(kernel, **kwargs, **own.get(name, {}))) for name, kernel in kernels
        ]
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

    def _measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        if self.tunable is None or kwargs.get("kernels") != "mosaic":
            return FORMULA
        shape = self.tunable.shape(*args, **kwargs)
        return TUNING.in_force().choice(self.op, shape, self.tunable.candidates)


@functools.cache
def _traced_once(implementation: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """An inner jit: calls of equal shapes trace, and lower in one program, once.

    Lowering a Mosaic kernel is Python and takes 0.1 to 1 s. XLA puts the call in line again.
    """
    return jax.jit(functools.partial(implementation, **settings))
