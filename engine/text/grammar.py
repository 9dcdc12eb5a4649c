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
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.config import LIMITS, Limits
from engine.request import StructuredOutput
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
        limits = llguidance.LLParserLimits(max_grammar_size=size)
        text = _grammar_text(structured)
        matcher = llguidance.LLMatcher(vocabulary, text, limits=limits, log_level=0)
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        # Its first mask is the dearest one, and copies of the matcher keep what it found.
        grammar = CompiledGrammar(matcher, self._num_words)
        if not grammar.matcher().mask().any():
            raise _refused(structured, "no first token is allowed")
        return grammar


class CompiledGrammar:
    """A grammar at its start."""

    def __init__(self, start: llguidance.LLMatcher, num_words: int) -> None:
        self._start = start
        self._num_words = num_words

    def matcher(self) -> GrammarMatcher:
        """One that has seen no id."""
        return GrammarMatcher(self._start.deep_copy(), self._num_words)


class GrammarMatcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def accept(self, token_id: int) -> bool:
        """Goes past an id; False: the grammar does not allow it here."""
        return self._matcher.consume_token(token_id)

    def mask(self) -> np.ndarray:
        """i32[words]: what may come next. Of a matcher that broke, over a limit, nothing may."""
        words = np.zeros(self._num_words, np.int32)
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        # Of a broken matcher the package would let the end ids pass: half an output as a whole one.
        if not self._matcher.is_error():
            num_words = min(len(words), len(found))
            words[:num_words] = found[:num_words]
        return words

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
    from llguidance import LLMatcher, gbnf_to_lark

    try:
        match structured.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}')
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(structured.text)
            case "regex":
                return LLMatcher.grammar_from_regex(structured.text)
            case "grammar":
                return LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(structured.text))
            case "choice":
                literals = (json.dumps(one, ensure_ascii=False) for one in structured.choices)
                return LLMatcher.grammar_from_lark("start: " + " | ".join(literals))
    except (ValueError, gbnf_to_lark.GbnfToLarkError) as error:
        raise _refused(structured, str(error)) from error


def _refused(structured: StructuredOutput, reason: str) -> ValueError:
    short = " ".join(reason.split("<state>")[0].split())[:_ERROR_CHARS]
    return ValueError(f"structured, a {structured.kind}, cannot be compiled: {short}; correct it")
