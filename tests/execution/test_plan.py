"""Where the bytes go, what fits in the rest, and what the plan refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.execution import plan as planning
from engine.execution.plan import GIB, PROBE_SLACK, MemoryPlan

PLAN = MemoryPlan(
    limit=8 * GIB,
    weights=3 * GIB,
    small_state=GIB // 2,
    temporaries=GIB,
    outputs=GIB // 4,
    page_bytes=2**20,
    num_pages=100,
)
REST = 8 * GIB - 3 * GIB - GIB // 2 - GIB - GIB // 4 - PROBE_SLACK


def test_total_counts_every_part():
    assert PLAN.pools == 100 * 2**20
    assert PLAN.total == 3 * GIB + GIB // 2 + GIB + GIB // 4 + 100 * 2**20


def test_pages_fill_the_rest_to_the_last_whole_one():
    assert planning.num_pages_that_fit(PLAN, least=2, most=10**9) == REST // 2**20
    odd = dataclasses.replace(PLAN, page_bytes=2**20 + 1)
    pages = planning.num_pages_that_fit(odd, least=2, most=10**9)
    assert pages == REST // (2**20 + 1)
    full = dataclasses.replace(odd, num_pages=pages)
    assert full.total + PROBE_SLACK <= full.limit < full.total + PROBE_SLACK + full.page_bytes


def test_pages_stop_at_what_the_slots_can_use():
    assert planning.num_pages_that_fit(PLAN, least=2, most=7) == 7


def test_exactly_the_least_fits():
    least = REST // 2**20
    assert planning.num_pages_that_fit(PLAN, least=least, most=10**9) == least


def test_one_page_too_few_is_refused_with_the_numbers():
    least = REST // 2**20 + 1
    with pytest.raises(ValueError, match="does not fit") as refusal:
        planning.num_pages_that_fit(PLAN, least=least, most=10**9)
    message = str(refusal.value)
    assert f"{least - 1} pages of 1.00 MiB fit" in message
    assert f"one request of max_model_len needs {least}" in message
    assert "lower max_model_len or max_rows, or raise memory_fraction" in message
    assert "weights" in message and "3.000 GiB" in message


def test_weights_beyond_the_limit_leave_no_negative_pages():
    heavy = dataclasses.replace(PLAN, weights=9 * GIB)
    with pytest.raises(ValueError, match="does not fit: 0 pages"):
        planning.num_pages_that_fit(heavy, least=2, most=10)


def test_printed_plan_lists_every_part_in_gib():
    lines = str(PLAN).split("\n")
    assert [line.split("  ")[1].strip() for line in lines] == [
        "weights",
        "state without pages",
        "temporaries",
        "outputs in flight",
        "100 pages",
        "total",
        "limit",
    ]
    assert lines[0].endswith("3.000 GiB") and lines[-1].endswith("8.000 GiB")
    assert lines[-2].endswith(f"{PLAN.total / GIB:.3f} GiB")


def test_temporaries_that_grow_with_the_pool_are_a_hidden_copy():
    planning.check_hidden_copy(2**20, 2**20 + PROBE_SLACK)
    with pytest.raises(RuntimeError, match=r"grew from 1.0 to 257.0 MiB.*copies a pool"):
        planning.check_hidden_copy(2**20, 2**20 + PROBE_SLACK + 1)


class Program:
    """What is asked of a compiled program."""

    def __init__(self, temporaries: int | None, code: int = 0) -> None:
        self.temp_size_in_bytes, self.generated_code_size_in_bytes = temporaries, code

    def memory_analysis(self):
        return None if self.temp_size_in_bytes is None else self


def test_temporaries_are_those_of_the_program_that_needs_most():
    programs = [Program(100, 10), Program(90, 30), Program(None), Program(5)]
    assert planning.temporaries_of(programs) == 120
    assert planning.temporaries_of([Program(None)]) == planning.temporaries_of([]) == 0


def test_temporaries_of_a_compiled_program_are_counted():
    def gram(x):
        return jnp.sort(x @ x.T) @ x

    compiled = jax.jit(gram).lower(jnp.ones((64, 32), jnp.float32)).compile()
    assert planning.temporaries_of([compiled]) >= 64 * 64 * 4


def test_bytes_of_a_tree_follow_shapes_and_dtypes():
    tree = {
        "a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
        "b": (np.zeros((2,), np.int32), jnp.zeros((4,), jnp.bool_)),
    }
    assert planning.tree_bytes(tree) == 30 + 8 + 4
