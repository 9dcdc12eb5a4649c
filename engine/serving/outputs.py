"""Assembles the deltas of one request into text and the records a caller reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.request import Delta, FinishReason, Request, TokenLogprobs
from engine.serving.frontend import Prepared
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopAutomaton, StopStrings

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

Abort = Callable[[str, str, int | None], None]
"""(request_id, reason, choice): how a stop string ends a choice in the engine."""

_SHOWN_CHARS = 60
_SHOWN_IDS = 8


class RequestFailed(RuntimeError):
    """The engine failed this one request; others are undisturbed."""


class RequestRefused(RequestFailed):
    """What was asked for cannot be done, as it turned out on the way; it would end so again."""


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One candidate of one position."""

    logprob: float
    """Natural logarithm; -inf for an id that could not be chosen."""
    rank: int
    """1 is the likeliest."""
    bytes: bytes
    """What the id stands for, perhaps a part of a character; empty without a tokenizer."""

    @property
    def text(self) -> str:
        """`bytes` as text, for people to read; a part of a character shows as U+FFFD."""
        return self.bytes.decode("utf-8", "replace")


PositionLogprobs = dict[int, Logprob]
"""Candidates of one position by id, the id that stands there first."""


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One choice.

    A stop string cuts the text where it begins (or behind it with include_stop_str_in_output);
    ids and log-probabilities end with the token that completed it. A stop id is the last of
    `token_ids`; its text is left out unless include_stop_str_in_output.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Of all ids of the choice so far; None unless log-probabilities were asked for."""
    logprobs: list[PositionLogprobs] | None
    """One per id of `token_ids`; None unless asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The caller's stop string or stop id; None for the model's own end."""
    error: str | None = None
    """What failed, when finish_reason is "error"."""

    def __repr__(self) -> str:
        parts = [f"index={self.index}", f"text={_shortened(self.text)}"]
        parts.append(f"token_ids={_shortened_ids(self.token_ids)}")
        if self.cumulative_logprob is not None:
            parts.append(f"cumulative_logprob={self.cumulative_logprob:.4f}")
        parts.append(f"finish_reason={self.finish_reason!r}")
        if self.stop_reason is not None:
            parts.append(f"stop_reason={self.stop_reason!r}")
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        return f"CompletionOutput({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of one request as its caller saw them, in seconds."""

    arrival_time: float
    """Unix time of submission."""
    ttft: float | None
    """From submission to the first output id; None before it."""
    e2e: float | None
    """From submission to the end; None before it."""
    queue: float | None = None
    """From submission to the first step that was scheduled with it; None before it, and where a
    server does not tell."""
    last_token: float | None = None
    """From submission to the newest output id; None before it, and where a server does not tell."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt: everything so far, or what is new where a stream gives deltas."""

    request_id: str
    prompt: str | None
    """None when the caller gave ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The choices in order; in a delta only those with something new."""
    prompt_logprobs: list[PositionLogprobs | None] | None
    """One per prompt position from prompt_logprobs_start, None at position 0; in a delta once."""
    finished: bool
    num_cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    seed: int
    """The seed used, drawn by the engine where the caller gave none."""
    metrics: RequestMetrics

    @property
    def num_output_tokens(self) -> int:
        """Ids of all choices in this record."""
        return sum(len(choice.token_ids) for choice in self.outputs)

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"prompt={_shortened(self.prompt)}, "
        return (
            f"RequestOutput(request_id={self.request_id!r}, {prompt}"
            f"prompt_token_ids={_shortened_ids(self.prompt_token_ids)}, "
            f"outputs={self.outputs!r}, finished={self.finished})"
        )


@dataclasses.dataclass(frozen=True)
class ScoreOutput:
    """The log-likelihood of a continuation."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The continuation's."""
    logprob: float
    """Sum over the continuation."""
    token_logprobs: list[float]
    """One per id of `token_ids`."""
    is_greedy: bool
    """True when every id was the likeliest at its place."""
    logprobs: list[PositionLogprobs]
    """Candidates at each position of the continuation."""
    num_cached_tokens: int

    def __repr__(self) -> str:
        return (
            f"ScoreOutput(logprob={self.logprob:.4f}, is_greedy={self.is_greedy}, "
            f"token_ids={_shortened_ids(self.token_ids)})"
        )


