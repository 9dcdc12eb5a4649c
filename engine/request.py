"""Records that cross the engine's border: what a caller asks for and what comes back.

Plain ids, numbers and bytes that a protobuf can carry; text stays on the caller's side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from engine.config import LIMITS, Limits

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, in the words every client writes.

    Raises:
      ValueError: naming the field, its value and the limit.
    """

    n: int = 1
    """Choices made from one prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every id already produced."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence from the logit of every id already produced."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids in prompt or output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these ids may be produced."""
    bad_words: tuple[str, ...] = ()
    """Words never completed, as text."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences never completed."""
    max_tokens: int | None = None
    """Tokens to produce at most; None: up to max_model_len."""
    min_tokens: int = 0
    """No stop id is produced before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """The model's own end ids do not end the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = None
    """64-bit seed; None draws one, which the result reports."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many alternatives."""
    prompt_logprobs: int | None = None
    """Report the same for prompt tokens."""
    prompt_logprobs_start: int = 0
    """First prompt position whose log-probability is wanted."""
    processed_logprobs: bool = False
    """Report log-probabilities after penalties, bias, temperature and filters instead of before."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.bad_word_ids, list):
            object.__setattr__(self, "bad_word_ids", tuple(tuple(w) for w in self.bad_word_ids))
        validate_params(self, LIMITS)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """True when argmax of the raw logits is the answer and nothing else is reported."""
        return (
            (self.is_greedy or self.top_k == 1)
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.bad_word_ids
            and not self.min_tokens
            and not self.logprobs
            and not self.processed_logprobs
        )


_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 100.0, "[0, 100]"),
    ("top_p", 0.0, 1.0, "[0, 1]"),
    ("min_p", 0.0, 1.0, "[0, 1]"),
    ("presence_penalty", -2.0, 2.0, "[-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "[-2, 2]"),
)


def validate_params(params: SamplingParams, limits: Limits) -> None:
    """Checks types, ranges and counts that need no model.

    Raises:
      ValueError: naming the field, its value and the limit.
      TypeError: naming the field and the type it needs.
    """
    for name, low, high, span in _RANGES:
        value = _number(params, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, it must lie in {span}")
    penalty = _number(params, "repetition_penalty")
    if not 0.0 < penalty <= 100.0:
        raise ValueError(f"repetition_penalty is {penalty}, it must lie in (0, 100]")
    _count(params, "n", 1, limits.n)
    _count(params, "top_k", -1, 2**31 - 1)
    _count(params, "min_tokens", 0, 2**31 - 1)
    _count(params, "prompt_logprobs_start", 0, 2**31 - 1)
    if params.max_tokens is not None:
        _count(params, "max_tokens", 0, 2**31 - 1)
        if params.min_tokens > params.max_tokens:
            raise ValueError(
                f"min_tokens is {params.min_tokens} but max_tokens is {params.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _count(params, name, 0, limits.logprobs)
    if params.seed is not None and (
        not isinstance(params.seed, int)
        or isinstance(params.seed, bool)
        or not -(2**63) <= params.seed < 2**64
    ):
        raise ValueError(f"seed is {params.seed!r}, it must be a 64-bit integer")
    _validate_lists(params, limits)


def _validate_lists(params: SamplingParams, limits: Limits) -> None:
    if len(params.stop) > limits.stop_strings:
        raise ValueError(f"stop has {len(params.stop)} strings, the limit is {limits.stop_strings}")
    for text in params.stop:
        if not isinstance(text, str):
            raise TypeError(f"stop holds {type(text).__name__}, it must hold strings")
        if not text:
            raise ValueError("stop holds an empty string, which would end every output; remove it")
        if len(text) > limits.stop_string_chars:
            raise ValueError(
                f"a stop string has {len(text)} characters, the limit is {limits.stop_string_chars}"
            )
    if len(params.stop_token_ids) > limits.stop_ids:
        raise ValueError(
            f"stop_token_ids has {len(params.stop_token_ids)} ids, the limit is {limits.stop_ids}"
        )
    num_bad = len(params.bad_words) + len(params.bad_word_ids)
    if num_bad > limits.bad_words:
        raise ValueError(f"bad_words has {num_bad} entries, the limit is {limits.bad_words}")
    for word in params.bad_words:
        if not isinstance(word, str) or not word:
            raise ValueError(f"bad_words holds {word!r}, it must hold non-empty strings")
    for ids in params.bad_word_ids:
        if not 1 <= len(ids) <= limits.bad_word_ids:
            raise ValueError(
                f"a bad word has {len(ids)} token ids, it must have 1 to {limits.bad_word_ids}"
            )
    if params.logit_bias is not None:
        if len(params.logit_bias) > limits.logit_bias:
            raise ValueError(
                f"logit_bias has {len(params.logit_bias)} ids, the limit is {limits.logit_bias}"
            )
        for token_id, bias in params.logit_bias.items():
            if not isinstance(bias, int | float) or math.isnan(bias) or abs(bias) > 100:
                raise ValueError(f"logit_bias[{token_id}] is {bias!r}, it must lie in [-100, 100]")
    allowed = params.allowed_token_ids
    if allowed is not None and not 1 <= len(allowed) <= limits.allowed_ids:
        raise ValueError(
            f"allowed_token_ids has {len(allowed)} ids, it must have 1 to {limits.allowed_ids}"
        )


def _number(params: SamplingParams, name: str) -> float:
    value = getattr(params, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, it must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, it must be finite")
    return float(value)


def _count(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, it must be an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, it must lie in [{low}, {high}]")


@dataclasses.dataclass(frozen=True)
class Request:
    """One user call as the engine sees it: ids and numbers, already validated."""

    request_id: str
    prompt_ids: np.ndarray
    """i32[prompt_len], every id inside the vocabulary, at least one."""
    params: SamplingParams
    stop_ids: tuple[int, ...]
    """Ids that end the output: the model's (unless ignore_eos) and the caller's."""
    eos_ids: tuple[int, ...]
    """The model's end ids: masked with `stop_ids` until min_tokens are out."""
    max_tokens: int
    """Resolved: prompt_len + max_tokens <= max_model_len."""
    seed: int
    """Resolved 64-bit seed, 0 <= seed < 2**64."""
    priority: int = 0
    """Lower runs earlier under the priority policy."""
    cache_salt: bytes = b""
    """Requests share prefix pages only within one salt."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one position."""

    logprob: float
    rank: int
    """1 is the likeliest; ties count the lower id first."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new about one choice of one request since its last delta."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per id of `token_ids`."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Complete list, one per prompt position from prompt_logprobs_start (None at position 0).

    Comes once, not after the first token of choice 0.
    """
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The stop id that ended the choice; it is the last of `token_ids`."""
    num_cached_tokens: int = 0
    """Prompt tokens read from the prefix cache."""
    error: str | None = None
