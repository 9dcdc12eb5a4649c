"""What the reader of jaxprs says about dependence, constants and callbacks in nested programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from engine.execution import jaxprs


def traced(function, num_inputs: int = 2):
    return jax.jit(function).trace(*[jnp.arange(4, dtype=jnp.int32)] * num_inputs).jaxpr


def live(function, outputs=(True,), num_inputs: int = 2) -> list[bool]:
    return jaxprs.live_inputs(traced(function, num_inputs), list(outputs))


# --- dependence ---


def test_only_what_a_live_output_reads_is_live():
    assert live(lambda x, y: x + 1) == [True, False]
    assert live(lambda x, y: (x + 1, y + 1), (True, False)) == [True, False]
    assert live(lambda x, y: (x + 1, y + 1), (False, True)) == [False, True]
    assert live(lambda x, y: (x + y, y), (False, False)) == [False, False]


def test_an_input_that_is_returned_is_live():
    assert live(lambda x, y: (y, x + 1), (True, False)) == [False, True]


def test_a_literal_output_depends_on_nothing():
    assert live(lambda x, y: (1, x), (True, False)) == [False, False]


def test_nested_jits_are_looked_into():
    inner = jax.jit(lambda x, y: (x * 2, y * 2))
    middle = jax.jit(lambda x, y: inner(x, y))
    assert live(lambda x, y: middle(x, y)[0]) == [True, False]
    assert live(lambda x, y: middle(x, y)[1]) == [False, True]


def test_remat_is_looked_into():
    inner = jax.checkpoint(lambda x, y: (x * 2.0, y * 2.0))
    assert live(lambda x, y: inner(x.astype(jnp.float32), y.astype(jnp.float32))[0]) == [
        True,
        False,
    ]


def test_a_cond_reads_what_any_branch_reads_and_its_predicate():
    def function(x, y, z):
        return jax.lax.cond(x[0] > 0, lambda y, z: (y, z), lambda y, z: (y + 1, z + y), y, z)

    assert live(function, (True, False), 3) == [True, True, False]
    assert live(function, (False, True), 3) == [True, True, True]


def test_every_carry_of_a_scan_counts_as_live():
    def function(x, y):
        def body(carry, _):
            x, y = carry
            return (x + 1, y + 1), None

        return jax.lax.scan(body, (x, y), None, length=3)[0]

    assert live(function, (True, False)) == [True, True]
    assert live(function, (False, False)) == [False, False]


def test_an_input_that_a_scan_drops_is_not_live():
    def function(x, y):
        def body(carry, item):
            del item
            return carry + 1, None

        return jax.lax.scan(body, x, y)[0]

    assert live(function) == [True, False]


def test_a_while_loop_counts_as_reading_all_it_is_given():
    def function(x, y):
        return jax.lax.while_loop(lambda c: c[0][0] < 9, lambda c: (c[0] + 1, c[1]), (x, y))

    assert live(function, (True, False)) == [True, True]


def test_outputs_that_a_variable_reaches_are_told_from_the_others():
    jaxpr = traced(lambda x, y: (y + 1, jax.jit(lambda a: a * 2)(x), x, 3))
    first = jaxprs.body(jaxpr).invars[0]
    assert jaxprs.reached_outputs(jaxpr, {first}) == [False, True, True, False]
    assert jaxprs.reached_outputs(jaxpr, set()) == [False] * 4


# --- names ---


def named(name: str):
    def function(x):
        return x + 1

    function.__name__ = name
    return jax.jit(function)


def test_an_equation_is_found_by_name_and_its_readers_too():
    jaxpr = traced(lambda x, y: named("second")(named("first")(x)) + y)
    first = jaxprs.named_equation(jaxpr, "first")
    assert jaxprs.readers(jaxpr, first.outvars[0]) == ["second"]
    second = jaxprs.named_equation(jaxpr, "second")
    assert jaxprs.readers(jaxpr, second.outvars[0]) == ["add"]
    assert jaxprs.readers(jaxpr, jaxprs.body(jaxpr).outvars[0]) == ["output"]


@pytest.mark.parametrize(("count", "function"), [(0, lambda x, y: x), (2, None)])
def test_a_name_that_is_missing_or_doubled_is_refused(count, function):
    function = function or (lambda x, y: named("twin")(x) + named("twin")(y))
    with pytest.raises(LookupError, match=f"has {count} inner functions named 'twin', needs one"):
        jaxprs.named_equation(traced(function), "twin")


# --- constants ---

IDS = np.array([[1, 2, 3, 4]], np.int32)


def in_scan(x, y):
    return jax.lax.scan(lambda carry, _: (carry + IDS[0], None), x, None, length=2)[0]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x + IDS, [(1, 4)]),
        (lambda x, y: x + jnp.asarray(IDS), [(1, 4)]),
        (lambda x, y: jax.jit(lambda x: x + IDS[0])(x), [(4,)]),
        (lambda x, y: jax.jit(lambda x: jax.jit(lambda x: x + IDS[0])(x))(x), [(4,)]),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda x: x + IDS[0], lambda x: x, x), [(4,)]),
        (in_scan, [(4,)]),
        (lambda x, y: x + np.arange(4, dtype=np.uint8).astype(np.int32), [(4,)]),
        # A program may hold floats, and integers of one element.
        (lambda x, y: x * jnp.asarray(np.ones(4, np.float32)), []),
        (lambda x, y: x + np.int32(3), []),
        (lambda x, y: x + np.array([3], np.int32), []),
        (lambda x, y: x + jnp.arange(4, dtype=jnp.int32), []),
    ],
)
def test_integer_arrays_are_found_wherever_they_are_closed_over(function, shapes):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert jaxprs.integer_constants(traced(function)) == shapes


# --- callbacks ---


def pure(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def printing(x):
    jax.debug.print("{}", x)
    return x


def ordered(x):
    io_callback(lambda _: None, None, x, ordered=True)
    return x


def under_scan(x):
    return jax.lax.scan(lambda carry, _: (pure(carry), None), x, None, length=2)[0]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: x + 1, []),
        (pure, ["pure_callback"]),
        (ordered, ["io_callback"]),
        (lambda x: jax.jit(jax.jit(pure))(x), ["pure_callback"]),
        (lambda x: jax.lax.cond(x[0] > 0, pure, lambda x: x, x), ["pure_callback"]),
        (under_scan, ["pure_callback"]),
    ],
)
def test_callbacks_are_found_wherever_they_hide(function, names):
    assert jaxprs.callbacks(traced(function, 1)) == names


def test_a_debug_print_is_a_callback_too():
    assert jaxprs.callbacks(traced(printing, 1)) == ["debug_print"]
