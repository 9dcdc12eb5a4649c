"""Residual and norm: the kernel's values, interpreted, what it takes and declines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.norm import api, reference, rows
from models import layers
from tests.kernels import interpretation, norm_cases
from tests.kernels.norm_cases import ASSEMBLED, EPS, VALUES, Case

NAMES = ("hidden", "normed")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_norm", tmp_path_factory.mktemp("interpreted"))


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernel_gives_the_values_of_the_reference(interpreted, case):
    hidden, normed = norm_cases.expected(case, norm_cases.inputs(case))
    np.testing.assert_array_equal(interpreted[f"{case} hidden"], hidden)
    apart = interpretation.steps_between(interpreted[f"{case} normed"], normed)
    # The squares add up in another order: a value next to a rounding edge falls on its other side,
    # and its product with the scale is then two steps away at most.
    assert apart.max() <= 2
    assert np.mean(apart > 0) < 1e-2


def test_every_call_ran_the_kernel(interpreted):
    assert interpreted["mosaic calls"] == interpreted["calls"] == len(VALUES) + 2


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_not_finite_change_no_bit_of_others(interpreted, name):
    clean, poisoned = (interpreted[f"{run} {name}"] for run in ("clean", "poisoned"))
    np.testing.assert_array_equal(poisoned[[0, 2]], clean[[0, 2]])
    assert not np.isfinite(poisoned[[1, 3]]).all(axis=1).any()


def test_reference_is_what_the_layers_do():
    case = Case(3, hidden_size=64, scale_at=16)
    residual, parts, vectors = norm_cases.inputs(case)
    hidden, normed = jax.jit(case.call("plain"))(residual, parts, vectors)

    @jax.jit
    def unfused(residual, update, scale):
        total = residual + update
        return total, layers.rms_norm(total, scale, EPS)

    expected = unfused(residual, parts[0], vectors[16 : 16 + 64])
    np.testing.assert_array_equal(hidden, expected[0])
    np.testing.assert_array_equal(normed, expected[1])


def test_parts_add_up_first_to_last_and_are_rounded_once():
    residual = jnp.zeros((1, 128), jnp.bfloat16)
    parts = jnp.full((3, 1, 128), 2.0**-9, jnp.float32).at[0].set(1.0)
    scale = jnp.ones((128,), jnp.bfloat16)
    hidden, _ = reference.add_norm(residual, parts, scale, scale_at=0, eps=EPS)
    # Rounded in between, each small part would vanish; together they are half a step, to even.
    np.testing.assert_array_equal(np.asarray(hidden, np.float32), 1.0)
    more = parts.at[2].set(2.0**-8)
    hidden, _ = reference.add_norm(residual, more, scale, scale_at=0, eps=EPS)
    np.testing.assert_array_equal(np.asarray(hidden, np.float32), 1 + 2.0**-7)


# --- what it takes ---


@pytest.mark.parametrize("case", ASSEMBLED, ids=str)
def test_covered_sizes_lower_for_the_device(case):
    call = functools.partial(rows.add_norm, **case.static, kernels="mosaic")
    lowered = jax.jit(call).trace(*case.structs).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu_v2" in lowered.as_text()


BASE = Case(4)


@pytest.mark.parametrize(
    ("case", "kernels", "reason"),
    [
        (BASE, "plain", "kernels are 'plain', not 'mosaic'"),
        (dataclasses.replace(BASE, hidden_size=320), "mosaic", "hidden_size is 320, not a mult"),
        (dataclasses.replace(BASE, hidden_size=8320), "mosaic", "hidden_size is 8320, not a"),
        (dataclasses.replace(BASE, scale_at=12), "mosaic", "starts at 12, not a multiple of 8"),
        (dataclasses.replace(BASE, num_parts=2), "mosaic", "2 parts are bfloat16, only one"),
        (
            dataclasses.replace(BASE, num_parts=17, dtype="float32"),
            "mosaic",
            "17 parts, at most 16 may be",
        ),
        (
            dataclasses.replace(BASE, num_parts=5, hidden_size=8192, dtype="float32"),
            "mosaic",
            "5 parts, at most 4 may be",
        ),
        (dataclasses.replace(BASE, dtype="float16"), "mosaic", "parts are float16, not bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_covered_is_declined(case, kernels, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(
            functools.partial(rows.add_norm, **case.static, kernels=kernels), *case.structs
        )


@pytest.mark.parametrize("place", [0, 2])
def test_other_dtypes_are_declined(place):
    structs = list(BASE.structs)
    structs[place] = jax.ShapeDtypeStruct(structs[place].shape, jnp.float32)
    call = functools.partial(rows.add_norm, **BASE.static, kernels="mosaic")
    with pytest.raises(NotImplementedError, match=r"float32.*not bfloat16"):
        jax.eval_shape(call, *structs)


def test_declined_call_runs_the_reference():
    before = api.add_norm.counts["reference"]
    odd = dataclasses.replace(BASE, hidden_size=320)
    jax.eval_shape(odd.call("mosaic"), *odd.structs)
    assert api.add_norm.counts["reference"] == before + 1
    assert "hidden_size is 320" in api.add_norm.declined["mosaic"]
