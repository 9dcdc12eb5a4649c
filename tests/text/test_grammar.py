"""Grammars on a real vocabulary: what masks allow has the form asked for, whoever chooses."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import jsonschema
import numpy as np
import pytest

from engine.config import LIMITS, Limits
from engine.request import StructuredOutput
from engine.text import grammar
from engine.text.grammar import CompiledGrammar, GrammarCompiler
from engine.text.tokenizer import Tokenizer

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""No space that JSON does not need: an output chosen at random comes to an end."""
PERSON = COMPACT | {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", None, 3.5]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 4},
            "minItems": 1,
            "maxItems": 3,
        },
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 6}, "no": {"const": 7}},
            "required": ["street", "no"],
            "additionalProperties": False,
        },
        "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "age", "kind", "tags", "home", "either"],
    "additionalProperties": False,
}
TREE = COMPACT | {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "nested": PERSON,
    "recursive": TREE,
    "array": COMPACT
    | {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "number": COMPACT | {"type": "number", "minimum": -1, "maximum": 2},
}
LARK = 'start: greeting " " name "!"\ngreeting: "hi" | "good day"\nname: /[A-Z][a-z]{2,5}/'
GBNF = 'root ::= sign [0-9] ("." [0-9])?\nsign ::= "-" | "+"'
TEXTS = {
    "regex": (StructuredOutput("regex", r"[a-f0-9]{4}(-[a-f0-9]{2}){1,3}"),) * 2,
    "lark": (StructuredOutput("grammar", LARK), r"(hi|good day) [A-Z][a-z]{2,5}!"),
    "gbnf": (StructuredOutput("grammar", GBNF), r"[-+][0-9](\.[0-9])?"),
    "choice": (StructuredOutput("choice", choices=("yes", "no", 'it "is"', "ünïcode\n#/%|")), None),
}


@pytest.fixture(scope="module")
def compiler(smollm2: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(smollm2, smollm2.vocab_size, smollm2.eos_ids)


def allowed(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def written(
    compiled: CompiledGrammar, tokenizer: Tokenizer, seed: int | None, max_tokens: int = 600
) -> str | None:
    """An output that takes any allowed id (seed None: of the first logits' order); None: cut."""
    matcher, draw, ids = compiled.matcher(), random.Random(seed), []
    order = np.random.default_rng(5).permutation(tokenizer.vocab_size)
    while len(ids) < max_tokens:
        choices = allowed(matcher.mask())
        assert len(choices)
        chosen = choices[np.argmin(order[choices])] if seed is None else draw.choice(choices)
        if int(chosen) in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        assert matcher.accept(int(chosen))
        ids.append(int(chosen))
        if matcher.is_complete:
            return tokenizer.decode(ids)
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_of_a_schema_validates(compiler, smollm2, name):
    # Ledger row STRUCT-04.
    compiled = compiler.compile(StructuredOutput("json_schema", json.dumps(SCHEMAS[name])))
    texts = [written(compiled, smollm2, seed) for seed in (None, *range(12))]
    whole = [text for text in texts if text is not None]
    assert len(whole) >= 8
    for text in whole:
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_every_output_of_json_object_is_one(compiler, smollm2):
    compiled = compiler.compile(StructuredOutput("json_object"))
    texts = [written(compiled, smollm2, seed, 200) for seed in range(40)]
    whole = [text for text in texts if text is not None]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize("name", TEXTS)
def test_every_output_of_regex_grammar_and_choice_matches(compiler, smollm2, name):
    structured, pattern = TEXTS[name]
    compiled = compiler.compile(structured)
    for seed in (None, *range(12)):
        text = written(compiled, smollm2, seed)
        assert text is not None
        if name == "choice":
            assert text in structured.choices
        else:
            assert re.fullmatch(pattern if name != "regex" else structured.text, text), text


def test_end_ids_are_allowed_where_the_form_may_end_and_nowhere_else(smollm2):
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size, (2, 0))
    matcher = compiler.compile(StructuredOutput("regex", "ab*")).matcher()
    assert not {0, 2} & set(allowed(matcher.mask()).tolist())
    assert matcher.accept(smollm2.encode("a")[0]) and not matcher.is_complete
    assert {0, 2} <= set(allowed(matcher.mask()).tolist())


def test_whole_form_is_complete_and_allows_the_end_ids_alone(compiler, smollm2):
    matcher = compiler.compile(StructuredOutput("choice", choices=("yes",))).matcher()
    for token_id in smollm2.encode("yes"):
        assert not matcher.is_complete
        assert matcher.accept(token_id)
    assert matcher.is_complete
    assert allowed(matcher.mask()).tolist() == list(smollm2.eos_ids)


def test_refused_id_breaks_the_matcher_and_a_broken_one_allows_nothing(compiler, smollm2):
    # The package lets the end ids pass then: half an output would look like a whole one.
    matcher = compiler.compile(StructuredOutput("regex", "ab*")).matcher()
    assert not matcher.accept(smollm2.encode("q")[0])
    assert not matcher.mask().any() and not matcher.is_complete


def test_matchers_of_one_grammar_are_independent_and_a_function_of_their_ids(compiler, smollm2):
    compiled = compiler.compile(StructuredOutput("json_schema", json.dumps(PERSON)))
    ids = smollm2.encode('{"name":"Ada","age":3')
    first = compiled.matcher()
    masks = []
    for token_id in ids:
        masks.append(first.mask())
        assert first.accept(token_id)
    for length in range(len(ids)):
        again = compiled.matcher()
        assert all(again.accept(token_id) for token_id in ids[:length])
        assert np.array_equal(again.mask(), masks[length])


def test_ids_past_the_tokenizer_are_never_allowed(smollm2):
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size + 100, smollm2.eos_ids)
    words = compiler.compile(StructuredOutput("regex", "(.|\n)*")).matcher().mask()
    assert len(words) == -(-(smollm2.vocab_size + 100) // 32)
    assert allowed(words).max() < smollm2.vocab_size


@pytest.mark.parametrize("text", ["<|im_start|>", "<|im_end|>!", " leading", "two\n\nlines", "猫"])
def test_forced_text_is_spelt_exactly_and_by_no_special_token(tokenizer, text):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    matcher = compiler.compile(StructuredOutput("choice", choices=(text,))).matcher()
    spelt = b""
    while not matcher.is_complete:
        choices = allowed(matcher.mask()).tolist()
        assert choices and not tokenizer.special_ids & set(choices)
        spelt += tokenizer.id_to_bytes(choices[0])
        assert matcher.accept(choices[0])
    assert spelt.decode() == text


def test_spelling_of_a_long_forced_text_is_cut(compiler, smollm2, monkeypatch):
    matcher = compiler.compile(StructuredOutput("regex", "the cat sat " * 1000)).matcher()
    lengths = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text, **options: lengths.append(len(text)) or encode(self, text, **options),
    )
    for token_id in smollm2.encode("the cat sat the", add_special_tokens=False):
        assert token_id in allowed(matcher.mask())
        assert matcher.accept(token_id)
    assert lengths and max(lengths) <= 64


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (StructuredOutput("regex", "[a-c"), "unclosed character class"),
        (StructuredOutput("grammar", "start: nowhere"), "nowhere"),
        (StructuredOutput("grammar", "nothing at all"), ""),
        (StructuredOutput("json_schema", "not json"), ""),
        (StructuredOutput("json_schema", "3"), "schema must be an object or boolean"),
        (StructuredOutput("json_schema", '{"type": "cat"}'), "Invalid type: cat"),
        (StructuredOutput("json_schema", '{"enum": []}'), "Unsatisfiable"),
        (StructuredOutput("json_schema", '{"propertyNames": {"pattern": "a"}}'), "propertyNames"),
        (StructuredOutput("json_schema", "[" * 3000 + "]" * 3000), "recursion limit"),
    ],
)
def test_bad_forms_are_refused_by_name(compiler, structured, reason):
    # Ledger row STRUCT-03.
    with pytest.raises(ValueError, match=f"structured, a {structured.kind}, cannot be") as caught:
        compiler.compile(structured)
    assert reason in str(caught.value) and len(str(caught.value)) < 600


