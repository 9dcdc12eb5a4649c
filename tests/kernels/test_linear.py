"""Products of few tokens: the kernel's values, interpreted, what it takes and declines."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear import api, few_tokens, one_token, reference, split
from kernels.tuning import FORMULA
from tests.kernels import interpretation, linear_cases
from tests.kernels.linear_cases import (
    ASSEMBLED,
    GUARDED,
    NORMED,
    NORMED_ASSEMBLED,
    NORMED_NAMES,
    REGISTERS,
    VALUES,
    Case,
    Normed,
)

FORMS = ("product", "parts", "gated")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_linear", tmp_path_factory.mktemp("interpreted"))


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernel_gives_the_values_of_a_float64_product(interpreted, case):
    found = interpreted[str(case)]
    if case.form == "parts":
        assert found.dtype == np.float32 and found.ndim == 3
        found = found.sum(0)
    expected = linear_cases.exact(case, linear_cases.inputs(case))
    assert found.shape == expected.shape
    # Parts are rounded by nobody yet; a product once, a gated one four times.
    tolerance = {"parts": 1e-5, "product": 2.0**-8, "gated": 2.0**-6}[case.form]
    size = np.sqrt(np.mean(expected**2))
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * size)


def test_narrow_products_are_split_so_that_the_device_is_busy(interpreted):
    splits = {case.inputs: interpreted[str(case)].shape[0] for case in VALUES[4:6]}
    assert splits == {1024: 2, 2048: 4}


def test_every_call_ran_the_kernel(interpreted):
    forms = [case.form for case in (*VALUES, *GUARDED, *GUARDED)]
    expected = [forms.count(form) for form in FORMS]
    assert interpreted["calls"].tolist() == interpreted["mosaic calls"].tolist() == expected
    assert interpreted["normed"].tolist() == [len(NORMED), len(NORMED), 0]


@pytest.mark.parametrize("case", GUARDED, ids=str)
def test_tokens_that_are_not_finite_change_no_bit_of_others(interpreted, case):
    clean, poisoned = (interpreted[f"{case} {run}"] for run in ("clean", "poisoned"))
    if case.form == "parts":
        clean, poisoned = clean.sum(0), poisoned.sum(0)
    kept = [0, 2, *range(4, 8)]
    np.testing.assert_array_equal(poisoned[kept], clean[kept])
    assert np.isfinite(clean).all()
    assert not np.isfinite(poisoned[[1, 3]]).all(axis=1).any()


@pytest.mark.parametrize("case", NORMED, ids=str)
@pytest.mark.parametrize("name", NORMED_NAMES)
def test_norm_and_product_in_one_kernel_give_the_bits_of_two(interpreted, case, name):
    ways = ("together", "registers", "apart")
    together, registers, apart = (interpreted[f"{case} {name} {way}"] for way in ways)
    np.testing.assert_array_equal(together, apart)
    np.testing.assert_array_equal(together, registers)
    assert np.isfinite(together).all() and together.any()


def test_reference_of_several_outputs_is_the_product_of_each():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 16)), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((16, 2, 8)), jnp.float32)
    found = reference.product(x, weight)
    # A CPU sums in another order for another number of outputs.
    one = reference.product(x, weight[:, 1])
    np.testing.assert_allclose(found[:, 1], one, rtol=1e-5, atol=1e-6)
    gated = reference.gated(x, weight)
    np.testing.assert_array_equal(gated, jax.nn.silu(found[:, 0]) * found[:, 1])
    (only,) = reference.parts(x, weight[:, 0])
    np.testing.assert_array_equal(only, reference.product(x, weight[:, 0]))


# --- weights that are prefetched ---


@pytest.mark.parametrize(
    ("inputs", "outputs", "megabytes", "steps"),
    [(4096, 4096, 8, 4), (4096, 4096, 24, 12), (4096, 2048, 24, 8), (1664, 64, 9, 4)],
)
def test_first_steps_of_every_block_are_prefetched_first(inputs, outputs, megabytes, steps):
    token, weight = Case("parts", 1, inputs, outputs).structs
    plan, _ = few_tokens.planned("parts", token, weight, "mosaic")
    count = plan.copies_of(megabytes)
    assert count * plan.depth * few_tokens.WIDTH * 2 <= megabytes * 2**20
    first_inputs, columns = map(np.asarray, few_tokens.copied(jnp.arange(count), plan))
    num_blocks = outputs // few_tokens.WIDTH * plan.splits
    found = first_inputs.reshape(steps, num_blocks) // plan.depth
    starts = [split * plan.num_steps // plan.splits for split in range(plan.splits)]
    own = np.repeat(starts, num_blocks // plan.splits)
    np.testing.assert_array_equal(found, own + np.arange(steps)[:, None])
    panels = np.arange(0, outputs, few_tokens.WIDTH)
    np.testing.assert_array_equal(columns, np.tile(panels, steps * plan.splits))


# --- parts of more tokens ---


def test_parts_of_a_larger_decode_step_are_xlas_and_as_many_as_of_fewer_tokens():
    case = Case("parts", 200, inputs=1024, outputs=192)
    arrays = linear_cases.inputs(case)
    before = api.parts.counts["split"]
    found = np.asarray(case.call("mosaic")(*arrays))
    assert api.parts.counts["split"] == before + 1
    fewer = jax.eval_shape(case.call("mosaic"), arrays[0][:64], arrays[1])
    assert found.shape == (2, 200, 192) == (*fewer.shape[:1], 200, 192)
    assert found.dtype == np.float32
    halves = [np.asarray(x, np.float64) for x in (arrays[0], arrays[1])]
    for part, inputs in zip(found, (slice(512), slice(512, None)), strict=True):
        expected = halves[0][:, inputs] @ halves[1][inputs]
        np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "kernels", "reason"),
    [
        (Case("parts", 128, 1024, 192), "plain", "kernels are 'plain', not 'mosaic'"),
        (Case("parts", 264, 1024, 192), "mosaic", "264 tokens, at most 256 may be"),
        (Case("parts", 128, 512, 192), "mosaic", "512 inputs in 1 splits"),
        (Case("parts", 128, 4096, 16384), "mosaic", "4096 inputs in 1 splits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_product_that_gains_nothing_by_parts_is_made_whole(case, kernels, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(split.parts, kernels=kernels), *case.structs)
    whole = jax.eval_shape(case.call(kernels), *case.structs)
    assert (whole.shape, whole.dtype) == ((1, case.num_tokens, case.outputs), jnp.bfloat16)


def test_one_row_is_multiplied_as_eight():
    """XLA made two bad kernels of one row on an H200."""
    struct = jax.ShapeDtypeStruct((1, 2048), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16)
    text = str(jax.make_jaxpr(reference.product)(struct, weight))
    assert "bf16[8,512]" in text


# --- what it takes ---


@pytest.mark.parametrize("case", ASSEMBLED, ids=str)
def test_covered_sizes_lower_for_the_device(case):
    call = functools.partial(getattr(few_tokens, case.form), kernels="mosaic")
    lowered = jax.jit(call).trace(*case.structs).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu_v2" in lowered.as_text()


BASE = Case("product", 8)


@pytest.mark.parametrize(
    ("case", "kernels", "reason"),
    [
        (BASE, "plain", "kernels are 'plain', not 'mosaic'"),
        (dataclasses.replace(BASE, num_tokens=72), "mosaic", "72 tokens, at most 64 may be"),
        (dataclasses.replace(BASE, num_tokens=12), "mosaic", "12 tokens are no whole rows of 8"),
        (dataclasses.replace(BASE, inputs=192), "mosaic", "weight is 192 x 4096, not multiples"),
        (dataclasses.replace(BASE, outputs=4128), "mosaic", "256 x 4128, not multiples of 128"),
        (dataclasses.replace(BASE, outputs=2048), "mosaic", "2048 outputs are too few"),
        (Case("gated", 8, outputs=96), "mosaic", "weight is 256 x 192, not multiples of 128 and"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_covered_is_declined_and_runs_the_reference(case, kernels, reason):
    call = functools.partial(getattr(few_tokens, case.form), kernels=kernels)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(call, *case.structs)
    op = getattr(api, case.form)
    before = op.counts["reference"]
    jax.eval_shape(case.call(kernels), *case.structs)
    assert op.counts["reference"] == before + 1
    assert op.declined["mosaic"]


@pytest.mark.parametrize("case", NORMED_ASSEMBLED, ids=str)
def test_covered_norms_with_their_products_lower_for_the_device(case):
    lowered = jax.jit(case.call("mosaic")).trace(*case.structs)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    hidden, normed, product = jax.eval_shape(case.call("mosaic"), *case.structs)
    assert hidden.shape == normed.shape == (1, case.inputs)
    expected = jax.eval_shape(case.product.call("mosaic"), *case.product.structs)
    assert (product.shape, product.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_products_of_registers_are_waited_for_before_these_are_written_anew(form):
    """With one still under way the values were wrong on an H200, though seldom."""
    case = Normed(form)

    def waits(choice):
        call = dataclasses.replace(case, choice=choice).call("mosaic")
        return set(re.findall(r"wgmma_wait\[n=(\d)", str(jax.make_jaxpr(call)(*case.structs))))

    assert waits(FORMULA) == {"0", "1"}
    assert [waits(choice) for choice in REGISTERS] == [{"0"}] * 2


@pytest.mark.parametrize(
    ("case", "kernels", "reason"),
    [
        (Normed("parts"), "plain", "kernels are 'plain', not 'mosaic'"),
        (Normed("parts", num_tokens=2), "mosaic", "2 tokens, not one"),
        (Normed("parts", num_parts=17), "mosaic", "17 parts, at most 16 may be"),
        (Normed("product", outputs=2048), "mosaic", "2048 outputs are too few"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_norm_that_is_not_covered_is_made_apart(case, kernels, reason):
    settings = dict(form=case.form, **case.norm.static, kernels=kernels)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(one_token.normed, **settings), *case.structs)
    before = api.normed.counts["apart"]
    jax.eval_shape(case.call(kernels), *case.structs)
    assert api.normed.counts["apart"] == before + 1


@pytest.mark.parametrize("place", [0, 1])
def test_other_dtypes_are_declined(place):
    structs = list(BASE.structs)
    structs[place] = jax.ShapeDtypeStruct(structs[place].shape, jnp.float32)
    call = functools.partial(few_tokens.product, kernels="mosaic")
    with pytest.raises(NotImplementedError, match=r"float32.*not bfloat16"):
        jax.eval_shape(call, *structs)


def test_parts_of_several_outputs_are_declined():
    weight = jax.ShapeDtypeStruct((256, 2, 64), jnp.bfloat16)
    call = functools.partial(few_tokens.parts, kernels="mosaic")
    with pytest.raises(NotImplementedError, match="a weight of 3 dimensions, not 2"):
        jax.eval_shape(call, BASE.structs[0], weight)
