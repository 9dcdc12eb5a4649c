"""Measured choices: found by shape, refused where they are wrong, put aside by name."""

import concurrent.futures
import json
import pathlib
import tomllib

import jax
import jax.numpy as jnp
import pytest

from engine.execution.candidates import TUNED
from kernels import tuning
from kernels.linear import api as linear
from kernels.moe import api as moe
from kernels.tuning import FORMULA, TUNING, Choice, Entry, Table
from tests.kernels import decode_cases, linear_cases, mla_decode_cases, moe_cases

ROOT = pathlib.Path(__file__).parents[2]
CASE = linear_cases.Case("parts", 8, inputs=1024, outputs=1024)
SHAPE = {"inputs": 1024, "outputs": 1024}
TWO, ONE = (Choice.of("mosaic", depth=128, splits=n) for n in (2, 1))
ITEM = {
    "shape": SHAPE,
    "choice": {"form": "mosaic", "depth": 128, "splits": 1},
    "us": 2.5,
    "formula_us": 3,
    "measured": "2026-12-01, jax 0.11.2",
}


def table(choice, op="linear.parts", shape=None):
    return Table("a device", (Entry(op, shape or SHAPE, choice, 2.5, 3.0, "2026-12-01"),))


def program(case=CASE, **options):
    """What a call is traced to, in words."""
    call = case.call("mosaic")
    return str(jax.jit(lambda *args: call(*args, **options)).trace(*case.structs).jaxpr)


def written(tmp_path, data):
    file = tmp_path / "a_device.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


# Lookup.


def test_call_of_a_measured_shape_is_traced_with_its_choice():
    formula = program()
    assert "f32[2,8,1024]" in formula
    with TUNING.using(table(ONE)):
        found = program()
    assert "f32[2,8,1024]" not in found
    assert found == program(choice=ONE)
    assert program() == formula


def test_choice_by_name_comes_before_what_was_measured():
    formula = program()
    with TUNING.using(table(ONE)):
        assert program(choice=FORMULA) == program(choice=TWO) == formula


@pytest.mark.parametrize(
    "case",
    [
        linear_cases.Case("parts", 8, inputs=1024, outputs=2048),
        linear_cases.Case("parts", 8, inputs=2048, outputs=1024),
        linear_cases.Case("gated", 8, inputs=1024, outputs=512),
    ],
    ids=str,
)
def test_call_of_any_other_shape_goes_by_formula(case):
    formula = program(case)
    with TUNING.using(table(ONE)):
        assert program(case) == formula


@pytest.mark.parametrize(("tokens", "depth"), [(8, 64), (9, 128), (16, 128), (17, 128), (3, 64)])
def test_tokens_take_the_choice_of_the_next_rung(tokens, depth):
    shape = {"tokens": 16, "inputs": 256, "outputs": 4096}
    measured = table(Choice.of("mosaic", depth=128), "linear.product", shape)
    tokens = tokens if tokens <= 8 else 8 * -(-tokens // 8)
    with TUNING.using(measured):
        found = program(linear_cases.Case("product", tokens))
    by_name = Choice.of("mosaic", depth=depth)
    assert found == program(linear_cases.Case("product", tokens), choice=by_name)


@pytest.mark.parametrize(("count", "least", "rung"), [(1, 1, 1), (3, 1, 4), (64, 8, 64), (2, 8, 8)])
def test_rung_is_the_next_power_of_two(count, least, rung):
    assert tuning.rung(count, least) == rung


def test_device_that_nobody_measured_goes_by_formula():
    force = TUNING.in_force()
    assert force.device == jax.devices()[0].device_kind and not force.entries
    assert force.choice("linear.parts", SHAPE, lambda shape: ()) == FORMULA


def test_file_of_the_first_device_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "TUNING", tuning.Tuning())
    file = tuning.file_of(jax.devices()[0].device_kind)
    file.write_text(json.dumps({"device": "cpu", "ops": {"linear.parts": [ITEM]}}))
    (entry,) = tuning.TUNING.in_force().entries
    assert (entry.op, entry.choice) == ("linear.parts", ONE)


def test_table_that_a_run_was_given_is_seen_by_every_thread_and_put_back():
    given = table(ONE)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    with pool, pytest.raises(KeyError), TUNING.using(given):
        assert pool.submit(TUNING.in_force).result() is given
        raise KeyError
    assert TUNING.in_force() is not given


def test_plain_calls_are_not_looked_up():
    arrays = linear_cases.inputs(CASE)
    with TUNING.using(table(Choice.of("mosaic", depth=1, splits=1))):
        assert linear.parts(*arrays, kernels="plain").shape == (1, 8, 1024)


# What a choice may depend on.