def test_grammar_over_the_size_limit_is_refused(smollm2):
    compiler = GrammarCompiler(
        smollm2, smollm2.vocab_size, smollm2.eos_ids, Limits(grammar_symbols=50)
    )
    rules = "\n".join(f'r{i}: "{i}" r{i + 1}?' for i in range(99)) + '\nr99: "x"'
    with pytest.raises(ValueError, match=r"structured, a grammar, cannot be compiled: .*size"):
        compiler.compile(StructuredOutput("grammar", f"start: r0\n{rules}"))


BOMBS = (
    "((a{1,1000}){1,1000}){1,1000}",
    "((a|b|c|aa|bb)*x){500}",
    r"(\w{1,200}\s){1,200}",
    "(.*a){200}[ab]{3000}",
    "x" * 60_000,
)


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_bombs_compile_or_are_refused_within_the_limit(compiler, bomb):
    began = time.perf_counter()
    try:
        compiler.compile(StructuredOutput("regex", bomb))
    except ValueError as error:
        assert "structured" in str(error)
    assert time.perf_counter() - began < LIMITS.grammar_compile_ms / 1000 + 1


def test_compile_over_the_time_limit_is_given_up_by_name(smollm2, monkeypatch):
    compiler = GrammarCompiler(
        smollm2, smollm2.vocab_size, smollm2.eos_ids, Limits(grammar_compile_ms=50)
    )
    release = threading.Event()
    monkeypatch.setattr(grammar, "_grammar_text", lambda structured: release.wait() and "")
    with pytest.raises(ValueError, match="took longer than 50 ms to compile, the limit; write a"):
        compiler.compile(StructuredOutput("regex", "a"))
    release.set()


def test_compiling_runs_on_threads_of_its_own(compiler, monkeypatch):
    found = []
    text = grammar._grammar_text
    monkeypatch.setattr(
        grammar,
        "_grammar_text",
        lambda structured: found.append(threading.current_thread().name) or text(structured),
    )
    compiler.compile(StructuredOutput("regex", "never asked before"))
    assert found and found[0].startswith("treadle-grammar")


def test_same_form_is_compiled_once(compiler):
    structured = StructuredOutput("regex", "twice")
    assert compiler.compile(structured) is compiler.compile(StructuredOutput("regex", "twice"))


def test_without_the_extra_the_install_command_is_named(smollm2, monkeypatch):
    monkeypatch.setattr(grammar, "is_installed", lambda: False)
    with pytest.raises(ValueError, match="run `requirements/install grammar`, or install"):
        GrammarCompiler(smollm2, smollm2.vocab_size, smollm2.eos_ids)


def test_model_without_an_end_id_is_refused(smollm2):
    with pytest.raises(ValueError, match="needs a model with an end id; this one has none"):
        GrammarCompiler(smollm2, smollm2.vocab_size, ())
