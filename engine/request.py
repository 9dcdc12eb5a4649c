"""Records that cross the engine's border: what a caller asks for and what comes back.

Plain ids, numbers and bytes that a protobuf can carry; text stays on the caller's side.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from engine.config import LIMITS, Limits

FinishReason = Literal["stop", "length", "abort", "error"]
StructureKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
_STRUCTURE_KINDS: tuple[str, ...] = typing.get_args(StructureKind)


@dataclasses.dataclass(frozen=True)
class StructuredOutput:
    """The form an output must have, from its first id to its last.

        StructuredOutput("json_schema", {"type": "array", "items": {"type": "integer"}})
        StructuredOutput("choice", choices=("yes", "no"))

    Raises:
      ValueError: naming the field, its value and the limit.
      TypeError: naming the field, its value and the type it needs.
    """

    kind: StructureKind
    text: str = ""
    """A JSON schema (a mapping is written as JSON), a regular expression, or a grammar in the
    notation of Lark. Empty for `json_object` and `choice`."""
    choices: tuple[str, ...] = ()
    """The whole outputs to choose from, for `choice`."""

    def __post_init__(self) -> None:
        if self.kind not in _STRUCTURE_KINDS:
            raise ValueError(
                f"structured.kind is {reprlib.repr(self.kind)}, it must be one of "
                f"{', '.join(_STRUCTURE_KINDS)}"
            )
        if self.kind == "json_schema" and isinstance(self.text, Mapping):
            object.__setattr__(self, "text", _json(self.text))
        if not isinstance(self.text, str):
            raise TypeError(f"structured.text is {reprlib.repr(self.text)}, it must be a string")
        object.__setattr__(self, "choices", _texts("structured.choices", self.choices))
        takes_text = self.kind not in ("json_object", "choice")
        if takes_text != bool(self.text):
            raise ValueError(
                f"structured.text is {reprlib.repr(self.text)} for the kind {self.kind}; "
                f"{'give the text' if takes_text else 'leave it empty'}"
            )
        if (self.kind == "choice") != bool(self.choices):
            raise ValueError(
                f"structured.choices has {len(self.choices)} strings for the kind {self.kind}; "
                f"{'give at least one' if self.kind == 'choice' else 'leave it empty'}"
            )
        if "" in self.choices:
            raise ValueError("structured.choices holds an empty string; remove it")

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all its text."""
        texts = (self.text, *self.choices)
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"structured.text cannot be written as JSON ({error}); give a schema of plain values"
        ) from error


class Matcher(Protocol):
    """Where one output stands in its grammar: a function of its ids so far.

    Used on any thread, by one of them at a time.
    """

    def accept(self, token_id: int) -> bool:
        """Goes past an id; False: the grammar does not allow it here."""
        ...

    def mask(self) -> np.ndarray:
        """i32[words]: id i may come next where bit i % 32 of word i // 32 is set."""
        ...

    @property
    def fault(self) -> str:
        """The limit it went over, after which nothing is allowed; empty while it has not."""
        ...

    @property
    def is_complete(self) -> bool:
        """The output is whole, and nothing but an end id could follow."""
        ...


