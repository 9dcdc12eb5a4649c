"""Structured output through the faces: outputs that validate, refusals, and the wire."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from engine import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutput
from engine.serving import messages
from engine.text import grammar
from engine.text.tokenizer import Tokenizer, load_tokenizer
from proto.treadle.v1 import generation_pb2 as pb
from tests.families import tiny

SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "size": {"enum": ["small", "large"]},
        "counts": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
        "inner": {
            "type": "object",
            "properties": {"note": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
            "required": ["note", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "size", "counts", "inner"],
    "additionalProperties": False,
}
JSON_SCHEMA = StructuredOutput("json_schema", json.dumps(SCHEMA))
REGEX = StructuredOutput("regex", r"[a-c]{3}-(x|yy)+z")
LARK = StructuredOutput("grammar", 'start: "hi " name "!"\nname: /[A-Z][a-z]{2,5}/')
CHOICE = StructuredOutput("choice", choices=("yes", "no", "maybe so"))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Random weights under the vocabulary of SmolLM2: an adversary of every grammar."""
    described = tiny.config("llama") | {"vocab_size": 49152, "num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("dummy") / "config.json"
    path.write_text(json.dumps(described))
    return EngineConfig(
        model=str(path),
        load_format="dummy",
        max_model_len=256,
        max_rows=4,
        row_rungs=(4,),
        token_budget=32,
        token_rungs=(32,),
        num_pages=80,
        masked_rows=2,
        compilation_cache=None,
    )


@pytest.fixture(scope="module")
def llm(config: EngineConfig, smollm2: Tokenizer) -> Iterator[LLM]:
    with LLM(config, tokenizer=smollm2) as llm:
        yield llm


def params(structured: StructuredOutput | dict, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "structured": structured, **fields})


SAMPLINGS = [{"temperature": 0.0}, *({"temperature": 1.5, "seed": seed} for seed in range(2))]


def texts(llm: LLM, structured: StructuredOutput) -> list[str]:
    outputs = llm.generate(
        ["Say it"] * len(SAMPLINGS),
        [params(structured, **fields) for fields in SAMPLINGS],
        use_progress_bar=False,
    )
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * len(SAMPLINGS)
    return [output.outputs[0].text for output in outputs]


def test_json_schema_outputs_validate_greedy_and_random(llm):
    found = texts(llm, JSON_SCHEMA)
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [(REGEX, REGEX.text), (LARK, r"hi [A-Z][a-z]{2,5}!"), (CHOICE, "yes|no|maybe so")],
    ids=["regex", "lark", "choice"],
)
def test_regex_grammar_and_choice_outputs_match(llm, structured, pattern):
    for text in texts(llm, structured):
        assert re.fullmatch(pattern, text), text


def test_json_object_outputs_start_as_an_object_and_whole_ones_parse(llm):
    form = params(StructuredOutput("json_object"), temperature=1.0, seed=3, n=4, max_tokens=60)
    (output,) = llm.generate(["x"], form, use_progress_bar=False)
    for choice in output.outputs:
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


def test_other_parameters_work_beside_a_form(llm):
    form = params(
        CHOICE,
        n=3,
        temperature=1.0,
        seed=1,
        logprobs=2,
        prompt_logprobs=1,
        repetition_penalty=1.3,
        logit_bias={5: 50.0},
        stop=["maybe"],
    )
    (output,) = llm.generate(["Yes or no?"], form, use_progress_bar=False)
    for choice in output.outputs:
        assert choice.text in ("yes", "no", "")
        assert len(choice.logprobs) == len(choice.token_ids)
    assert output.prompt_logprobs is not None


def test_free_and_masked_prompts_of_one_call_do_not_mix(llm):
    # Ledger row STRUCT-10.
    each = [params(CHOICE, seed=1), SamplingParams(max_tokens=7, seed=1), params(REGEX, seed=2)] * 3
    outputs = llm.generate(["a"] * 9, each, use_progress_bar=False)
    for index, output in enumerate(outputs):
        text = output.outputs[0].text
        if index % 3 == 0:
            assert text in CHOICE.choices
        elif index % 3 == 1:
            assert len(output.outputs[0].token_ids) == 7
        else:
            assert re.fullmatch(REGEX.text, text)


def test_streamed_text_of_a_form_joins_to_the_whole(llm):
    form = params(JSON_SCHEMA, temperature=1.0, seed=9)
    joined = "".join(part.outputs[0].text for part in llm.stream("a", form))
    jsonschema.validate(json.loads(joined), SCHEMA)


def test_mapping_of_fields_is_a_form(llm):
    form = {"structured": {"kind": "choice", "choices": ["left", "right"]}, "max_tokens": 9}
    (output,) = llm.generate(["a"], form, use_progress_bar=False)
    assert output.outputs[0].text in ("left", "right")


def test_bad_form_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured, a regex, cannot be compiled"):
        bad = params(StructuredOutput("regex", "("))
        llm.generate(["a", "b"], [params(CHOICE), bad], use_progress_bar=False)


def test_engine_without_masked_rows_names_the_setting(llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "_grammars", None)
    with pytest.raises(ValueError, match=r"start it with masked_rows, such as 16"):
        llm.generate(["a"], params(CHOICE), use_progress_bar=False)


def test_without_the_extra_the_refusal_names_the_install_command(llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "_grammars", None)
    monkeypatch.setattr(grammar, "is_installed", lambda: False)
    with pytest.raises(ValueError, match="requirements/install grammar"):
        llm.generate(["a"], params(CHOICE), use_progress_bar=False)


def test_event_loop_and_engine_thread_do_not_compile(config, smollm2, llm, monkeypatch):
    threads = set()
    waited = grammar.GrammarCompiler.compile

    def watched(self, structured):
        threads.add(threading.current_thread())
        return waited(self, structured)

    monkeypatch.setattr(grammar.GrammarCompiler, "compile", watched)
    served = AsyncLLM.__new__(AsyncLLM)
    served.__dict__.update(llm.__dict__, _mailbox=None)

    async def one() -> str:
        text = ""
        async for output in served.generate("a", params(CHOICE), mode="final"):
            text = output.outputs[0].text
        return text

    assert asyncio.run(one()) in CHOICE.choices
    (thread,) = threads
    assert thread is not threading.main_thread() and thread.name.startswith("asyncio_")


@pytest.mark.parametrize(
    "structured", [JSON_SCHEMA, REGEX, LARK, CHOICE, StructuredOutput("json_object")]
)
def test_forms_survive_the_wire(structured):
    message = messages.params_message(SamplingParams(structured=structured))
    again = pb.SamplingParams.FromString(message.SerializeToString())
    assert SamplingParams(**messages.params_fields(again)).structured == structured
    mapping = {"kind": structured.kind, "text": structured.text, "choices": structured.choices}
    assert messages.params_message({"structured": mapping}).structured == message.structured


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.StructuredOutput(), "structured is empty; set json_schema"),
        (pb.StructuredOutput(json_object=False), "structured.json_object is false"),
        (pb.StructuredOutput(regex=""), "structured.text is '' for the kind regex"),
        (pb.StructuredOutput(choice=pb.StructuredOutput.Choices()), "choices has 0 strings"),
    ],
)
def test_forms_that_say_nothing_are_refused_on_the_wire(message, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        messages.params_fields(pb.SamplingParams(structured=message))
