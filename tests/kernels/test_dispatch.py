"""An op's implementations: which one runs, what is counted, how often one is traced."""

import jax
import jax.numpy as jnp
import pytest

from kernels.dispatch import Dispatch
from kernels.norm import api
from kernels.tuning import Choice
from tests.kernels import norm_cases


def scaled(x, *, by):
    return x * by


def declining(x, *, by):
    raise NotImplementedError(f"by is {by}")


def test_first_one_that_takes_the_call_runs_and_reasons_are_kept():
    op = Dispatch("op", [("never", declining), ("kernel", scaled), ("reference", declining)])
    assert op(jnp.float32(3), by=2) == 6
    assert op.counts == {"kernel": 1} and op.declined == {"never": "by is 2"}


def test_call_that_nothing_takes_says_why():
    op = Dispatch("op", [("kernel", declining), ("reference", declining)])
    with pytest.raises(NotImplementedError, match=r"no implementation of op takes.*by is 4"):
        op(jnp.float32(3), by=4)


def test_chosen_form_is_asked_first_with_its_settings_and_the_others_without():
    asked = []

    def kernel(name, takes):
        def run(x, *, by, depth=1):
            asked.append((name, depth))
            if not takes:
                raise NotImplementedError(name)
            return x * by * depth

        return name, run

    op = Dispatch("op", [kernel("first", False), kernel("second", True), ("reference", scaled)])
    assert op(jnp.float32(3), by=2) == 6
    assert op(jnp.float32(3), by=2, choice=Choice.of("second", depth=5)) == 30
    assert op(jnp.float32(3), by=2, choice=Choice.of("first", depth=7)) == 6
    assert asked == [("first", 1), ("second", 1), ("second", 5), ("first", 7)]
    assert op.counts == {"second": 3}


def test_reference_runs_as_it_is_and_a_kernel_is_traced_once_for_equal_calls():
    traced = []

    def kernel(x, *, by):
        traced.append(by)
        return x * by

    def reference(x, *, by):
        traced.append(-by)
        return x * by

    op = Dispatch("op", [("kernel", kernel), ("reference", reference)])
    for by in (2, 2, 5):
        op(jnp.float32(3), by=by)
    assert traced == [2, 5] and op.counts == {"kernel": 3}
    alone = Dispatch("op", [("reference", reference)])
    for _ in range(2):
        alone(jnp.float32(3), by=7)
    assert traced == [2, 5, -7, -7]


def test_layers_of_one_program_lower_a_kernel_once():
    case = norm_cases.Case(8)

    @jax.jit
    def layers(residual, parts, vectors):
        for _ in range(3):
            residual, normed = case.call("mosaic")(residual, parts, vectors)
            parts = normed[None]
        return residual, parts

    before = api.add_norm.counts["mosaic"]
    text = layers.trace(*case.structs).lower(lowering_platforms=("cuda",)).as_text()
    assert api.add_norm.counts["mosaic"] == before + 3
    assert text.count("mosaic_gpu_v2") == 1