class Grammar(Protocol):
    """A compiled structure. Compiled on the caller's side, never on the engine's thread."""

    @property
    def first_mask(self) -> np.ndarray:
        """i32[words]: what may come first, made with the grammar. Never written again."""
        ...

    def matcher(self) -> Matcher:
        """One that has seen no id."""
        ...


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, in the words every client writes.

    Numpy numbers and any list, tuple, set or one-dimensional array are taken and made plain.

    Raises:
      ValueError: naming the field, its value and the limit.
      TypeError: naming the field, its value and the type it needs.
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
    """Report an output's log-probabilities after penalties, bias, temperature and filters.

    Those of the prompt, where nothing is chosen, are always of the unmodified logits.
    """
    structured: StructuredOutput | None = None
    """The form the output must have; a mapping of its fields will do.

    Where a grammar has reached its end, and nothing but an end id could follow, the output ends.
    """

    def __post_init__(self) -> None:
        for name, plain in _PLAIN.items():
            given = getattr(self, name)
            if (value := plain(name, given)) is not given:
                object.__setattr__(self, name, value)
        validate_params(self, LIMITS)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """True when argmax of the raw or masked logits is the answer and all that is reported."""
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
    """Checks ranges and counts that need no model; the types were checked when it was built.

    Raises:
      ValueError: naming the field, its value and the limit.
    """
    for name, low, high, span in _RANGES:
        value = _finite(params, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, it must lie in {span}")
    penalty = _finite(params, "repetition_penalty")
    if not 0.0 < penalty <= 100.0:
        raise ValueError(f"repetition_penalty is {penalty}, it must lie in (0, 100]")
    _check_count(params, "n", 1, limits.n)
    _check_count(params, "top_k", -1, 2**31 - 1)
    _check_count(params, "min_tokens", 0, 2**31 - 1)
    _check_count(params, "prompt_logprobs_start", 0, 2**31 - 1)
    if params.max_tokens is not None:
        _check_count(params, "max_tokens", 0, 2**31 - 1)
        if params.min_tokens > params.max_tokens:
            raise ValueError(
                f"min_tokens is {params.min_tokens} but max_tokens is {params.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_count(params, name, 0, limits.logprobs)
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise ValueError(f"seed is {params.seed}, it must be a 64-bit integer")
    _validate_lists(params, limits)
    if params.structured is not None:
        _validate_structured(params, params.structured, limits)


def _validate_structured(
    params: SamplingParams, structured: StructuredOutput, limits: Limits
) -> None:
    if structured.num_bytes > limits.structure_bytes:
        raise ValueError(
            f"structured has {structured.num_bytes} bytes of text, the limit is "
            f"{limits.structure_bytes}; shorten it"
        )
    if len(structured.choices) > limits.structure_choices:
        raise ValueError(
            f"structured.choices has {len(structured.choices)} strings, the limit is "
            f"{limits.structure_choices}; name fewer or write a regex"
        )
    for name, neutral in (("min_tokens", 0), ("ignore_eos", False)):
        if (value := getattr(params, name)) != neutral:
            raise ValueError(
                f"{name} is {value} together with structured, whose grammar alone decides where "
                f"the output may end; leave {name} out"
            )


def _finite(params: SamplingParams, name: str) -> float:
    value = getattr(params, name)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, it must be finite")
    return value


def _check_count(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, it must lie in [{low}, {high}]")


def _validate_lists(params: SamplingParams, limits: Limits) -> None:
    if len(params.stop) > limits.stop_strings:
        raise ValueError(f"stop has {len(params.stop)} strings, the limit is {limits.stop_strings}")
    for text in params.stop:
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
    if "" in params.bad_words:
        raise ValueError("bad_words holds an empty string, it must hold words; remove it")
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
            if not -100 <= bias <= 100:  # NaN too
                raise ValueError(f"logit_bias[{token_id}] is {bias}, it must lie in [-100, 100]")
    allowed = params.allowed_token_ids
    if allowed is not None and not 1 <= len(allowed) <= limits.allowed_ids:
        raise ValueError(
            f"allowed_token_ids has {len(allowed)} ids, it must have 1 to {limits.allowed_ids}"
        )


# Each turns what a caller wrote for a field into plain Python values: a numpy number and its
# Python twin are the same request on every path, the wire included.


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer over every limit
            return math.inf if value > 0 else -math.inf
    raise TypeError(f"{name} is {reprlib.repr(value)}, it must be a number")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"{name} is {reprlib.repr(value)}, it must be an integer")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {reprlib.repr(value)}, it must be True or False")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not _is_list(value):
        raise TypeError(f"{name} is {reprlib.repr(value)}, it must be a string or a list of them")
    for one in value:
        if not isinstance(one, str):
            raise TypeError(f"{name} holds {reprlib.repr(one)}, it must hold strings")
    return tuple(map(str, value))


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not _is_list(value):
        raise TypeError(f"{name} is {reprlib.repr(value)}, it must be a list of integers")
    for one in value:
        if not isinstance(one, int | np.integer) or isinstance(one, bool):
            raise TypeError(f"{name} holds {reprlib.repr(one)}, it must hold integers")
    return tuple(map(int, value))


def _words_of_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(value):
        raise TypeError(f"{name} is {reprlib.repr(value)}, it must be a list of lists of integers")
    for one in value:
        if not _is_list(one):
            raise TypeError(f"{name} holds {reprlib.repr(one)}, it must hold lists of integers")
    return tuple(_ids(name, one) for one in value)


def _biases(name: str, value: Any) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} is {reprlib.repr(value)}, it must be a mapping of integer ids to numbers"
        )
    return {
        ids: _number(f"{name}[{ids}]", bias)
        for ids, bias in zip(_ids(name, tuple(value)), value.values(), strict=True)
    }


def _structure(name: str, value: Any) -> StructuredOutput:
    if isinstance(value, StructuredOutput):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} is {reprlib.repr(value)}, it must be StructuredOutput or a mapping of its "
            "fields kind, text and choices"
        )
    if unknown := sorted(map(str, set(value) - {"kind", "text", "choices"})):
        raise ValueError(
            f"{name} has the unknown field {unknown[0]!r}; the fields are kind, text, choices"
        )
    if "kind" not in value:
        raise ValueError(f"{name} has no kind; give one of {', '.join(_STRUCTURE_KINDS)}")
    return StructuredOutput(**value)


def _is_list(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return True
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray)


def _optional[T](plain: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else plain(name, value)


_PLAIN: Mapping[str, Callable[[str, Any], Any]] = {
    "n": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _optional(_biases),
    "allowed_token_ids": _optional(_ids),
    "bad_words": _texts,
    "bad_word_ids": _words_of_ids,
    "max_tokens": _optional(_integer),
    "min_tokens": _integer,
    "stop": _texts,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "seed": _optional(_integer),
    "logprobs": _optional(_integer),
    "prompt_logprobs": _optional(_integer),
    "prompt_logprobs_start": _integer,
    "processed_logprobs": _flag,
    "structured": _optional(_structure),
}
"""What makes each field of `SamplingParams` plain."""


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
    grammar: Grammar | None = None
    """Of `params.structured`, compiled; it does not leave the process that compiled it."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one position."""

    logprob: float
    rank: int
    """1 is the likeliest; ties count the lower id first."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Delta(NamedTuple):
    """What is new about one choice of one request since its last delta.

    A named tuple, because a step builds one per row: 0.85 us against 2.2 us for a frozen dataclass
    (2-core CPU machine, 2026-11-29).
    """

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
    scheduled_at: float | None = None
    """When the first step with a row of its request was scheduled; None before.

    By `time.perf_counter()`, which is one clock for the processes of a host.
    """
    is_callers_fault: bool = False
    """The error lies in what was asked for: the same request would end like this again."""
