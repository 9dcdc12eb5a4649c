"""Reads and writes of recurrent states: zeros at a start, in place or beside, trash for padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.batch import Batch
from models.cache import CacheGroup, CacheSpec, RecurrentGroup, read_states, write_states

POOL = jnp.arange(1, 13, dtype=jnp.float32).reshape(6, 2)


def batch_of(starts: list[int], q_lens: list[int]) -> Batch:
    """Rows with `starts` cached tokens; a query length of 0 marks padding."""
    cu_q_lens = np.cumsum([0, *q_lens]).astype(np.int32)
    num_tokens = int(cu_q_lens[-1])
    lens = [start + q if q else 0 for start, q in zip(starts, q_lens, strict=True)]
    rows = np.repeat(np.arange(len(q_lens)), q_lens)
    return Batch(
        positions=jnp.zeros((num_tokens,), jnp.int32),
        rows=jnp.asarray(rows, jnp.int32),
        is_real=jnp.ones((num_tokens,), jnp.bool_),
        kv_lens=jnp.asarray(lens, jnp.int32),
        cu_q_lens=jnp.asarray(cu_q_lens),
        num_decode=jnp.asarray(0, jnp.int32),
        page_tables=(),
        is_decode=False,
        max_chunk_rows=len(q_lens),
    )


def ids(*pairs: tuple[int, int]) -> jnp.ndarray:
    return jnp.asarray(pairs, jnp.int32)


def test_a_row_goes_on_from_its_state_and_a_first_chunk_from_zeros():
    batch = batch_of([0, 4, 0, 9], [3, 1, 0, 2])
    found = read_states(POOL, batch, ids((1, 1), (3, 3), (0, 0), (5, 2)))
    assert found.tolist() == [[0, 0], POOL[3].tolist(), [0, 0], POOL[5].tolist()]


def test_equal_ids_update_in_place_and_different_ones_leave_the_first():
    batch = batch_of([4, 9], [1, 2])
    new = jnp.asarray([[20.0, 21.0], [30.0, 31.0]])
    pool, is_bad = write_states(POOL, new, batch, ids((3, 3), (5, 2)))
    expected = np.array(POOL)
    expected[3], expected[2] = new[0], new[1]
    np.testing.assert_array_equal(pool, expected)
    assert is_bad.tolist() == [False] * 3


def test_padding_rows_write_the_trash_state():
    batch = batch_of([4, 0, 0], [1, 0, 0])
    new = jnp.full((3, 2), 50.0)
    pool, _ = write_states(POOL, new, batch, ids((3, 3), (0, 0), (0, 0)))
    changed = np.flatnonzero((np.array(pool) != np.array(POOL)).any(axis=1))
    assert changed.tolist() == [0, 3]


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_value_that_is_not_finite_is_stored_as_zero_and_flags_its_row_alone(bad):
    batch = batch_of([4, 9], [1, 2])
    new = jnp.asarray([[20.0, 21.0], [30.0, bad]])
    pool, is_bad = write_states(POOL, new, batch, ids((3, 3), (2, 2)))
    assert pool[2].tolist() == [30.0, 0.0] and pool[3].tolist() == [20.0, 21.0]
    assert is_bad.tolist() == [False, True, True]


def test_states_of_more_dimensions_keep_their_dtype():
    pool = jnp.ones((4, 2, 3), jnp.bfloat16)
    batch = batch_of([0, 2], [1, 1])
    before = read_states(pool, batch, ids((1, 1), (2, 2)))
    assert before.shape == (2, 2, 3) and before[0].sum() == 0 and before[1].sum() == 6
    after, _ = write_states(pool, jnp.full((2, 2, 3), 5.0), batch, ids((1, 1), (2, 3)))
    assert after.dtype == jnp.bfloat16
    assert after[:, 0, 0].tolist() == [1, 5, 1, 5]


def test_spec_tells_pages_and_states_apart():
    pages = CacheGroup("kv", (0, 2), num_kv_heads=2, head_dim=4, page_size=8, dtype="float32")
    odd = CacheGroup("window", (3,), 2, 4, page_size=12, dtype="float32", window=5)
    states = RecurrentGroup((1, 4), (3, 5), "bfloat16")
    spec = CacheSpec((states, pages, odd))
    assert spec.paged == (pages, odd) and spec.recurrent == (states,)
    assert spec.page_bytes == pages.page_bytes + odd.page_bytes
    assert [[x.shape for x in group] for group in spec.pool_shapes(7)] == [
        [(7, 2, 2, 8, 4)] * 2,
        [(7, 2, 2, 12, 4)],
    ]
    assert [[(x.shape, x.dtype) for x in group] for group in spec.state_shapes(9)] == [
        [((9, 3, 5), jnp.bfloat16)] * 2
    ]
    assert states.state_bytes == 2 * 3 * 5 * 2
    assert spec.snapshot_tokens(states) == 24, "a border of every paged group"
