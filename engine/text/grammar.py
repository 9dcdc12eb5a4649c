"""Compiles the form an output must have into a grammar, in bounded time and off the step loop.

Everything known of the package `llguidance` (extra `grammar`) stands here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import importlib.util
import itertools
import json
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.config import LIMITS, Limits
from engine.request import StructuredOutput
from engine.text import grammar_errors
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_WORKERS = 2
"""Grammars compiled at once; a compile leaves the interpreter to others."""
_RECENT = 32
"""Grammars kept for requests that ask for the same."""
_SPELT_BYTES = 64
"""Bytes of a forced text that are spelt at once."""
_ERROR_CHARS = 400
_ROW_ITEMS = 1200
"""Ways in which an output may be read at once: enough for as many choices as are allowed. The cost
of an id of an ambiguous grammar grows with the square of it."""


def is_installed() -> bool:
    """Whether the package that compiles grammars is here."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarCompiler:
    """Makes grammars for one vocabulary, on threads of its own. Safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Sequence[int],
        limits: Limits = LIMITS,
    ) -> None:
        """Starts to prepare the vocabulary, which takes a moment and is waited for by `compile`.

        Args:
          tokenizer: whose ids the outputs are made of.
          vocab_size: ids that the model samples from; those the tokenizer lacks are never allowed.
          eos_ids: allowed where a grammar may end.
          limits: bounds of one grammar.

        Raises:
          ValueError: the package is not installed, or the model has no end id.
        """
        if not is_installed():
            raise ValueError(
                "structured output needs the package llguidance, which is not installed; run "
                "`requirements/install grammar`, or install treadle with its extra `grammar`"
            )
        if not eos_ids:
            raise ValueError("structured output needs a model with an end id; this one has none")
        self._num_words = -(-vocab_size // 32)
        self._limits = limits
        self._workers = concurrent.futures.ThreadPoolExecutor(
            _WORKERS, thread_name_prefix="treadle-grammar"
        )
        self._vocabulary = self._workers.submit(_vocabulary, tokenizer, tuple(eos_ids))
        self._lock = threading.Lock()
        self._recent: collections.OrderedDict[StructuredOutput, CompiledGrammar] = (
            collections.OrderedDict()
        )

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """The grammar of one form; waits for a worker, at most the limit.

        A worker whose caller stopped waiting ends by itself: what a compile may spend is bounded by
        the size of its grammar.

        Raises:
          ValueError: no output can have this form, something in it is not supported, or it is too
            large or too slow to compile.
        """
        with self._lock:
            if (found := self._recent.get(structured)) is not None:
                self._recent.move_to_end(structured)
                return found
        grammar = self._compiled_in_time(structured)
        with self._lock:
            self._recent[structured] = grammar
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return grammar

    def _compiled_in_time(self, structured: StructuredOutput) -> CompiledGrammar:
        self._vocabulary.result()
        limit_ms = self._limits.grammar_compile_ms
        work = self._workers.submit(self._compiled, structured)
        try:
            return work.result(limit_ms / 1000)
        except TimeoutError as error:
            work.cancel()
            raise ValueError(
                f"structured took longer than {limit_ms} ms to compile, the limit; write a simpler "
                f"{structured.kind}, or try again when fewer are compiled at once"
            ) from error

    def _compiled(self, structured: StructuredOutput) -> CompiledGrammar:
        import llguidance

        vocabulary = self._vocabulary.result()
        size = self._limits.grammar_symbols
        limits = llguidance.LLParserLimits(
            max_grammar_size=size, max_items_in_row=_ROW_ITEMS, verbose_errors=False
        )
        text = _grammar_text(structured)
        matcher = llguidance.LLMatcher(vocabulary, text, limits=limits, log_level=0)
        if matcher.is_error():
            raise _refused(structured, _reason(structured, matcher.get_error()))
        grammar = CompiledGrammar(matcher, self._num_words, self._limits.grammar_accept_ms)
        if not grammar.first_mask.any():
            raise _refused(structured, "no first token is allowed")
        return grammar


class CompiledGrammar:
    """A grammar at its start."""

    def __init__(self, start: llguidance.LLMatcher, num_words: int, accept_ms: int) -> None:
        self._start = start
        self._num_words = num_words
        self._accept_ms = accept_ms
        # Copies share what the package has found of the vocabulary, behind a lock of its own, for
        # which it waits with the interpreter in its hands (1.9.1): so they come one at a time.
        self._lock = threading.Lock()
        self.first_mask = self.matcher().mask()
        """i32[words]: what may come first. The dearest of its masks, so it is made here, once."""

    def matcher(self) -> GrammarMatcher:
        """One that has seen no id."""
        copy = self._start.deep_copy()
        return GrammarMatcher(copy, self._num_words, self._accept_ms, self._lock)


class GrammarMatcher:
    """Where one output stands in its grammar."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        num_words: int,
        accept_ms: int,
        lock: threading.Lock,
    ) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._accept_ms = accept_ms
        self._lock = lock
        self._is_slow = False

    def accept(self, token_id: int) -> bool:
        """Goes past an id; False: the grammar does not allow it here, or it took too long.

        The package keeps the interpreter meanwhile (1.9.1), and what an ambiguous grammar costs
        grows with every id: so it ends here, by the time of this thread alone.
        """
        with self._lock:
            began = time.thread_time()
            is_accepted = self._matcher.consume_token(token_id)
            self._is_slow = time.thread_time() - began > self._accept_ms / 1e3
        return is_accepted and not self._is_slow

    def mask(self) -> np.ndarray:
        """i32[words]: what may come next. Of a matcher that broke, over a limit, nothing may."""
        words = np.zeros(self._num_words, np.int32)
        with self._lock:
            found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        # Of a broken matcher the package would let the end ids pass: half an output as a whole one.
        if not self._matcher.is_error():
            num_words = min(len(words), len(found))
            words[:num_words] = found[:num_words]
        return words

    @property
    def fault(self) -> str:
        """The limit it went over; empty while it has not."""
        if self._is_slow:
            return f"one id took longer than {self._accept_ms} ms, the limit"
        lines = self._matcher.get_error().splitlines()
        return lines[0][:_ERROR_CHARS] if lines else ""

    @property
    def is_complete(self) -> bool:
        """The output is whole, and nothing but an end id could follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _vocabulary(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    import llguidance

    wrapper = llguidance.TokenizerWrapper(_Spelling(tokenizer, eos_ids))
    return llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=list(eos_ids))


class _Spelling:
    """A tokenizer as `llguidance` reads one.

    Where a grammar leaves no choice, a mask allows only the next token of the usual spelling, for
    which the package asks here from whatever thread makes the mask. The answer is cut: the whole of
    a long forced text would be spelt anew at each of its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(eos_ids))
        self._lead = tokenizer.encode("\n", add_special_tokens=False)
        self._id_of = {token: i for i, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, data: bytes) -> list[int]:
        """Ids that spell the start of `data`, none of them special."""
        text = data[:_SPELT_BYTES].decode("utf-8", "ignore")
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if self._spells(encoded, text):
            return encoded
        # Some vocabularies put a space before a text, and none behind its first character.
        led = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        num_lead = len(self._lead)
        if led[:num_lead] == self._lead and self._spells(led[num_lead:], text):
            return led[num_lead:]
        singles = (self._id_of.get(bytes([byte])) for byte in text.encode())
        return [i for i in itertools.takewhile(lambda i: i is not None, singles) if i is not None]

    def _spells(self, ids: list[int], text: str) -> bool:
        is_plain = self._tokenizer.special_ids.isdisjoint(ids)
        return is_plain and b"".join(self.tokens[i] for i in ids) == text.encode()


