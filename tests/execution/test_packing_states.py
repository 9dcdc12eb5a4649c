"""State ids survive the way to the device; those that would mix two rows' states are refused."""

import functools

import jax
import numpy as np
import pytest

from engine.execution.packing import batch_ranges, check, pack, unpack
from engine.scheduling.config import GroupConfig
from tests.execution import toys
from tests.execution.toys import DECODE, LAST_CHUNK, LATE, schedule_of

PAGES = GroupConfig(num_pages=20, page_size=4)
STATES = GroupConfig(num_pages=9, page_size=4, is_recurrent=True)
ROWS = [(3, LATE, [0], 5), (1, DECODE, [10], 2), (0, LAST_CHUNK, [4, 5, 6], 0)]


def packed(*state_ids, groups=(PAGES, STATES), key=None) -> np.ndarray:
    schedule = schedule_of(ROWS, state_ids=tuple(np.array(ids, np.int32) for ids in state_ids))
    key = key or toys.mixed_key()
    check(schedule, key, max_slots=5, vocab_size=11, groups=groups)
    no_changes = (np.zeros((3, 0), np.int32),) * len(schedule.page_tables)
    return pack(schedule, key, max_slots=5, page_changes=no_changes)


def test_state_ids_of_every_group_arrive_and_padding_rows_name_the_trash():
    key = toys.mixed_key()
    first, second = [[1, 1], [2, 3], [8, 8]], [[4, 5], [6, 6], [7, 7]]
    flat = packed(first, second, groups=(STATES, PAGES, STATES))
    assert flat.shape == (batch_ranges(key, 1, 2).size,)
    ids, arrived = jax.jit(functools.partial(unpack, key, 1, num_recurrent=2))(flat)
    assert ids.tolist() == [0, 10, 4, 5, 6, 0, 0, 0]
    assert [x.tolist() for x in arrived.state_ids] == [[*first, [0, 0]], [*second, [0, 0]]]


def test_models_without_recurrent_groups_pack_nothing_for_them():
    key = toys.mixed_key()
    flat = packed(groups=(PAGES,))
    assert flat.shape == (batch_ranges(key, 1).size,) == (batch_ranges(key, 1, 0).size,)
    _, arrived = unpack(key, 1, flat)
    assert arrived.state_ids == ()
    assert not any(name.startswith("state") for name, _, _ in batch_ranges(key, 1).places)


def test_rows_may_go_on_from_one_snapshot():
    assert packed([[4, 1], [4, 2], [3, 3]]).size


@pytest.mark.parametrize(
    ("state_ids", "message"),
    [
        ([[1, 1], [2, 0], [3, 3]], r"state ids must lie in \[1, 9\), got 0 to 3"),
        ([[0, 1], [2, 2], [3, 3]], r"state ids must lie in \[1, 9\), got 0 to 3"),
        ([[1, 1], [2, 2], [3, 9]], r"state ids must lie in \[1, 9\), got 1 to 9"),
        ([[1, -1], [2, 2], [3, 3]], r"state ids must lie in \[1, 9\), got -1 to 3"),
        ([[1, 4], [2, 4], [3, 3]], r"row 1 \(slot 1\) writes state 4, which row 0 \(slot 3\) owns"),
        ([[1, 1], [2, 2], [2, 3]], r"row 1 \(slot 1\) writes state 2, which row 2 \(slot 0\) owns"),
        ([[1, 1], [2, 1], [3, 3]], r"row 1 \(slot 1\) writes state 1, which row 0 \(slot 3\) owns"),
        ([[1, 1], [2, 2]], r"3 rows need 2 state ids each, got \(2, 2\)"),
    ],
)
def test_state_ids_that_would_mix_rows_are_never_packed(state_ids, message):
    with pytest.raises(ValueError, match=message):
        packed(state_ids)


def test_every_recurrent_group_is_checked():
    sound = [[1, 1], [2, 2], [3, 3]]
    with pytest.raises(ValueError, match="writes state 1, which"):
        packed(sound, [[1, 1], [1, 1], [3, 3]], groups=(PAGES, STATES, STATES))
    with pytest.raises(ValueError, match=r"is (longer|shorter) than"):
        packed(sound, groups=(PAGES,))
