"""Turns what a caller wrote, text or ids and sampling parameters, into a validated Request."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config import LIMITS, Limits, Setting, SettingError
from engine.request import Grammar, Request, SamplingParams, validate_params

if TYPE_CHECKING:
    from engine.core import EngineInfo
    from engine.text.grammar import GrammarCompiler
    from engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` (text), `prompt_token_ids`, or both: the ids are
then what runs and the text is only reported with them."""

Params = SamplingParams | Mapping[str, Any] | None
"""`SamplingParams` are taken as they are. None stands for the checkpoint's own defaults
(generation_config.json), a mapping for the fields that differ from those."""

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A request with the text it came from."""

    request: Request
    prompt: str | None
    """None when the caller gave ids."""


class Frontend:
    """Checks every input at the border; what it returns the engine can run.

    All refusals are ValueError, or TypeError for a wrong type, naming field, value and limit.

    Args:
      info: facts of the engine.
      tokenizer: None serves token ids alone.
      limits: bounds enforced here.
    """

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer | None, limits: Limits = LIMITS
    ) -> None:
        self._vocab_size = info.vocab_size
        self._max_model_len = info.max_model_len
        # Page 0 is trash, and the last output needs no place in the cache.
        self._pool_len = (info.num_pages - 1) * info.page_size + 1
        self._tokenizer = tokenizer
        self._longest_token = 0 if tokenizer is None else _longest_token(tokenizer)
        self._limits = limits
        tokenizer_eos = () if tokenizer is None else tokenizer.eos_ids
        self.eos_ids: tuple[int, ...] = tuple(
            i for i in dict.fromkeys((*info.eos_ids, *tokenizer_eos)) if 0 <= i < self._vocab_size
        )
        defaults = info.generation_defaults
        self._defaults = {name: defaults[name] for name in _DEFAULTED if _is_set(defaults, name)}
        if defaults.get("do_sample") is False:
            self._defaults["temperature"] = 0.0
        self._default_max_tokens: int | None = defaults.get("max_new_tokens")
        self._grammars = self._begin_grammars(info.masked_rows)
        try:  # at start-up, where the file can be named, not at the first request
            self.default_params = self._over_defaults({})
            SamplingParams(max_tokens=self._default_max_tokens)
        except (ValueError, TypeError) as error:
            raise type(error)(f"generation_config.json: {error}; correct the file") from error

    def _begin_grammars(self, masked_rows: int) -> GrammarCompiler | None:
        """Prepares the vocabulary for grammars, where the engine takes masks and the extra is."""
        if not masked_rows or self._tokenizer is None:
            return None
        from engine.text import grammar

        if not grammar.is_installed() or not self.eos_ids:
            return None
        return grammar.GrammarCompiler(
            self._tokenizer, self._vocab_size, self.eos_ids, self._limits
        )

    def prepare(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> Prepared:
        """A request for `prompt`.

        `max_tokens`: None fills what max_model_len and the page pool have room for, at most the
        checkpoint's max_new_tokens where its defaults apply. A max_tokens that the caller wrote
        and that does not fit behind the prompt is refused, not cut: an output shorter than asked
        for would look like a choice of the model. 0 is allowed where prompt log-probabilities are
        asked for.

        Args:
          prompt: text or ids.
          params: how to sample.
          request_id: None draws one.
          priority: lower runs earlier under the priority policy.
          cache_salt: requests share prefix pages only within one salt.
        """
        resolved, default_max_tokens = self._params(params)
        text, ids = self._prompt_ids(prompt)
        max_tokens = self._max_tokens(len(ids), resolved, default_max_tokens)
        return Prepared(
            self._request(ids, resolved, max_tokens, request_id, priority, cache_salt), text
        )

    def prepare_score(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        continuation: str | Sequence[int] | np.ndarray,
        *,
        logprobs: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> Prepared:
        """A request that reports the log-probabilities of `continuation` after `prompt`.

        Text is encoded whole and cut behind the prompt's own ids, spaces at the prompt's end
        counted to the continuation, as evaluation suites do. An empty text prompt stands for the
        beginning-of-text id, or the end-of-text id of models without one.

        Args:
          prompt: text or ids.
          continuation: as `prompt`, at least one id.
          logprobs: alternatives wanted for each position.
          request_id: None draws one.
          priority: lower runs earlier under the priority policy.
          cache_salt: requests share prefix pages only within one salt.
        """
        if isinstance(prompt, str) and isinstance(continuation, str):
            text, ids, start = self._score_text(prompt, continuation)
        elif isinstance(prompt, str) or isinstance(continuation, str):
            raise TypeError("prompt and continuation must both be text or both be token ids")
        else:
            text = None
            context = self._ids(prompt, "prompt")
            ids = np.concatenate((context, self._ids(continuation, "continuation")))
            start = len(context)
        params = SamplingParams(
            temperature=0.0, max_tokens=0, prompt_logprobs=logprobs, prompt_logprobs_start=start
        )
        validate_params(params, self._limits)
        self._max_tokens(len(ids), params, None)
        return Prepared(self._request(ids, params, 0, request_id, priority, cache_salt), text)

    def check_count(self, num_prompts: int) -> None:
        """Refuses a call with too many prompts, before any of them is looked at."""
        limit = self._limits.prompts_per_call
        if num_prompts > limit:
            raise ValueError(
                f"the call has {num_prompts} prompts, the limit is {limit}; "
                "split it, or raise limits.prompts_per_call"
            )

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuses an empty or too long conversation."""
        limit = self._limits.chat_messages
        if not 1 <= len(messages) <= limit:
            raise ValueError(f"messages has {len(messages)} messages, it must have 1 to {limit}")

    def tokenizer(self, purpose: str) -> Tokenizer:
        """The tokenizer; ValueError saying what needs one when there is none."""
        if self._tokenizer is None:
            raise ValueError(
                f"{purpose} needs a tokenizer and the model has none; give token ids alone, or a "
                "model with its tokenizer.json"
            )
        return self._tokenizer

    def encode(
        self, text: str, purpose: str = "a text prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt's text; refused unread where it cannot fit."""
        tokenizer = self.tokenizer(purpose)
        self._check_bytes("prompt", text)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_bytes(self, name: str, *texts: str) -> None:
        """Refuses what is longer than the longest token as often as it fits: encoding is dear."""
        limit = self._max_model_len * self._longest_token
        num_bytes = sum(map(len, texts))
        if num_bytes <= limit:
            num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > limit:
            setting = Setting("max_model_len")
            raise SettingError(
                f"{name} has {num_bytes} bytes of text or more but ",
                setting,
                f" is {self._max_model_len} tokens of at most {self._longest_token} bytes, "
                f"{limit} together; shorten it or start the engine with a larger ",
                setting,
            )

    def _params(self, params: Params) -> tuple[SamplingParams, int | None]:
        """The params, and the max_tokens that stands in for none."""
        if isinstance(params, SamplingParams):
            validate_params(params, self._limits)
            return params, None
        if params is None:
            return self.default_params, self._default_max_tokens
        if not isinstance(params, Mapping):
            raise TypeError(
                f"params is a {type(params).__name__}, it must be SamplingParams, "
                "a mapping of its fields, or None"
            )
        return self._over_defaults(params), self._default_max_tokens

    def _over_defaults(self, fields: Mapping[str, Any]) -> SamplingParams:
        if unknown := sorted(set(fields) - _FIELDS):
            raise ValueError(
                f"params has the unknown field {unknown[0]!r}; the fields are "
                f"{', '.join(sorted(_FIELDS))}"
            )
        params = SamplingParams(**{**self._defaults, **fields})
        validate_params(params, self._limits)
        return params

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, np.ndarray]:
        if isinstance(prompt, Mapping):
            if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
                raise ValueError(
                    f"prompt has the unknown key {unknown[0]!r}; "
                    "give 'prompt', 'prompt_token_ids' or both"
                )
            text: Any = prompt.get("prompt")
            ids: Any = prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise TypeError(f"prompt is a {type(text).__name__}, it must be text")
            if ids is not None:
                return text, self._ids(ids, "prompt_token_ids")
            if text is None:
                raise ValueError("prompt has neither 'prompt' nor 'prompt_token_ids'; give one")
            prompt = text
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, self._ids(prompt, "prompt")

    def _encode(self, text: str) -> np.ndarray:
        if not text:
            raise ValueError("prompt is empty; give at least one character")
        return self._ids(self.encode(text), "prompt")

    def _score_text(self, prompt: str, continuation: str) -> tuple[str, np.ndarray, int]:
        if not continuation:
            raise ValueError("continuation is empty; give at least one character")
        tokenizer = self.tokenizer("scoring text")
        self._check_bytes("prompt with continuation", prompt, continuation)
        if not prompt:
            first = (
                tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(self.eos_ids), None)
            )
            if first is None:
                raise ValueError(
                    "prompt is empty and the model has no bos or eos id to stand for it"
                )
            ids = [first, *tokenizer.encode(continuation, add_special_tokens=False)]
            return continuation, self._ids(ids, "continuation"), 1
        context = tokenizer.encode(prompt.rstrip() or prompt)
        ids = tokenizer.encode(prompt + continuation)
        if len(ids) <= len(context):  # the border vanished inside one token
            context = tokenizer.encode(prompt)
            ids = [*context, *tokenizer.encode(continuation, add_special_tokens=False)]
        return prompt + continuation, self._ids(ids, "prompt"), len(context)

    def _ids(self, ids: Any, name: str) -> np.ndarray:
        """i32[len], every id a whole number inside the vocabulary."""
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
                raise TypeError(
                    f"{name} is an array {ids.dtype}{list(ids.shape)}, "
                    "it must be one row of integers"
                )
        elif not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray):
            raise TypeError(
                f"{name} is a {type(ids).__name__}, it must be text or a list of token ids"
            )
        if len(ids) == 0:
            raise ValueError(f"{name} is empty; give at least one token id")
        if len(ids) > self._max_model_len:
            raise self._too_long(len(ids))
        array = ids if isinstance(ids, np.ndarray) else _integers(ids, name)
        low, high = array.min(), array.max()
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            position = int(np.argmax(array == bad))
            raise ValueError(
                f"{name}[{position}] is {bad}, outside the vocabulary of {self._vocab_size} ids; "
                f"ids lie in [0, {self._vocab_size - 1}]"
            )
        return array.astype(np.int32)

    def _too_long(self, num_tokens: int) -> ValueError:
        limit = Setting("max_model_len")
        return SettingError(
            f"prompt has {num_tokens} tokens but ",
            limit,
            f" is {self._max_model_len}; shorten it or start the engine with a larger ",
            limit,
        )

    def _max_tokens(self, prompt_len: int, params: SamplingParams, default: int | None) -> int:
        room, limit = self._max_model_len - prompt_len, Setting("max_model_len")
        if room < 0:
            raise self._too_long(prompt_len)
        wanted = params.max_tokens
        if wanted == 0:
            if params.prompt_logprobs is None or params.n != 1:
                raise ValueError(
                    f"max_tokens is 0 with prompt_logprobs {params.prompt_logprobs} and n "
                    f"{params.n}; only prompt log-probabilities of one choice need no output, "
                    "set max_tokens to at least 1"
                )
        elif room == 0:
            raise SettingError(
                f"prompt has {prompt_len} tokens but ",
                limit,
                f" is {self._max_model_len}, which leaves no room for output; "
                "shorten it or start the engine with a larger ",
                limit,
            )
        elif wanted is not None and wanted > room:
            raise SettingError(
                f"max_tokens is {wanted} but the prompt has {prompt_len} tokens and ",
                limit,
                f" is {self._max_model_len}; lower max_tokens to {room}, or leave it out to fill "
                "the rest",
            )
        if wanted is None:
            fitting = min(room, max(1, self._pool_len - prompt_len))
            wanted = fitting if default is None else min(default, fitting)
        if params.min_tokens > wanted:
            raise ValueError(
                f"min_tokens is {params.min_tokens} but only {wanted} tokens can be produced "
                f"behind a prompt of {prompt_len}; lower min_tokens or shorten the prompt"
            )
        return wanted

    def _request(
        self,
        ids: np.ndarray,
        params: SamplingParams,
        max_tokens: int,
        request_id: str | None,
        priority: int,
        cache_salt: str | bytes,
    ) -> Request:
        start = params.prompt_logprobs_start
        if params.prompt_logprobs is not None and start > len(ids):
            raise ValueError(
                f"prompt_logprobs_start is {start} but the prompt has {len(ids)} tokens; "
                f"it must lie in [0, {len(ids)}]"
            )
        stop_ids = self._stop_ids(params)
        params = self._ids_only(params)
        self._check_something_is_allowed(params, stop_ids)
        # Drawn from the system's entropy: the caller's own random state stays untouched.
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        return Request(
            request_id=self._request_id(request_id),
            prompt_ids=ids,
            params=params,
            stop_ids=stop_ids,
            eos_ids=self.eos_ids,
            max_tokens=max_tokens,
            seed=seed,
            priority=_priority(priority),
            cache_salt=self._cache_salt(cache_salt),
            grammar=self._grammar(params),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """The compiled form of the output: this waits, so it never runs on an event loop."""
        if params.structured is None:
            return None
        if self._grammars is not None:
            return self._grammars.compile(params.structured)
        tokenizer = self.tokenizer("structured output")
        from engine.text import grammar

        # What is missing first: the extra or an end id, by the compiler's own words.
        grammar.GrammarCompiler(tokenizer, self._vocab_size, self.eos_ids, self._limits)
        raise SettingError(
            "structured is set but the engine has no program that takes masks; start it with ",
            Setting("masked_rows"),
            ", such as 16",
        )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        self._check_vocabulary(params.stop_token_ids, "stop_token_ids")
        own = () if params.ignore_eos else self.eos_ids
        ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
        if len(ids) > self._limits.stop_ids:
            raise ValueError(
                f"stop_token_ids and the model's {len(own)} end ids make {len(ids)} ids, "
                f"the limit is {self._limits.stop_ids}"
            )
        return ids

    def _ids_only(self, params: SamplingParams) -> SamplingParams:
        """The params with text turned into ids, ids checked, and neutral values made plain."""
        if params.stop:
            self.tokenizer("stop strings")
        changes: dict[str, Any] = {}
        if params.bad_words or params.bad_word_ids:
            changes.update(bad_words=(), bad_word_ids=self._bad_word_ids(params))
        if params.logit_bias is not None:
            self._check_vocabulary(params.logit_bias, "logit_bias")
        if params.allowed_token_ids is not None:
            self._check_vocabulary(params.allowed_token_ids, "allowed_token_ids")
            changes["allowed_token_ids"] = tuple(dict.fromkeys(params.allowed_token_ids))
        if params.top_k == -1 or params.top_k >= self._vocab_size:
            changes["top_k"] = 0
        return dataclasses.replace(params, **changes) if changes else params

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Id sequences of the bad words, each as the start of a text and after a space."""
        for ids in params.bad_word_ids:
            self._check_vocabulary(ids, "bad_word_ids")
        words = [*params.bad_word_ids]
        for word in params.bad_words:
            tokenizer = self.tokenizer("bad_words")
            if len(word) > (limit := self._limits.bad_word_ids * self._longest_token):
                raise ValueError(
                    f"a bad word has {len(word)} characters, more than the {limit} bytes of "
                    f"{self._limits.bad_word_ids} token ids; give a shorter word"
                )
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                if not 1 <= len(ids) <= self._limits.bad_word_ids:
                    raise ValueError(
                        f"the bad word {word!r} has {len(ids)} token ids, it must have "
                        f"1 to {self._limits.bad_word_ids}; give a shorter word"
                    )
                # Space and word as ids of their own: the word alone covers it.
                if ids[1:] not in words:
                    words.append(ids)
        words = list(dict.fromkeys(words))
        if len(words) > self._limits.bad_words:
            raise ValueError(
                f"bad_words make {len(words)} token sequences, each word with and without a space "
                f"before it; the limit is {self._limits.bad_words}"
            )
        return tuple(words)

    def _check_vocabulary(self, ids: Iterable[int], name: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"{name} holds {token_id}, outside the vocabulary of {self._vocab_size} ids; "
                    f"ids lie in [0, {self._vocab_size - 1}]"
                )

    def _check_something_is_allowed(
        self, params: SamplingParams, stop_ids: tuple[int, ...]
    ) -> None:
        """A row whose every id is masked has no answer."""
        if params.allowed_token_ids is None:
            return
        banned = {ids[0] for ids in params.bad_word_ids if len(ids) == 1}
        if params.min_tokens:
            banned.update(stop_ids, self.eos_ids)
        if banned.issuperset(params.allowed_token_ids):
            raise ValueError(
                f"allowed_token_ids {params.allowed_token_ids} are all banned by bad_words or by "
                f"min_tokens {params.min_tokens}; allow another id"
            )

    def _request_id(self, request_id: str | None) -> str:
        if request_id is None:
            return secrets.token_hex(8)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}, it must be text")
        limit = self._limits.request_id_chars
        if not 1 <= len(request_id) <= limit:
            raise ValueError(
                f"request_id has {len(request_id)} characters, it must have 1 to {limit}"
            )
        return request_id

    def _cache_salt(self, cache_salt: str | bytes) -> bytes:
        if not isinstance(cache_salt, str | bytes):
            raise TypeError(
                f"cache_salt is a {type(cache_salt).__name__}, it must be text or bytes"
            )
        salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
        limit = self._limits.cache_salt_bytes
        if len(salt) > limit:
            raise ValueError(f"cache_salt has {len(salt)} bytes, the limit is {limit}")
        return salt


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token."""
    return max(len(tokenizer.id_to_bytes(i)) for i in range(tokenizer.vocab_size))


def _is_set(mapping: Mapping[str, Any], name: str) -> bool:
    return mapping.get(name) is not None


def _integers(ids: Sequence[Any], name: str) -> np.ndarray:
    for kind in set(map(type, ids)):
        if kind is bool or not issubclass(kind, int | np.integer):
            position = next(i for i, token_id in enumerate(ids) if type(token_id) is kind)
            raise TypeError(
                f"{name}[{position}] is {ids[position]!r}, it must be a token id (an integer)"
            )
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:  # far outside any vocabulary, but still to be named
        return np.array(ids, dtype=object)


def _priority(priority: int) -> int:
    if not isinstance(priority, int | np.integer) or isinstance(priority, bool):
        raise TypeError(f"priority is {priority!r}, it must be an integer")
    if not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority is {priority}, it must be a 32-bit integer")
    return int(priority)