class OutputAssembler:
    """Collects one request's deltas: text, stop strings, log-probabilities and times.

    Text is made when it is needed: at once where stop strings are looked for, else when an output
    is taken, so that the ids of a batch cost nothing while the engine runs.

    Args:
      prepared: the request.
      tokenizer: None leaves every text empty.
      abort: ends a choice in the engine when a stop string completed.
    """

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer | None, abort: Abort) -> None:
        self._request = prepared.request
        self._prompt = prepared.prompt
        self._prompt_token_ids: list[int] = prepared.request.prompt_ids.tolist()
        self._tokenizer = tokenizer
        self._abort = abort
        params = self._request.params
        automaton = StopAutomaton(params.stop) if params.stop else None
        self._choices = [
            _Choice(index, self._request, tokenizer, automaton) for index in range(params.n)
        ]
        self._num_open = params.n
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._is_prompt_taken = False
        self._arrival_time = time.time()
        self._began = time.perf_counter()
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._end: float | None = None

    @property
    def request(self) -> Request:
        """The request whose deltas these are."""
        return self._request

    @property
    def is_finished(self) -> bool:
        """True once every choice has a finish reason."""
        return self._num_open == 0

    def push(self, delta: Delta, now: float | None = None) -> None:
        """Takes a delta; one of a choice that a stop string ended already is ignored.

        Args:
          delta: of this request.
          now: when the engine gave it, as `time.perf_counter()`; None is now.
        """
        now = time.perf_counter() if now is None else now
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        self._scheduled = delta.scheduled_at
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        choice = self._choices[delta.choice]
        if choice.finish_reason is not None:
            return
        if delta.token_ids:
            self._first_token = now if self._first_token is None else self._first_token
            self._last_token = now
        choice.push(delta)
        if choice.finish_reason is None:
            return
        if delta.finish_reason is None:
            self._abort(delta.request_id, "stop", delta.choice)
        self._num_open -= 1
        if self._num_open == 0:
            self._end = now

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output(
            [choice.output(0, 0) for choice in self._choices], self._prompt_logprobs
        )

    def delta(self) -> RequestOutput:
        """What is new since the last `delta`."""
        news = [choice.take() for choice in self._choices if choice.has_news]
        prompt_logprobs = None if self._is_prompt_taken else self._prompt_logprobs
        self._is_prompt_taken = prompt_logprobs is not None or self._is_prompt_taken
        return self._output(news, prompt_logprobs)

    def score(self) -> ScoreOutput:
        """The result of a request made by `Frontend.prepare_score`.

        Raises:
          RequestFailed: the request ended early.
        """
        choice = self._choices[0]
        scored = self._prompt_logprobs
        if choice.finish_reason != "length" or scored is None or None in scored:
            raise RequestFailed(
                choice.error or f"scoring ended with finish reason {choice.finish_reason!r}"
            )
        start = self._request.params.prompt_logprobs_start
        token_ids = self._prompt_token_ids[start:]
        positions = [one for one in scored if one is not None]
        token_logprobs = [one.logprob for one in positions]
        return ScoreOutput(
            request_id=self._request.request_id,
            prompt_token_ids=self._prompt_token_ids[:start],
            token_ids=token_ids,
            logprob=sum(token_logprobs),
            token_logprobs=token_logprobs,
            is_greedy=all(one.rank == 1 for one in positions),
            logprobs=[
                _position(token_id, one, self._tokenizer)
                for token_id, one in zip(token_ids, positions, strict=True)
            ],
            num_cached_tokens=self._num_cached_tokens,
        )

    def _output(
        self,
        outputs: list[CompletionOutput],
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=None if prompt_logprobs is None else self._positions(prompt_logprobs),
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            seed=self._request.seed,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                ttft=self._since_submission(self._first_token),
                e2e=self._since_submission(self._end),
                queue=self._since_submission(self._scheduled),
                last_token=self._since_submission(self._last_token),
            ),
        )

    def _since_submission(self, when: float | None) -> float | None:
        return None if when is None else when - self._began

    def _positions(self, scored: tuple[TokenLogprobs | None, ...]) -> list[PositionLogprobs | None]:
        token_ids = self._prompt_token_ids[self._request.params.prompt_logprobs_start :]
        return [
            None if one is None else _position(token_id, one, self._tokenizer)
            for token_id, one in zip(token_ids, scored, strict=True)
        ]