@pytest.mark.parametrize("form", ["parts", "gated"])
def test_tokens_do_not_change_a_choice_that_the_formula_makes_by_weight_alone(form):
    shapes = []
    for tokens in (1, 8, 64):
        case = linear_cases.Case(form, tokens, inputs=1024, outputs=1024)
        shapes.append(getattr(linear, form).tunable.shape(*case.structs, kernels="mosaic"))
    assert shapes[0] == shapes[1] == shapes[2]


CALLS = {
    "attention.decode": (decode_cases.Case((512,) * 3), {"splits": 4}),
    "mla.decode": (mla_decode_cases.Case((512,) * 3), {"splits": 2}),
    "linear.product": (linear_cases.Case("product", 8), {"depth": 128}),
    "linear.parts": (CASE, {"depth": 64, "splits": 1}),
    "linear.gated": (linear_cases.Case("gated", 8), {"depth": 128}),
    "linear.normed": (linear_cases.Normed("product"), {"depth": 128}),
    "attention.decode_times": (decode_cases.TIMES[0], {"depth": 64}),
}


@pytest.mark.parametrize("op", CALLS)
def test_shape_has_the_fields_of_the_file_and_the_formula_is_the_first_candidate(op):
    case, settings = CALLS[op]
    call = case.decode("mosaic") if hasattr(case, "decode") else case.call("mosaic")
    shape = TUNED[op].tunable.shape(*case.structs, **getattr(call, "keywords", {}))
    assert tuple(shape) == tuning.OPS[op].shape
    candidates = TUNED[op].tunable.candidates(shape)
    assert Choice.of("mosaic", **settings) in candidates
    assert set(dict(candidates[0].settings)) == set(tuning.OPS[op].forms["mosaic"])

    def traced(choice):
        return str(jax.jit(lambda *args: call(*args, choice=choice)).trace(*case.structs).jaxpr)

    assert traced(candidates[0]) == traced(FORMULA) != traced(Choice.of("mosaic", **settings))


@pytest.mark.parametrize("op", ["linear.normed", "attention.decode_times"])
def test_one_token_is_tuned_in_both_forms_and_no_two_candidates_are_alike(op):
    case, _ = CALLS[op]
    call, tunable = case.call("mosaic"), TUNED[op].tunable
    shape = tunable.shape(*case.structs, **call.keywords)
    candidates = tunable.candidates(shape)
    assert [choice.form for choice in candidates] == ["mosaic"] * 2 + ["registers"] * 2
    texts = []
    for choice in candidates:
        before = TUNED[op].counts[choice.form]
        with TUNING.using(table(choice, op, shape)):
            texts.append(str(jax.jit(lambda *args: call(*args)).trace(*case.structs).jaxpr))
        assert TUNED[op].counts[choice.form] == before + 1
    assert len(set(texts)) == len(candidates)


@pytest.mark.parametrize(("outputs", "megabytes"), [(64, ()), (2048, (8, 16)), (4096, (8, 16, 24))])
def test_attention_prefetches_up_to_the_weight_that_it_is_multiplied_with(
    tmp_path, outputs, megabytes
):
    case = decode_cases.Times(decode_cases.Case((512,), num_kv_heads=8), outputs)
    op, tunable = "attention.decode_times", TUNED["attention.decode_times"].tunable
    shape = tunable.shape(*case.structs, **case.call("mosaic").keywords)
    prefetched = tunable.candidates(shape)[4:]
    assert prefetched == tuple(
        Choice.of(form, depth=128, prefetch=n)
        for form in ("prefetched", "registers_prefetched")
        for n in megabytes
    )
    for choice in prefetched:
        kept = tuning.read(written(tmp_path, table(choice, op, shape).text()))
        assert kept.choice(op, shape, tunable.candidates) == choice


@pytest.mark.parametrize("size", [{"tokens": 2}, {"outputs": 64}])
def test_norm_and_product_of_more_tokens_or_few_outputs_have_no_choice(size):
    shape = {"tokens": 1, "halves": 1, "inputs": 256, "outputs": 4096}
    assert linear.normed.tunable.candidates(shape)
    assert linear.normed.tunable.candidates(shape | size) == ()


@pytest.mark.parametrize("tokens", [8, 32, 64, 256, 2048])
def test_experts_are_tuned_in_both_forms_and_no_two_candidates_are_alike(tokens):
    size = moe_cases.QWEN
    structs = size.case(tokens).structs
    shape = moe.experts.tunable.shape(*structs, kernels="mosaic")
    assert tuple(shape) == tuning.OPS["moe.experts"].shape
    candidates = moe.experts.tunable.candidates(shape)
    is_few = tokens <= 128
    assert candidates[0].form == ("unpermuted" if is_few else "permuted")
    texts = []
    for choice in (FORMULA, *candidates):
        before = moe.experts.counts[choice.form or candidates[0].form]
        call = jax.jit(
            lambda *args, choice=choice: moe.experts(*args, kernels="mosaic", choice=choice)
        )
        texts.append(str(call.trace(*structs).jaxpr))
        assert moe.experts.counts[choice.form or candidates[0].form] == before + 1
    assert texts[0] == texts[1] and len(set(texts)) == len(candidates)


