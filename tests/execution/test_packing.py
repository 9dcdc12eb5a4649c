"""A schedule survives the way to the device and an output the way back; bad ones are refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import LIMITS
from engine.execution import packing
from engine.execution.packing import (
    InstallShape,
    batch_ranges,
    carried_pages,
    output_ranges,
    pack,
    unpack,
)
from engine.execution.page_tables import DeviceTables
from engine.scheduling.config import GroupConfig
from engine.scheduling.schedule import SAMPLING_COLUMNS, Install, RowKind
from tests.execution import toys
from tests.execution.toys import CHUNK, DECODE, LAST_CHUNK, LATE, schedule_of

MAX_SLOTS = 5
VOCAB = 11
GROUP = GroupConfig(num_pages=20, page_size=4)

MIXED_ROWS = [(3, LATE, [0], 5), (1, DECODE, [10], 2), (0, LAST_CHUNK, [4, 5, 6], 0)]


def packed(schedule, key, groups=(GROUP,)) -> np.ndarray:
    packing.check(schedule, key, max_slots=MAX_SLOTS, vocab_size=VOCAB, groups=groups)
    held = DeviceTables(MAX_SLOTS, 4, len(schedule.page_tables))
    changes = held.changes(schedule, carried_pages(key))
    return pack(schedule, key, max_slots=MAX_SLOTS, page_changes=changes.within)


def with_columns(schedule):
    """Every sampling column with values of its own, extremes among them."""
    columns = {}
    for i, (name, dtype) in enumerate(SAMPLING_COLUMNS):
        values = np.arange(schedule.num_rows) * 3 + i
        if np.issubdtype(dtype, np.floating):
            columns[name] = (values / 7 - 1).astype(dtype)
        else:
            columns[name] = np.iinfo(dtype).max - values.astype(dtype)
    return dataclasses.replace(schedule, is_full_sampler=True, sampling=columns)


# --- round trip ---


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (toys.decode_key(rows=4, width=3), [(2, LATE, [0], 5), (0, DECODE, [7], 1)]),
        (toys.decode_key(rows=4, width=3, query_len=2), [(2, LATE, [0, 9], 5)]),
        (
            toys.decode_key(rows=2, width=5, sampler="full"),
            [(2, LATE, [0], 5), (4, DECODE, [7], 1)],
        ),
        (toys.mixed_key(), MIXED_ROWS),
        (toys.mixed_key(sampler="full"), MIXED_ROWS),
        (
            toys.mixed_key(head="score", sampler="full"),
            [(1, DECODE, [10], 2), (0, LAST_CHUNK | RowKind.SCORES, [4, 5, 6], 0)],
        ),
    ],
    ids=str,
)
def test_schedule_arrives_on_the_device_as_it_was(key, rows):
    schedule = schedule_of(rows)
    if key.sampler == "full":
        schedule = with_columns(schedule)
    flat = packed(schedule, key)
    assert flat.dtype == np.int32 and flat.shape == (batch_ranges(key, 1).size,)
    ids, arrived = jax.jit(functools.partial(unpack, key, 1))(flat)
    n, t = schedule.num_rows, schedule.num_tokens
    assert ids.shape == (key.tokens,)
    np.testing.assert_array_equal(ids, [*schedule.token_ids, *[0] * (key.tokens - t)])
    padding = [0] * (key.rows - n)
    assert int(arrived.num_decode) == schedule.num_decode
    np.testing.assert_array_equal(
        arrived.slots, [*schedule.slots, *[MAX_SLOTS + 1] * (key.rows - n)]
    )
    np.testing.assert_array_equal(arrived.q_lens, [*schedule.q_lens, *padding])
    np.testing.assert_array_equal(arrived.kinds, [*schedule.kinds, *padding])
    (changes,) = arrived.page_changes
    assert changes.shape == (3, carried_pages(key))
    owned = [
        (slot, place, page)
        for slot, table in zip(schedule.slots, schedule.page_tables[0], strict=True)
        for place, page in enumerate(table)
    ]
    num_carried = min(len(owned), carried_pages(key))
    assert changes.T[:num_carried].tolist() == [list(entry) for entry in owned[:num_carried]]
    assert (changes[0, num_carried:] == MAX_SLOTS + 1).all()
    if key.sampler == "greedy":
        assert arrived.sampling is None
        return
    for name, dtype in SAMPLING_COLUMNS:
        column = np.asarray(getattr(arrived.sampling, name))
        assert column.dtype == dtype and not column[n:].any()
        np.testing.assert_array_equal(column[:n], schedule.sampling[name])


def test_kinds_are_told_apart_on_the_device():
    _, arrived = unpack(
        toys.mixed_key(), 1, jnp.asarray(packed(schedule_of(MIXED_ROWS), toys.mixed_key()))
    )
    assert arrived.has(RowKind.DEVICE_ID).tolist() == [True, False, False, False]
    assert arrived.has(RowKind.DECODE).tolist() == [True, True, False, False]
    assert arrived.has(RowKind.SAMPLES).tolist() == [True, True, True, False]
    assert arrived.has(RowKind.SCORES).tolist() == [False] * 4


def test_every_group_has_entries_of_its_own():
    key = toys.decode_key()
    tables = (np.array([[1, 2]], np.int32), np.array([[3, 0]], np.int32))
    schedule = schedule_of([(2, LATE, [0], 3)], page_tables=tables)
    _, arrived = unpack(key, 2, jnp.asarray(packed(schedule, key, groups=(GROUP, GROUP))))
    past_end = MAX_SLOTS + 1
    assert [changes.T.tolist() for changes in arrived.page_changes] == [
        [[2, 0, 1], [2, 1, 2]],
        [[2, 0, 3], [past_end, 0, 0]],
    ]


def test_ranges_lie_one_after_another_and_prompt_ids_come_last():
    for key in (toys.decode_key(), toys.mixed_key(sampler="full")):
        ranges = batch_ranges(key, 2)
        end = 0
        for _, offset, shape in ranges.places:
            assert offset == end
            end += int(np.prod(shape))
        assert end == ranges.size
        assert ranges.places[-1][0] == "prompt_ids"


def test_every_step_is_packed_into_an_array_of_its_own():
    schedule, key = schedule_of(MIXED_ROWS), toys.mixed_key()
    first, second = packed(schedule, key), packed(schedule, key)
    assert not np.shares_memory(first, second)
    for column in (schedule.slots, schedule.token_ids, schedule.kinds, *schedule.page_tables):
        assert not np.shares_memory(first, column)


# --- refusals ---


def one_row(**fields):
    return schedule_of([(1, DECODE, [3], 2)], **fields)


@pytest.mark.parametrize(
    ("schedule", "key", "message"),
    [
        (
            schedule_of([(s, DECODE, [1], 2) for s in range(3)]),
            toys.decode_key(width=3),
            "3 rows of 3 tokens exceed the program decode rows 2",
        ),
        (
            schedule_of([(s, DECODE, [1], 2) for s in range(5)]),
            toys.mixed_key(),
            "5 rows of 5 tokens exceed the program mixed rows 4 tokens 8",
        ),
        (
            schedule_of([(0, CHUNK, [1] * 9, 0)]),
            toys.mixed_key(),
            "1 rows of 9 tokens exceed the program mixed rows 4 tokens 8",
        ),
        (
            one_row(q_lens=np.array([2], np.int32)),
            toys.mixed_key(),
            "query lengths sum to 2 but 1 ids came",
        ),
        (
            schedule_of([(0, LATE, [0, 1], 3)]),
            toys.decode_key(rows=4, width=3),
            r"query lengths \[2\] do not suit the program decode rows 4",
        ),
        (
            schedule_of([(s, CHUNK, [1], 0) for s in range(3)]),
            toys.mixed_key(),
            "3 chunks exceed the program's 2",
        ),
        (
            schedule_of([(0, CHUNK, [1], 0)]),
            toys.decode_key(width=3),
            "1 chunks exceed the program's 0",
        ),
        (
            one_row(slots=np.array([MAX_SLOTS], np.int32)),
            toys.mixed_key(),
            r"slots \[5\] must lie in \[0, 5\)",
        ),
        (
            one_row(slots=np.array([-1], np.int32)),
            toys.mixed_key(),
            r"slots \[-1\] must lie in \[0, 5\)",
        ),
        (
            schedule_of([(2, DECODE, [1], 2), (2, DECODE, [1], 2)]),
            toys.mixed_key(),
            r"slots \[2, 2\] name one slot twice",
        ),
        (
            schedule_of([(2, DECODE, [VOCAB], 2)]),
            toys.mixed_key(),
            r"token ids must lie in \[0, 11\), got 11 to 11",
        ),
        (
            schedule_of([(2, DECODE, [-1], 2), (1, CHUNK, [3], 0)]),
            toys.mixed_key(),
            r"token ids must lie in \[0, 11\), got -1 to 3",
        ),
    ],
)
def test_schedule_that_breaks_a_rule_is_never_packed(schedule, key, message):
    with pytest.raises(ValueError, match=message):
        packed(schedule, key)


@pytest.mark.parametrize("length", [1, 4, 5, 12])
def test_row_that_owns_the_pages_it_reaches_is_packed(length):
    table = np.zeros((1, 3), np.int32)
    table[0, : -(-length // 4)] = 9
    row = schedule_of([(1, DECODE, [3], length - 1)], page_tables=(table,))
    assert packed(row, toys.mixed_key()).size


@pytest.mark.parametrize(
    ("pages", "length", "place"),
    [
        ([0, 0, 0], 1, 0),
        ([9, 0, 0], 5, 1),
        ([9, 0, 9], 12, 1),
        ([9, 9, 0], 9, 2),
        ([9, 9, 9], 13, 3),
    ],
)
def test_row_that_reaches_a_page_it_does_not_own_is_refused(pages, length, place):
    rows = [(2, DECODE, [3], 3), (1, DECODE, [3], length - 1)]
    tables = (np.array([[7, 0, 0], pages], np.int32),)
    message = rf"row 1 \(slot 1\) reaches {length} tokens but owns no page at {place} of its table"
    with pytest.raises(ValueError, match=message):
        packed(schedule_of(rows, page_tables=tables), toys.mixed_key())


@pytest.mark.parametrize("page", [-1, 20])
def test_page_outside_the_pool_is_refused(page):
    tables = (np.array([[19, 1, page]], np.int32),)
    schedule = schedule_of([(1, DECODE, [3], 2)], page_tables=tables)
    low, high = sorted((page, 19 if page < 0 else 1))
    with pytest.raises(ValueError, match=rf"pages must lie in \[0, 20\), got {low} to {high}"):
        packed(schedule, toys.mixed_key())


@pytest.mark.parametrize(
    ("pages", "before", "query", "is_packed"),
    [
        # Window 4, pages of 4: the first query at `before` sees before - 3 and up.
        ([0, 9, 9], 7, 1, True),  # sees 4 to 7
        ([0, 9, 9], 6, 1, False),  # sees 3 to 6
        ([0, 9, 9], 7, 3, True),
        ([0, 9, 9], 6, 3, False),
        ([0, 0, 9], 11, 1, True),
        ([0, 0, 9], 10, 1, False),
        ([0, 9, 0], 11, 1, False),
    ],
)
def test_window_frees_only_the_pages_below_what_the_first_query_sees(
    pages, before, query, is_packed
):
    window = dataclasses.replace(GROUP, window=4)
    rows = [(1, LAST_CHUNK, [3] * query, before)]
    schedule = schedule_of(rows, page_tables=(np.array([pages], np.int32),))
    if is_packed:
        assert packed(schedule, toys.mixed_key(), groups=(window,)).size
        return
    with pytest.raises(ValueError, match="owns no page"):
        packed(schedule, toys.mixed_key(), groups=(window,))


def test_every_group_is_checked():
    tables = (np.array([[1, 2]], np.int32), np.array([[0, 0]], np.int32))
    schedule = schedule_of([(2, LATE, [0], 3)], page_tables=tables)
    with pytest.raises(ValueError, match="owns no page at 0"):
        packed(schedule, toys.decode_key(), groups=(GROUP, GROUP))


# --- output ---


@pytest.mark.parametrize(
    ("key", "num_rows", "num_tokens"),
    [
        (toys.decode_key(rows=4), 3, 3),
        (toys.decode_key(rows=2, query_len=3), 1, 3),
        (toys.mixed_key(sampler="full"), 3, 5),
        (toys.mixed_key(head="score", sampler="full"), 2, 7),
    ],
    ids=str,
)
def test_output_comes_back_as_it_was_without_padding(key, num_rows, num_tokens):
    rng = np.random.default_rng(0)
    parts = {}
    for name, _, shape in output_ranges(key).places:
        is_float = name.endswith("logprobs")
        values = rng.normal(size=shape) if is_float else rng.integers(-(2**31), 2**31, shape)
        parts[name] = jnp.asarray(values.astype(np.float32 if is_float else np.int32))
    flat = np.asarray(jax.jit(functools.partial(packing.pack_output, key))(parts))
    assert flat.shape == (output_ranges(key).size,)
    result = packing.unpack_output(key, flat, num_rows, num_tokens)
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if field.name not in parts:
            assert value is None
            continue
        kept = num_tokens if field.name.startswith("prompt_") else num_rows
        np.testing.assert_array_equal(value, parts[field.name][:kept], strict=True)


def test_output_has_what_its_sampler_and_head_make():
    def names(key):
        return [name for name, _, _ in output_ranges(key).places]

    short = ["sampled", "num_new", "faults", "logprobs", "ranks"]
    full = [*short, "top_ids", "top_logprobs"]
    score = ["prompt_logprobs", "prompt_ranks", "prompt_top_ids", "prompt_top_logprobs"]
    assert names(toys.decode_key()) == names(toys.mixed_key()) == short
    assert names(toys.decode_key(sampler="full")) == full
    assert names(toys.mixed_key(head="score", sampler="full")) == full + score


def test_a_decode_row_of_several_tokens_has_as_many_samples():
    shapes = {name: shape for name, _, shape in output_ranges(toys.decode_key(query_len=3)).places}
    assert shapes["sampled"] == shapes["logprobs"] == (2, 3) and shapes["num_new"] == (2,)


# --- install ---

SHAPE = InstallShape(
    rows=3, max_slots=MAX_SLOTS, max_model_len=8, vocab_size=VOCAB, num_groups=2, table_width=2
)
ENTRIES = np.array([[4, 4, 0], [0, 1, 0], [7, 8, 9]], np.int32)
NO_ENTRIES = np.zeros((3, 0), np.int32)


def test_install_lays_out_every_table_and_leaves_unused_rows_harmless():
    full = Install(
        slot=4,
        known_ids=np.array([5, 6, 7], np.int32),
        num_cached_tokens=2,
        stop_ids=(1, 2),
        logit_bias=((3, 0.5), (9, -100.0)),
        bad_words=((8,), (1, 2, 3)),
        allowed_ids=(4, 5, 6),
    )
    bare = Install(0, np.array([1], np.int32), 0, (), (), (), ())
    flat = packing.pack_install((full, bare), (ENTRIES, NO_ENTRIES), SHAPE)
    parts = {
        name: np.asarray(value)
        for name, value in packing.install_ranges(SHAPE).read(jnp.asarray(flat)).items()
    }
    # The unused row names a slot past the state, whose writes are dropped.
    assert parts["slots"].tolist() == [4, 0, MAX_SLOTS + 1]
    assert parts["num_cached"].tolist() == [2, 0, 0]
    assert parts["num_allowed"].tolist() == [3, 0, 0]
    assert parts["history"].tolist() == [[5, 6, 7, *[0] * 5], [1, *[0] * 7], [0] * 8]
    assert parts["stop_ids"][0].tolist() == [1, 2] + [VOCAB] * (LIMITS.stop_ids - 2)
    assert parts["allowed_ids"][0].tolist() == [4, 5, 6] + [VOCAB] * (LIMITS.allowed_ids - 3)
    assert parts["bias_ids"][0].tolist() == [3, 9] + [VOCAB] * (LIMITS.logit_bias - 2)
    bias = parts["bias_values"].view(np.float32)
    assert bias[0, :2].tolist() == [0.5, -100.0] and not bias[0, 2:].any() and not bias[1:].any()
    for name in ("stop_ids", "allowed_ids", "bias_ids"):
        assert (parts[name][1:] == VOCAB).all()
    # Bad words end where the next id would stand.
    assert parts["page_changes_0"][:, :3].tolist() == ENTRIES.tolist()
    assert parts["page_changes_0"][0, 3:].tolist() == [MAX_SLOTS + 1] * 3
    assert parts["page_changes_1"][0].tolist() == [MAX_SLOTS + 1] * 6
    width = LIMITS.bad_word_ids
    assert parts["bad_words"][0, 0].tolist() == [-1] * (width - 1) + [8]
    assert parts["bad_words"][0, 1].tolist() == [-1] * (width - 3) + [1, 2, 3]
    assert (parts["bad_words"][0, 2:] == -1).all() and (parts["bad_words"][1:] == -1).all()


def test_install_at_every_bound_fits():
    install = Install(
        slot=1,
        known_ids=np.arange(8, dtype=np.int32),
        num_cached_tokens=8,
        stop_ids=(3,) * LIMITS.stop_ids,
        logit_bias=((3, 1.0),) * LIMITS.logit_bias,
        bad_words=((1,) * LIMITS.bad_word_ids,) * LIMITS.bad_words,
        allowed_ids=(3,) * LIMITS.allowed_ids,
    )
    flat = packing.pack_install((install,) * 3, (np.repeat(ENTRIES, 2, axis=1),) * 2, SHAPE)
    parts = packing.install_ranges(SHAPE).views(flat)
    assert (parts["stop_ids"] == 3).all() and (parts["allowed_ids"] == 3).all()
    assert (parts["bad_words"] == 1).all() and parts["history"].tolist() == [list(range(8))] * 3


def runs(num_installs, num_entries):
    """Slots and pages of each run of the install program."""
    installs = tuple(
        Install(slot, np.array([1], np.int32), 0, (), (), (), ()) for slot in range(num_installs)
    )
    entries = np.arange(num_entries, dtype=np.int32)[None].repeat(3, axis=0)
    found = []
    for flat in packing.pack_installs(installs, (entries, NO_ENTRIES), SHAPE):
        parts = packing.install_ranges(SHAPE).views(flat)
        slots, pages = parts["slots"], parts["page_changes_0"]
        found.append((slots[slots <= 5].tolist(), pages[2, pages[0] <= MAX_SLOTS].tolist()))
    return found


def test_pages_are_written_once_the_last_slot_is_installed():
    assert runs(0, 0) == []
    assert runs(2, 0) == [([0, 1], [])]
    assert runs(0, 2) == [([], [0, 1])]
    assert runs(5, 3) == [([0, 1, 2], []), ([3, 4], [0, 1, 2])]


def test_more_pages_than_one_run_takes_go_on_in_runs_of_their_own():
    shape = dataclasses.replace(SHAPE, max_slots=99)
    entries = np.arange(14, dtype=np.int32)[None].repeat(3, axis=0)
    found = packing.pack_installs((), (NO_ENTRIES, entries), shape)
    views = [packing.install_ranges(shape).views(flat)["page_changes_1"] for flat in found]
    assert [view[2, view[0] <= 99].tolist() for view in views] == [
        list(range(6)),
        list(range(6, 12)),
        [12, 13],
    ]
