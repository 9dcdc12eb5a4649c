"""Records of live requests: their choices, and prompt log-probabilities on their way."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.request import Matcher, Request, TokenLogprobs
from engine.scheduling.prefix_cache import PageKeys
from engine.scheduling.schedule import StepResult

Order = tuple[int, int, int]
"""Priority, arrival, choice: smaller runs earlier."""


@dataclasses.dataclass(eq=False)
class Choice:
    """One of the n outputs of a request. Owned and changed by the scheduler alone."""

    live: LiveRequest
    """The request it belongs to, with its other choices."""
    request: Request
    index: int
    order: Order
    known_ids: np.ndarray
    """i32[known]: prompt and settled outputs, as of its last admission or release."""
    slot: int = -1
    """-1 while it has none."""
    is_finished: bool = False
    """Its finish is reported: later results are dropped."""
    num_cached_tokens: int | None = None
    """Prompt tokens its first admission found in the prefix cache; None before."""
    keys: PageKeys | None = None
    scores: PromptScores | None = None
    """Prompt log-probabilities that are still to be delivered."""
    matcher: Matcher | None = None
    """Stands behind the settled outputs, in any slot; None without a grammar or an admission."""
    mask: np.ndarray | None = None
    """i32[words]: what the newest id was or will be chosen from."""
    is_quick: bool = True
    """Its grammar went past the last id in a moment, so a step waits that long for the next."""

    def begin_grammar(self) -> None:
        """Before the first output of a choice whose request has a grammar."""
        if self.request.grammar is not None and self.matcher is None:
            self.matcher = self.request.grammar.matcher()
            self.mask = self.request.grammar.first_mask

    @property
    def is_scored(self) -> bool:
        """True when this choice computes the request's prompt log-probabilities."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None


@dataclasses.dataclass(eq=False)
class LiveRequest:
    """A request with unfinished choices."""

    request: Request
    choices: list[Choice] = dataclasses.field(default_factory=list)
    held: list[Choice] = dataclasses.field(default_factory=list)
    """Choices that wait for the pages of the first one's prompt."""
    num_unfinished: int = 0
    is_started: bool = False
    """True from the first admission of any choice on."""
    scheduled_at: float | None = None
    """When the first step with a row of it was scheduled, whatever was preempted since."""
    num_failed_launches: int = 0
    """Failures of the device that it was in the middle of; launches lost together count as one."""


class PromptScores:
    """Log-probabilities of prompt positions, gathered chunk by chunk."""

    def __init__(self, request: Request) -> None:
        self._prompt_len = len(request.prompt_ids)
        self._start = request.params.prompt_logprobs_start
        self._num_top = request.params.prompt_logprobs or 0
        self._found: dict[int, TokenLogprobs] = {}

    @property
    def num_cacheable(self) -> int:
        """Leading prompt tokens that need not be computed: position p is scored by token p - 1."""
        return max(self._start, 1) - 1

    def covers(self, start: int, end: int) -> bool:
        """True when tokens [start, end) score a wanted position."""
        return end >= self._start and start + 1 < self._prompt_len

    def collect(self, start: int, first: int, num_tokens: int, result: StepResult) -> None:
        """Takes the scores of one settled chunk.

        Args:
          start: position of the chunk's first token.
          first: place of that token in the step.
          num_tokens: tokens of the chunk.
          result: of the step, run by the score head.
        """
        assert result.prompt_logprobs is not None and result.prompt_ranks is not None
        begin = max(start, self._start - 1)
        end = min(start + num_tokens, self._prompt_len - 1)
        if end <= begin:
            return
        places = slice(first + begin - start, first + end - start)
        logprobs = result.prompt_logprobs[places].tolist()
        ranks = result.prompt_ranks[places].tolist()
        tops: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())] * len(ranks)
        if self._num_top:
            assert result.prompt_top_ids is not None and result.prompt_top_logprobs is not None
            tops = [
                (tuple(ids), tuple(values))
                for ids, values in zip(
                    result.prompt_top_ids[places, : self._num_top].tolist(),
                    result.prompt_top_logprobs[places, : self._num_top].tolist(),
                    strict=True,
                )
            ]
        for offset, (logprob, rank, top) in enumerate(zip(logprobs, ranks, tops, strict=True)):
            self._found[begin + offset + 1] = TokenLogprobs(logprob, rank, *top)

    def delivered(self) -> tuple[TokenLogprobs | None, ...]:
        """One entry per wanted position; None at position 0, which nothing precedes."""
        return tuple(
            self._found[position] if position else None
            for position in range(self._start, self._prompt_len)
        )
