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


PLACES = {
    "lark": ("grammar", 'start: a\na: "x" ** 3', "line 2, column 9: Expected value"),
    "lark, a name": ("grammar", 'start: "a"\n  | b', 'line 1, column 8: unknown name: "b"'),
    "lark, wide": ("grammar", 'start: "猫é" )', "line 1, column 13: expecting rule, token"),
    "lark, a regex": ("grammar", 'start: a\na: "é" /ab[/', "line 2, column 11: unclosed char"),
    "lark, two lines": ("grammar", "start: a\na: /x(\n/", 'line 2, column 4: invalid regex "x('),
    "lark, JSON": ("grammar", 'start: "é" %json {"type": ]}', "line 1, column 27: failed to parse"),
    "gbnf": ("grammar", 'root ::= "a" |\n  @', "line 2, column 3: Expected name"),
    "gbnf, the end": ("grammar", "root ::= [0-9", "line 1, column 14: Unexpected end of input"),
    "gbnf, a rule": ("grammar", 'root ::= "a"\n  b\nb ::= [z-a]', "line 2, column 4: Expected ::="),
    "gbnf, a range": ("grammar", "root ::= b\nb ::= [z-a]", "line 2, column 8: invalid character"),
    "gbnf, an escape": ("grammar", "root ::= b\nb ::= [b-\\u0041]", "in the regular expression ["),
    "gbnf, a name": ("grammar", 'root ::= sign\nsgn ::= "a"', "Rule 'sign' not found; correct it"),
    "regex": ("regex", "ab[z-a]", "line 1, column 4: invalid character class range"),
    "regex, wide": ("regex", "é猫(", "line 1, column 3: unclosed group"),
    "regex, slashes": ("regex", "a/b/\\/(", "line 1, column 7: unclosed group"),
    "regex, lines": ("regex", "a/\n\t(b", "line 2, column 2: unclosed group"),
    "schema": ("json_schema", '{"type":\n "string",}', "line 2, column 11: "),
    "schema, wide": ("json_schema", '{"é": 猫}', "line 1, column 7: Expecting value"),
    "schema, a number": ("json_schema", '{"a": NaN}', "line 1, column 7: expected value"),
    "schema, depth": ("json_schema", "[\n" * 200 + "]" * 200, "line 125, column 1: recursion"),
    "schema, a pattern": (
        "json_schema",
        '{"type": "string", "pattern": "ab["}',
        "in the regular expression ab[, column 3: unclosed character class",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_place_of_an_error_is_one_of_the_callers_own_text(compiler, name):
    kind, text, words = PLACES[name]
    with pytest.raises(ValueError) as caught:
        compiler.compile(StructuredOutput(kind, text))
    assert str(caught.value).startswith(f"structured, a {kind}, cannot be compiled: {words}")
    assert str(caught.value).endswith("; correct it") and "\n" not in str(caught.value)


def test_error_of_a_choice_has_no_place_of_the_grammar_made_of_it(smollm2):
    compiler = GrammarCompiler(
        smollm2, smollm2.vocab_size, smollm2.eos_ids, Limits(grammar_symbols=5)
    )
    with pytest.raises(
        ValueError, match=r"structured, a choice, cannot be compiled: [a-z]"
    ) as caught:
        compiler.compile(StructuredOutput("choice", choices=tuple("abcdefghijklmnop" * 20)))
    assert not re.search(r"line \d|\d\(\d", str(caught.value))


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


AMBIGUOUS = (
    'start: s\ns: s s s | s s | "a" | ""',
    'start: start start | "a"',
    "start: s\ns: " + " | ".join("s " * k for k in range(2, 6)) + " | /[a-z]/",
)


@pytest.mark.parametrize("text", AMBIGUOUS, ids=range(len(AMBIGUOUS)))
def test_ambiguous_grammar_stops_at_a_limit_by_name_before_its_ids_cost_much(smollm2, text):
    limits = Limits(grammar_accept_ms=10)
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size, smollm2.eos_ids, limits)
    matcher, draw = compiler.compile(StructuredOutput("grammar", text)).matcher(), random.Random(3)
    ends, dearest, is_accepted = set(smollm2.eos_ids), 0.0, True
    for _ in range(400):
        chosen = draw.choice([i for i in allowed(matcher.mask()).tolist() if i not in ends])
        began = time.thread_time()
        is_accepted = matcher.accept(chosen)
        dearest = max(dearest, time.thread_time() - began)
        if not is_accepted:
            break
    assert not is_accepted and not matcher.is_complete
    assert re.match("one id took longer than 10 ms, the limit|Parser Error: .*max", matcher.fault)
    assert dearest < 0.25, "the first id over the limit is the last one"


def test_first_mask_of_a_grammar_is_that_of_a_fresh_matcher(compiler):
    compiled = compiler.compile(StructuredOutput("regex", "[ab]c"))
    assert compiled.first_mask.any()
    assert np.array_equal(compiled.first_mask, compiled.matcher().mask())


def test_grammar_that_its_parser_cannot_follow_says_which_limit_it_met(compiler, smollm2):
    # 24 doublings: the mask allows an id that the parser has no room for.
    rules = (f"{chr(97 + i)}: {chr(98 + i)} {chr(98 + i)}" for i in range(24))
    text = "start: a\n" + "\n".join(rules) + '\ny: "x"'
    matcher = compiler.compile(StructuredOutput("grammar", text)).matcher()
    (chosen, *_) = smollm2.encode("xxxx", add_special_tokens=False)
    assert chosen in allowed(matcher.mask())
    assert not matcher.accept(chosen) and matcher.fault
    assert not matcher.mask().any()