def _grammar_text(structured: StructuredOutput) -> str:
    from llguidance import LLMatcher

    match structured.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "json_schema":
            _check_json(structured)
            return LLMatcher.grammar_from_json_schema(structured.text)
        case "regex":
            return LLMatcher.grammar_from_regex(structured.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(structured))
        case "choice":
            literals = (json.dumps(one, ensure_ascii=False) for one in structured.choices)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(literals))


def _check_json(structured: StructuredOutput) -> None:
    """Finds what is no JSON: the package counts its own wrapper's columns."""
    try:
        json.loads(structured.text)
    except json.JSONDecodeError as error:
        place = grammar_errors.place(structured.text, error.pos)
        raise _refused(structured, f"{place}: {error.msg}") from error
    except RecursionError:
        pass  # the package has a limit of its own, and names it


def _lark(structured: StructuredOutput) -> str:
    """The grammar in the notation of Lark; one of llama.cpp is rewritten."""
    from llguidance import gbnf_to_lark

    try:
        return gbnf_to_lark.any_to_lark(structured.text)
    except gbnf_to_lark.GbnfToLarkError as error:
        place = grammar_errors.place(structured.text, error.pos.pos)
        reason = str(error).removesuffix(f" at {error.pos}")
        raise _refused(structured, f"{place}: {reason}") from error
    except Exception as error:  # of no type of its own: a rule that is missing or there twice
        raise _refused(structured, str(error)) from error


def _reason(structured: StructuredOutput, error: str) -> str:
    from llguidance import gbnf_to_lark

    is_lark = structured.kind != "grammar" or gbnf_to_lark.is_lark_syntax(structured.text)
    return grammar_errors.reason(structured, error, is_rewritten=not is_lark)


def _refused(structured: StructuredOutput, reason: str) -> ValueError:
    short = reason[:_ERROR_CHARS]
    return ValueError(f"structured, a {structured.kind}, cannot be compiled: {short}; correct it")
