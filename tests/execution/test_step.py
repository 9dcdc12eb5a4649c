"""Where a step's ids come from, where its tokens stand, what it attends to and what it keeps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.execution import step as steps
from engine.execution.packing import InstallShape, pack, pack_install, unpack
from engine.execution.page_tables import DeviceTables
from engine.execution.step import StateShape
from engine.scheduling.schedule import Install
from kernels.attention import reference
from models import attention
from models.batch import Tiling
from models.cache import Cache, write_kv
from tests.execution import toys
from tests.execution.toys import CHUNK, DECODE, LAST_CHUNK, LATE, POISON, schedule_of

MAX_SLOTS = 5
VOCAB = 11
LENGTH = 16
TILING = Tiling()
SHAPE = StateShape(
    max_slots=MAX_SLOTS,
    max_model_len=LENGTH,
    vocab_size=VOCAB,
    table_width=4,
    pools=((jax.ShapeDtypeStruct((4, 1, 2, 4, 8), jnp.float32),),),
)


def arranged(rows, key):
    """(ids, packed, batch) of a step as its program sees them."""
    schedule = schedule_of(rows)
    (entries,) = DeviceTables(MAX_SLOTS, 4, 1).changes(schedule, 99).within
    flat = pack(schedule, key, max_slots=MAX_SLOTS, page_changes=(entries[:, :0],))
    ids, packed = unpack(key, 1, jnp.asarray(flat))
    tables = steps.set_pages(SHAPE.fresh().page_tables, (jnp.asarray(entries),))
    num_tokens = np.full(MAX_SLOTS + 1, 99, np.int32)  # the padding slot's too: never used
    for slot, _, _, length in rows:
        num_tokens[slot] = length
    return ids, packed, steps.lay_out(key, TILING, packed, jnp.asarray(num_tokens), tables)


def test_rows_see_the_pages_of_their_slots_and_padding_rows_the_trash():
    key = toys.decode_key(rows=4, width=2)
    _, _, batch = arranged([(3, LATE, [0], 5), (1, DECODE, [10], 2)], key)
    (table,) = batch.page_tables
    assert table.tolist() == [[10, 11], [4, 5], [0, 0], [0, 0]]


def resolved(rows, key, last_tokens):
    ids, packed, batch = arranged(rows, key)
    last = jnp.asarray(np.array([*last_tokens, 0], np.int32))
    return jax.device_get(
        jax.jit(functools.partial(steps.resolve_ids, VOCAB))(ids, last, packed, batch)
    )


# --- resolve_ids ---


def test_late_row_takes_its_id_from_the_device_and_others_from_the_host():
    rows = [(3, LATE, [POISON], 5), (1, DECODE, [10], 2)]
    found = resolved(rows, toys.decode_key(rows=4, width=3), [2, 3, 4, 9, 6])
    # Padding rows read the padding slot only if they were late rows; they are not.
    assert found.token_ids.tolist() == [9, 10, 0, 0]
    assert found.is_bad_row.tolist() == [False] * 4
    assert found.counts.tolist() == [1, 1]


def test_slot_and_not_row_names_the_newest_id():
    rows = [(4, LATE, [POISON], 5), (0, LATE, [POISON], 5), (2, LATE, [POISON], 5)]
    found = resolved(rows, toys.decode_key(rows=4, width=3), [5, 6, 7, 8, 9])
    assert found.token_ids.tolist() == [9, 5, 7, 0]
    assert found.counts.tolist() == [3, 0]


def test_mixed_step_of_three_rows_resolves_each_from_its_own_source():
    rows = [(3, LATE, [POISON], 5), (1, DECODE, [10], 2), (0, LAST_CHUNK, [4, 5, 6], 0)]
    found = resolved(rows, toys.mixed_key(), [8, 8, 8, 7, 8])
    assert found.token_ids.tolist() == [7, 10, 4, 5, 6, 0, 0, 0]
    assert found.is_bad_row.tolist() == [False] * 4
    assert found.counts.tolist() == [1, 2]


def test_only_the_first_id_of_a_longer_row_comes_from_the_device():
    rows = [(3, LATE, [POISON, 1, 2], 5), (1, DECODE, [3, 4, 5], 2)]
    found = resolved(rows, toys.decode_key(rows=4, query_len=3, width=3), [8, 8, 8, 7, 8])
    assert found.token_ids.tolist() == [7, 1, 2, 3, 4, 5, *[0] * 6]
    assert found.counts.tolist() == [1, 1]


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_id_outside_the_vocabulary_is_embedded_as_zero_and_flags_its_row_alone(bad):
    rows = [(3, LATE, [POISON], 5), (1, DECODE, [10], 2), (0, LAST_CHUNK, [4, 5], 0)]
    found = resolved(rows, toys.mixed_key(), [8, 8, 8, bad, 8])
    assert found.token_ids.tolist() == [0, 10, 4, 5, 0, 0, 0, 0]
    assert found.is_bad_row.tolist() == [True, False, False, False]
    assert found.counts.tolist() == [1, 2]


def test_last_id_of_the_vocabulary_is_not_bad():
    found = resolved([(3, LATE, [0], 5)], toys.decode_key(width=3), [8, 8, 8, VOCAB - 1, 8])
    assert found.token_ids.tolist() == [VOCAB - 1, 0]
    assert not found.is_bad_row.any()


def test_padding_row_is_never_flagged_whatever_the_last_slot_holds():
    # A negative index would read the last entry and an index past the end would clip to it.
    ids, packed, batch = arranged([(0, LATE, [0], 5)], toys.decode_key(width=3))
    last = jnp.asarray(np.array([4, -1, -1, -1, -1, -1], np.int32))
    found = steps.resolve_ids(VOCAB, ids, last, packed, batch)
    assert found.token_ids.tolist() == [4, 0]
    assert found.is_bad_row.tolist() == [False, False]


# --- lay_out ---


def test_tokens_stand_after_what_their_slot_has():
    rows = [
        (3, LATE, [0], 5),
        (1, DECODE, [10], 2),
        (0, CHUNK, [4, 5, 6], 0),
        (4, CHUNK, [1, 2], 7),
    ]
    _, _, batch = arranged(rows, toys.mixed_key())
    assert batch.positions.tolist() == [5, 2, 0, 1, 2, 7, 8, 0]
    assert batch.rows.tolist() == [0, 1, 2, 2, 2, 3, 3, 0]
    assert batch.is_real.tolist() == [True] * 7 + [False]
    assert batch.kv_lens.tolist() == [6, 3, 3, 9]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 5, 7]
    assert int(batch.num_decode) == 2
    assert (batch.is_decode, batch.max_chunk_rows, batch.query_len) == (False, 2, 1)


def test_padding_has_position_zero_and_no_keys():
    _, _, batch = arranged([(3, CHUNK, [4, 5], 6)], toys.mixed_key())
    assert batch.positions.tolist() == [6, 7, *[0] * 6]
    assert batch.rows.tolist() == [0] * 8
    assert batch.is_real.tolist() == [True, True, *[False] * 6]
    assert batch.kv_lens.tolist() == [8, 0, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 2, 2, 2, 2]


def test_decode_rows_of_several_tokens_stand_side_by_side():
    rows = [(3, LATE, [0, 1], 5), (1, DECODE, [2, 3], 2)]
    _, _, batch = arranged(rows, toys.decode_key(rows=3, query_len=2, width=3))
    assert batch.positions.tolist() == [5, 6, 2, 3, 0, 0]
    assert batch.rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.is_real.tolist() == [True] * 4 + [False] * 2
    assert batch.kv_lens.tolist() == [7, 4, 0]
    assert (batch.is_decode, batch.query_len) == (True, 2)


# --- accept ---


def accepted(rows, key, sampled, drafts=True):
    ids, packed, batch = arranged(rows, key)
    samples = jnp.asarray(np.array(sampled, np.int32))
    return jax.device_get(steps.accept(key, samples, ids if drafts else None, packed, batch))


def test_one_sample_of_every_sampling_row_is_accepted():
    rows = [(3, LATE, [0], 5), (1, CHUNK, [10, 9], 2), (0, LAST_CHUNK, [4, 5], 0)]
    found = accepted(rows, toys.mixed_key(), [7, 8, 9, 10], drafts=False)
    assert found.ids.tolist() == [[7], [0], [9], [0]]
    assert found.num_new.tolist() == [1, 0, 1, 0]
    assert found.kv_lens.tolist() == [6, 4, 2, 0]


def test_drafts_count_up_to_the_first_that_was_not_sampled():
    key = toys.decode_key(rows=5, query_len=3, width=3)
    rows = [
        (0, LATE, [0, 4, 5], 7),  # both confirmed
        (1, LATE, [0, 4, 5], 7),  # the first confirmed
        (2, LATE, [0, 4, 5], 7),  # none, though the second would have been
        (3, LATE & ~LAST_CHUNK, [0, 4, 5], 7),  # does not sample
    ]
    sampled = [4, 5, 6, 4, 8, 9, 3, 5, 6, 4, 5, 6, 1, 1, 1]
    found = accepted(rows, key, sampled)
    assert found.num_new.tolist() == [3, 2, 1, 0, 0]
    assert found.ids.tolist() == [[4, 5, 6], [4, 8, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    # Keys of a draft that was not confirmed do not count.
    assert found.kv_lens.tolist() == [10, 9, 8, 10, 0]


# --- advance ---


def state_with(**fields):
    state = SHAPE.fresh()
    return dataclasses.replace(state, **{name: jnp.asarray(x) for name, x in fields.items()})


def advanced(rows, key, sampled, state=None, drafts=False):
    ids, packed, batch = arranged(rows, key)
    found = steps.accept(
        key, jnp.asarray(np.array(sampled, np.int32)), ids if drafts else None, packed, batch
    )
    state = state or SHAPE.fresh()
    cache = Cache(pools=state.pools, is_nonfinite=jnp.zeros((key.tokens,), jnp.bool_))
    advance = jax.jit(steps.advance)
    return jax.device_get(advance(state, cache, packed, found, jnp.array([2, 3], jnp.int32)))


def test_sampled_ids_land_in_their_slots_and_nowhere_else():
    rows = [(3, LATE, [0], 5), (1, CHUNK, [10, 9], 2), (0, LAST_CHUNK, [4, 5], 0)]
    after = advanced(rows, toys.mixed_key(), [7, 8, 9, 10])
    assert after.last_tokens.tolist() == [9, -1, -1, 7, -1, 0]
    assert after.num_tokens.tolist() == [2, 4, 0, 6, 0, 0]
    history = np.zeros((MAX_SLOTS + 1, LENGTH), np.int32)
    history[3, 6], history[0, 2] = 7, 9
    np.testing.assert_array_equal(after.history, history)
    assert after.counters.tolist() == [2, 3]


def test_chunk_that_is_not_the_last_leaves_its_newest_id_unknown():
    after = advanced([(2, CHUNK, [4, 5], 0)], toys.mixed_key(), [9] * 4)
    assert after.last_tokens.tolist() == [-1] * 5 + [0]
    assert after.num_tokens.tolist() == [0, 0, 2, 0, 0, 0]
    assert not after.history.any()


def test_padding_rows_write_nothing_and_no_index_wraps():
    state = state_with(
        last_tokens=np.arange(20, 26, dtype=np.int32),
        num_tokens=np.arange(30, 36, dtype=np.int32),
        history=np.full((MAX_SLOTS + 1, LENGTH), 77, np.int32),
    )
    after = advanced([(0, LATE, [0], 5)], toys.decode_key(rows=4, width=3), [1, 2, 3, 4], state)
    assert after.last_tokens.tolist() == [1, 21, 22, 23, 24, 25]
    assert after.num_tokens.tolist() == [6, 31, 32, 33, 34, 35]
    changed = np.argwhere(after.history != 77)
    assert changed.tolist() == [[0, 6]]


def test_history_keeps_every_accepted_id_and_the_newest_is_last():
    key = toys.decode_key(rows=3, query_len=3, width=3)
    rows = [(1, LATE, [0, 4, 5], 7), (4, LATE, [0, 4, 5], 2)]
    after = advanced(rows, key, [4, 8, 9, 4, 5, 6, 1, 1, 1], drafts=True)
    assert after.last_tokens.tolist() == [-1, 8, -1, -1, 6, 0]
    assert after.num_tokens.tolist() == [0, 9, 0, 0, 5, 0]
    assert after.history[1, 8:10].tolist() == [4, 8]
    assert after.history[4, 3:6].tolist() == [4, 5, 6]
    assert np.count_nonzero(after.history) == 5


def test_sample_past_the_longest_length_is_dropped_from_the_history():
    after = advanced([(1, LATE, [0], LENGTH - 1)], toys.decode_key(width=3), [4, 4])
    assert after.last_tokens[1] == 4 and not after.history.any()


# --- install and fresh ---


def test_fresh_state_knows_no_id_but_the_padding_slots():
    state = SHAPE.fresh()
    assert state.last_tokens.tolist() == [-1] * 5 + [0]
    assert not state.num_tokens.any() and not state.history.any() and not state.counters.any()
    assert (state.tables.stop_ids == VOCAB).all() and (state.tables.bias_ids == VOCAB).all()
    assert (state.tables.allowed_ids == VOCAB).all() and (state.tables.bad_words == -1).all()
    assert not state.pools[0][0].any()


def test_install_writes_its_slots_alone():
    state = state_with(
        last_tokens=np.arange(20, 26, dtype=np.int32),
        num_tokens=np.arange(30, 36, dtype=np.int32),
        history=np.full((MAX_SLOTS + 1, LENGTH), 77, np.int32),
    )
    tables = np.arange(24, dtype=np.int32).reshape(6, 4)
    state = dataclasses.replace(state, page_tables=(jnp.asarray(tables),))
    shape = InstallShape(
        rows=3,
        max_slots=MAX_SLOTS,
        max_model_len=LENGTH,
        vocab_size=VOCAB,
        num_groups=1,
        table_width=4,
    )
    entries = np.array([[3, 1], [1, 0], [17, 18]], np.int32)
    install = Install(
        slot=3,
        known_ids=np.array([5, 6, 7], np.int32),
        num_cached_tokens=2,
        stop_ids=(1,),
        logit_bias=((3, 0.5),),
        bad_words=((8, 9),),
        allowed_ids=(4, 5),
    )
    after = jax.device_get(
        jax.jit(steps.make_install(shape))(state, pack_install((install,), (entries,), shape))
    )
    assert after.last_tokens.tolist() == [20, 21, 22, -1, 24, 25]
    assert after.num_tokens.tolist() == [30, 31, 32, 2, 34, 35]
    # The slot's old pages are gone before the new ones are written.
    tables[3], tables[1, 0] = [0, 17, 0, 0], 18
    assert after.page_tables[0].tolist() == tables.tolist()
    assert after.history[3].tolist() == [5, 6, 7, *[0] * (LENGTH - 3)]
    assert (np.delete(after.history, 3, axis=0) == 77).all()
    assert after.tables.stop_ids[3, :2].tolist() == [1, VOCAB]
    assert after.tables.bias_values[3, :2].tolist() == [0.5, 0.0]
    assert after.tables.bias_ids[3, :2].tolist() == [3, VOCAB]
    assert after.tables.bad_words[3, 0, -2:].tolist() == [8, 9]
    assert after.tables.allowed_ids[3, :3].tolist() == [4, 5, VOCAB]
    assert after.tables.num_allowed.tolist() == [0, 0, 0, 2, 0, 0]
    for leaf in jax.tree.leaves((after.tables.stop_ids, after.tables.bias_ids)):
        assert (np.delete(leaf, 3, axis=0) == VOCAB).all()


# --- KV writes ---


def written(rows, key, keys, values, pool=None):
    _, _, batch = arranged(rows, key)
    (table,) = schedule_of(rows).page_tables
    table = np.pad(table, ((0, key.rows - len(table)), (0, 0)))
    pool = np.zeros((20, 1, 2, 4, 8), np.float32) if pool is None else pool
    return jax.device_get(
        write_kv(
            jnp.asarray(pool), jnp.asarray(keys), jnp.asarray(values), batch, jnp.asarray(table)
        )
    )


def test_keys_and_values_land_at_their_positions_and_padding_in_the_trash_page():
    rows = [(3, LATE, [0], 5), (0, CHUNK, [4, 5], 3)]
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 8, 1, 8)).astype(np.float32)
    pool, is_bad = written(rows, toys.mixed_key(), keys, values)
    expected = np.zeros_like(pool)
    # Slot 3 owns pages 10 to 12, slot 0 pages 1 to 3; four tokens a page.
    for page, place, token in ((11, 1, 0), (1, 3, 1), (2, 0, 2)):
        expected[page, :, 0, place], expected[page, :, 1, place] = keys[token], values[token]
    np.testing.assert_array_equal(pool[1:], expected[1:])
    assert not pool[0, :, :, 1:].any() and not is_bad.any()


def test_value_that_is_not_finite_is_stored_as_zero_and_flags_its_token_alone():
    rows = [(3, LATE, [0], 5), (0, CHUNK, [4, 5], 3)]
    keys, values = np.ones((2, 8, 1, 8), np.float32)
    keys[0, 0, 2], values[2, 0, 3], values[1, 0, 0] = np.nan, np.inf, 7.0
    keys[7] = np.nan  # padding
    pool, is_bad = written(rows, toys.mixed_key(), keys, values)
    assert is_bad.tolist() == [True, False, True] + [False] * 5
    assert np.isfinite(pool).all()
    assert pool[11, 0, 0, 1].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert pool[2, 0, 1, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert pool[1, 0, 1, 3].tolist() == [7, 1, 1, 1, 1, 1, 1, 1]


# --- attention ---

PAGE = 4
WIDTH = 5
HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5


class Scene:
    """Rows of ragged lengths over scattered pages, with the dense truth in float64."""

    def __init__(self, lengths: list[int], query_lens: list[int]) -> None:
        rng = np.random.default_rng(7)
        self.lengths, self.query_lens = np.array(lengths), np.array(query_lens)
        num_pages = 1 + len(lengths) * WIDTH
        self.pool = rng.normal(size=(num_pages, KV_HEADS, 2, PAGE, DIM)).astype(np.float32)
        self.pool[0] = 1e3  # trash: large, so that reading it shows
        table = 1 + rng.permutation(len(lengths) * WIDTH).reshape(len(lengths), WIDTH)
        used = -(-self.lengths // PAGE)
        self.table = np.where(np.arange(WIDTH) < used[:, None], table, 0).astype(np.int32)
        self.q = rng.normal(size=(sum(query_lens), HEADS, DIM)).astype(np.float32)
        self.positions = np.concatenate(
            [np.arange(n - q, n) for n, q in zip(lengths, query_lens, strict=True)]
        ).astype(np.int32)

    def dense(self, window: int | None) -> np.ndarray:
        out = []
        rows = np.repeat(np.arange(len(self.lengths)), self.query_lens)
        for q, position, row in zip(self.q, self.positions, rows, strict=True):
            kv = self.pool[self.table[row]].astype(np.float64)
            kv = kv.transpose(1, 2, 0, 3, 4).reshape(KV_HEADS, 2, -1, DIM)
            first = 0 if window is None else max(0, position - window + 1)
            keys, values = kv[:, :, first : position + 1].swapaxes(0, 1)
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = keys[group] @ q[head].astype(np.float64) * SCALE
                weights = np.exp(scores - scores.max())
                heads.append(weights @ values[group] / weights.sum())
            out.append(heads)
        return np.array(out)

    def decode(
        self, window=None, block_pages=16, block_bytes=2**30, rows=slice(None)
    ) -> np.ndarray:
        count = len(self.lengths)
        q = self.q.reshape(count, -1, HEADS, DIM)[rows]
        out = decode(
            q,
            self.pool,
            self.table[rows],
            self.positions.reshape(count, -1)[rows],
            self.lengths.astype(np.int32)[rows],
            scale=SCALE,
            window=window,
            block_pages=block_pages,
            block_bytes=block_bytes,
        )
        return np.asarray(out)

    def prefill(self, window=None, num_decode=0, padding=3, **tiling) -> np.ndarray:
        defaults = {"block_pages": 16, "block_bytes": 2**30, "tile_tokens": 4, "tiles_at_once": 1}
        out = prefill(
            np.pad(self.q, ((0, padding), (0, 0), (0, 0)), constant_values=9.0),
            self.pool,
            np.pad(self.table, ((0, 1), (0, 0))),
            np.pad(self.positions, (0, padding)),
            np.pad(self.lengths, (0, 1)).astype(np.int32),
            np.cumsum([0, *self.query_lens, 0]).astype(np.int32),
            np.int32(num_decode),
            scale=SCALE,
            window=window,
            max_chunk_rows=len(self.lengths),
            **(defaults | tiling),
        )
        return np.asarray(out)


STATIC = ("scale", "window", "block_pages", "block_bytes")
decode = jax.jit(reference.decode, static_argnames=STATIC)
prefill = jax.jit(
    reference.prefill,
    static_argnames=(*STATIC, "tile_tokens", "tiles_at_once", "max_chunk_rows"),
)
# Float32 sums over at most 20 keys against float64.
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("block_pages", [1, 2, 16])
def test_decode_matches_dense_softmax_for_ragged_rows(window, block_pages):
    scene = Scene([1, 4, 5, 11, 20], [1] * 5)
    close(scene.decode(window, block_pages)[:, 0], scene.dense(window))


def test_decode_of_several_queries_is_causal_among_them():
    scene = Scene([3, 9, 17], [3] * 3)
    out = scene.decode(block_pages=2).reshape(-1, HEADS, DIM)
    close(out, scene.dense(None))


def test_block_bytes_bound_the_pages_of_a_block():
    scene = Scene([1, 7, 20], [1] * 3)
    page_bytes = 3 * scene.pool[0].nbytes
    np.testing.assert_array_equal(
        scene.decode(block_pages=16, block_bytes=2 * page_bytes), scene.decode(block_pages=2)
    )
    np.testing.assert_array_equal(
        scene.decode(block_pages=16, block_bytes=1), scene.decode(block_pages=1)
    )


@pytest.mark.parametrize("window", [None, 3])
def test_padding_row_of_a_decode_step_is_zero(window):
    scene = Scene([5, 9], [1, 1])
    scene.lengths[0] = 0
    out = scene.decode(window, block_pages=1)
    assert not out[0].any() and out[1].any()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "tiling",
    [
        {"block_pages": 16, "tile_tokens": 64},
        {"block_pages": 1, "tile_tokens": 4},
        {"block_pages": 2, "tile_tokens": 3, "tiles_at_once": 2},
        {"block_pages": 2, "tile_tokens": 1, "tiles_at_once": 64},
    ],
    ids=str,
)
def test_prefill_matches_dense_softmax_for_ragged_chunks(window, tiling):
    scene = Scene([1, 6, 9, 20], [1, 6, 2, 7])
    out = scene.prefill(window, **tiling)
    close(out[:16], scene.dense(window))
    assert not out[16:].any()


def test_prefill_leaves_decode_rows_at_zero():
    scene = Scene([8, 9, 20], [1, 1, 7])
    out = scene.prefill(num_decode=2)
    assert not out[:2].any()
    close(out[2:9], scene.dense(None)[2:])


def test_blocks_beyond_every_row_change_no_bit():
    # A row as long as the table makes every block run; without it the last ones are skipped.
    long, short = Scene([20, 3, 6], [1] * 3), Scene([20, 3, 6], [1] * 3)
    short.lengths[0], short.positions[0], short.table[0, 1:] = 2, 1, 0
    for window in (None, 3):
        np.testing.assert_array_equal(
            long.decode(window, block_pages=1)[1:], short.decode(window, block_pages=1)[1:]
        )


def test_every_decode_row_equals_its_solo_run():
    scene = Scene([1, 4, 5, 11, 20], [1] * 5)
    together = scene.decode(block_pages=2)
    for row in range(5):
        alone = np.zeros(5, np.int32)
        alone[row] = 1
        solo = Scene([1, 4, 5, 11, 20], [1] * 5)
        solo.lengths = solo.lengths * alone
        np.testing.assert_array_equal(solo.decode(block_pages=2)[row], together[row])


def test_every_chunk_equals_its_solo_run():
    scene = Scene([1, 6, 9, 20], [1, 6, 2, 7])
    together = scene.prefill(block_pages=2)
    starts = np.cumsum([0, 1, 6, 2, 7])
    for row in range(4):
        solo = Scene([1, 6, 9, 20], [1, 6, 2, 7])
        here = slice(starts[row], starts[row + 1])
        solo.q, solo.positions = solo.q[here], solo.positions[here]
        solo.table, solo.lengths = solo.table[[row]], solo.lengths[[row]]
        solo.query_lens = solo.query_lens[[row]]
        out = solo.prefill(block_pages=2, padding=19 - len(solo.q))
        np.testing.assert_array_equal(out[: len(solo.q)], together[here])


def test_key_that_is_nan_stays_visible_in_the_rows_that_see_it():
    scene = Scene([6, 9], [1, 1])
    scene.pool[scene.table[0, 0]] = np.nan
    out = scene.decode(block_pages=1)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_mixed_step_attends_decode_rows_and_chunks_alike():
    rows = [(3, LATE, [0], 5), (1, DECODE, [1], 9), (0, LAST_CHUNK, [4, 5, 6], 2)]
    key = toys.mixed_key()
    _, _, batch = arranged(rows, key)
    (table,) = schedule_of(rows).page_tables
    table = jnp.asarray(np.pad(table, ((0, 1), (0, 0))))
    rng = np.random.default_rng(3)
    pool = rng.normal(size=(20, KV_HEADS, 2, PAGE, DIM)).astype(np.float32)
    q = rng.normal(size=(8, HEADS, DIM)).astype(np.float32)
    keys, values = rng.normal(size=(2, 8, KV_HEADS, DIM)).astype(np.float32)

    @jax.jit
    def attended(*arguments):
        queries, is_bad = attention.written(*arguments, scale=SCALE, window=None)
        return queries.attended(), queries.pool, is_bad

    out, after, is_bad = attended(q, keys, values, pool, batch, table)
    scene = Scene([6, 10, 5], [1, 1, 3])
    scene.pool, scene.table, scene.q = np.asarray(after), np.asarray(table)[:3], q[:5]
    close(out[:5], scene.dense(None))
    assert not out[5:].any() and not is_bad.any()


# --- sample and faults ---


def test_several_tokens_a_row_need_the_greedy_sampler():
    key = toys.decode_key(query_len=2, sampler="full")
    with pytest.raises(NotImplementedError, match="query length 2 needs the greedy sampler"):
        steps.sample(key, jnp.zeros((4, VOCAB)), None, None, None, None)