def test_tuned_kernels_lower_for_a_device_that_is_not_there():
    with TUNING.using(table(ONE)):
        lowered = jax.jit(CASE.call("mosaic")).trace(*CASE.structs)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


# The files.


@pytest.mark.parametrize("file", sorted(tuning.FOLDER.glob("*.json")), ids=lambda file: file.name)
def test_every_choice_in_the_repository_is_a_candidate(file):
    kept = tuning.read(file)
    assert tuning.file_of(kept.device) == file
    assert file.read_text() == kept.text(), "`treadle tune` writes it otherwise"
    for entry in kept.entries:
        candidates = TUNED[entry.op].tunable.candidates
        assert kept.choice(entry.op, entry.shape, candidates) == entry.choice


def test_the_wheel_holds_the_files():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "kernels"
    found = {file for one in settings["package-data"]["kernels"] for file in package.glob(one)}
    assert found and found == set(tuning.FOLDER.iterdir())


def test_table_is_written_as_it_is_read(tmp_path):
    other = Entry("moe.experts", dict.fromkeys(tuning.OPS["moe.experts"].shape, 8),
                  Choice.of("permuted", columns=32, tail=32), 1.5, 2.0, "then")  # fmt: skip
    both = table(ONE).replaced(other.op, other.shape, other)
    again = tuning.read(written(tmp_path, both.text()))
    assert again.entries == both.entries and again.text() == both.text()
    assert len(both.text().splitlines()) == 11
    assert both.replaced(other.op, other.shape, None).entries == table(ONE).entries
    newer = Entry("linear.parts", SHAPE, TWO, 2.0, 3.0, "later")
    assert table(ONE).replaced("linear.parts", SHAPE, newer).entries == (newer,)


def changed(**changes):
    return {"device": "a device", "ops": {"linear.parts": [ITEM | changes]}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", r"a_device.json: Expecting property name"),
        ([], r"a_device.json: the file is \[\], it must be an object of device, ops"),
        ({"device": "x"}, r"the file is \['device'\], it must be"),
        ({"device": 1, "ops": {}}, r"device is 1, it must be text"),
        ({"device": "x", "ops": []}, r"ops is \[\], it must be entries by op"),
        (
            {"device": "x", "ops": {"norm": []}},
            r"ops is 'norm', it must be one of attention.decode",
        ),
        ({"device": "x", "ops": {"linear.parts": {}}}, r"ops.linear.parts is \{\}, it must be a"),
        (changed(note=1), r"ops.linear.parts\[0\] is .*'note'.*, it must be an object of choice"),
        (changed(shape={"inputs": 8}), r"ops.linear.parts\[0\].shape is \['inputs'\], it must be"),
        (changed(shape=SHAPE | {"inputs": 1.5}), r"shape.inputs is 1.5, it must be a whole number"),
        (changed(choice="mosaic"), r"choice.form is None, it must be one of mosaic"),
        (changed(choice={"form": "plain"}), r"choice.form is 'plain', it must be one of mosaic"),
        (changed(choice={"form": "mosaic", "splits": 1}), r"choice is \['form', 'splits'\], it"),
        (changed(choice=ITEM["choice"] | {"splits": 0}), r"choice.splits is 0, it must be a whole"),
        (changed(choice=ITEM["choice"] | {"depth": True}), r"choice.depth is True, it must be a"),
        (changed(us="fast"), r"\[0\].us is 'fast', it must be a time above 0"),
        (changed(formula_us=0), r"\[0\].formula_us is 0, it must be a time above 0"),
        (changed(measured=2026), r"\[0\].measured is 2026, it must be text"),
        (
            {"device": "x", "ops": {"linear.parts": [ITEM, ITEM]}},
            r"ops.linear.parts\[1\].shape is .*, it must be there once",
        ),
    ],
)
def test_bad_data_is_refused_by_file_and_field(tmp_path, data, message):
    with pytest.raises(ValueError, match=message) as caught:
        tuning.read(written(tmp_path, data))
    assert "a_device.json" in str(caught.value) and "treadle tune" in str(caught.value)


def test_choice_that_is_no_candidate_is_refused_by_file_and_entry(tmp_path):
    file = written(tmp_path, changed(choice=ITEM["choice"] | {"splits": 3}))
    with (
        TUNING.using(tuning.read(file)),
        pytest.raises(ValueError, match=r"a_device.json: linear.parts .*splits=3, it must be one"),
    ):
        program()


def test_declined_choice_falls_back_on_the_others():
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    weight = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    before = linear.parts.counts["reference"]
    with TUNING.using(table(ONE)):
        out = jax.eval_shape(CASE.call("mosaic"), x, weight)
    assert out.shape == (1, 8, 1024) and linear.parts.counts["reference"] == before + 1