class _Choice:
    """Ids, text and numbers of one choice."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        automaton: StopAutomaton | None,
    ) -> None:
        params = request.params
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._index = index
        self._params = params
        self._own_end_ids = frozenset(request.eos_ids) - frozenset(params.stop_token_ids)
        self._tokenizer = tokenizer
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        )
        self._stops = (
            None
            if automaton is None
            else StopStrings(automaton, include_stop=params.include_stop_str_in_output)
        )
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative = 0.0
        self._num_summed = 0
        self._stop_reason: str | int | None = None
        self._stop_id: int | None = None
        self._text: list[str] = []
        self._num_decoded = 0
        self._num_taken = 0
        self._num_texts_taken = 0
        self._is_end_taken = False

    @property
    def has_news(self) -> bool:
        """True when a delta of this choice would say something."""
        return self._num_taken < len(self._token_ids) or (
            self.finish_reason is not None and not self._is_end_taken
        )

    def push(self, delta: Delta) -> None:
        """Takes new ids and the end, or ends the choice itself at a stop string."""
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self._stop_id = delta.stop_id
        if self._stops is not None:
            self._decode()
            if delta.finish_reason is not None:
                self._flush()
            if self._stops.match is not None:
                self._end_at(self._stops.match.stop)
                return
        if delta.finish_reason is not None:
            self.finish_reason, self.error = delta.finish_reason, delta.error
            if delta.stop_id is not None and delta.stop_id not in self._own_end_ids:
                self._stop_reason = delta.stop_id

    def take(self) -> CompletionOutput:
        """The output since the last `take`."""
        self._decode()
        output = self.output(self._num_taken, self._num_texts_taken)
        self._num_taken, self._num_texts_taken = len(self._token_ids), len(self._text)
        self._is_end_taken = self.finish_reason is not None
        return output

    def output(self, first_token: int, first_text: int) -> CompletionOutput:
        """The output from these places in the lists of ids and of texts on."""
        self._decode()
        if self.finish_reason is not None:
            self._flush()
        token_ids = self._token_ids[first_token:]
        has_logprobs = self._params.logprobs is not None
        self._sum_up()
        return CompletionOutput(
            index=self._index,
            text="".join(self._text[first_text:]),
            token_ids=token_ids,
            cumulative_logprob=self._cumulative if has_logprobs else None,
            logprobs=[
                _position(token_id, one, self._tokenizer)
                for token_id, one in zip(token_ids, self._logprobs[first_token:], strict=True)
            ]
            if has_logprobs
            else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self.error,
        )

    def _sum_up(self) -> None:
        """Adds what has come since the last time: no sum over all ids for each of a stream's."""
        for one in self._logprobs[self._num_summed :]:
            self._cumulative += one.logprob
        self._num_summed = len(self._logprobs)

    def _end_at(self, stop: str) -> None:
        """Cuts at the token whose text completed `stop`."""
        del self._token_ids[self._num_decoded :]
        del self._logprobs[self._num_decoded :]
        self.finish_reason, self._stop_reason = "stop", stop

    def _decode(self) -> None:
        """Turns ids that have come into text, up to a stop string's match."""
        while self._num_decoded < len(self._token_ids):
            if self._stops is not None and self._stops.match is not None:
                return
            token_id = self._token_ids[self._num_decoded]
            self._num_decoded += 1
            self._feed(self._text_of(token_id))

    def _text_of(self, token_id: int) -> str:
        is_last = self._stop_id is not None and self._num_decoded == len(self._token_ids)
        is_hidden = is_last and not self._params.include_stop_str_in_output
        if self._detokenizer is None or is_hidden:
            return ""
        return self._detokenizer.feed(token_id)

    def _feed(self, text: str) -> None:
        # Text before min_tokens cannot end the output, so it is no part of a match either.
        if self._stops is not None and self._num_decoded > self._params.min_tokens:
            text = self._stops.feed(text).text
        if text:
            self._text.append(text)

    def _flush(self) -> None:
        """Ends the text with what was held back; a second call adds nothing."""
        if self._detokenizer is None:
            return
        rest = self._detokenizer.flush()
        if self._stops is not None:
            rest = self._stops.flush(rest).text
        if rest:
            self._text.append(rest)


def _position(
    token_id: int, scored: TokenLogprobs, tokenizer: Tokenizer | None
) -> PositionLogprobs:
    def candidate(candidate_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(
            logprob, rank, b"" if tokenizer is None else tokenizer.id_to_bytes(candidate_id)
        )

    position = {token_id: candidate(token_id, scored.logprob, scored.rank)}
    for rank, (top_id, logprob) in enumerate(
        zip(scored.top_ids, scored.top_logprobs, strict=True), start=1
    ):
        position.setdefault(top_id, candidate(top_id, logprob, rank))
    return position


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARS:
        return repr(text)
    return f"{text[:_SHOWN_CHARS]!r}… ({len(text)} characters)"


def _shortened_ids(ids: list[int]) -> str:
    if len(ids) <= _SHOWN_IDS:
        return repr(ids)
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}, … ({len(ids)} ids)]"
