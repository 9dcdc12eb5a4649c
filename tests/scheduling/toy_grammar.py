"""A grammar over a few ids whose masks are a pure function of the outputs so far."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.scheduling import fake_device


@dataclasses.dataclass(frozen=True)
class ToyGrammar:
    """Allows about half of the ids at each place and is whole after a few outputs."""

    seed: int = 0
    stuck_after: int | None = None
    """Outputs behind which no id is allowed."""

    def matcher(self) -> ToyMatcher:
        return ToyMatcher(self)

    @property
    def first_mask(self) -> np.ndarray:
        return self.matcher().mask()

    def allowed(self, outputs: list[int]) -> list[int]:
        if self.stuck_after is not None and len(outputs) >= self.stuck_after:
            return []
        facts = ("grammar", self.seed, outputs)
        chosen = [i for i in range(fake_device.VOCAB) if fake_device.number(*facts, i) % 2]
        return chosen or [fake_device.number(*facts) % fake_device.VOCAB]

    def is_whole(self, outputs: list[int]) -> bool:
        return bool(outputs) and fake_device.number("whole", self.seed, outputs) % 9 == 0


class ToyMatcher:
    """Keeps the outputs themselves, so that a forgotten or doubled one changes every mask."""

    def __init__(self, grammar: ToyGrammar) -> None:
        self.grammar = grammar
        self.outputs: list[int] = []
        self.fault = ""

    def accept(self, token_id: int) -> bool:
        assert type(token_id) is int
        is_allowed = token_id in self.grammar.allowed(self.outputs)
        self.outputs.append(token_id)
        return is_allowed

    def mask(self) -> np.ndarray:
        word = sum(1 << token_id for token_id in self.grammar.allowed(self.outputs))
        return np.array([word], np.int32)

    @property
    def is_complete(self) -> bool:
        return self.grammar.is_whole(self.outputs)
