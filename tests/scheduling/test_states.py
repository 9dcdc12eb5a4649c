"""States of recurrent groups: who owns them, when one is kept, and what a hit goes on from."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.scheduling.scheduler import GroupConfig
from tests.scheduling.driver import Driver, config, request
from tests.scheduling.fake_device import solo

PAGES = GroupConfig(num_pages=40, page_size=4)
STATES = GroupConfig(num_pages=12, page_size=4, is_recurrent=True)


def driver_of(*groups: GroupConfig, **changes: object) -> Driver:
    return Driver(config(groups=groups or (PAGES, STATES), **changes))


def launched(driver: Driver):
    """The next schedule, launched."""
    assert driver.launch()
    return driver.device.pending[-1][0]


def chunk_ends(driver: Driver) -> list[int]:
    """Lengths of the only live request after each of its chunks, until it is idle."""
    ends = []
    while not driver.scheduler.is_idle:
        if driver.launch():
            schedule = driver.device.pending[-1][0]
            if not schedule.is_decode:
                ends.append(int(schedule.kv_lens[0]))
        driver.settle()
    return ends


def prompt_of(length: int) -> list[int]:
    return [(1 + 3 * i) % 11 for i in range(length)]


def test_a_row_without_a_snapshot_goes_on_in_place():
    driver = driver_of(prefix_cache=False)
    driver.submit(request("a", prompt_of(9), 6))
    found = {tuple(launched(driver).state_ids[0][0].tolist()) for _ in range(5)}
    ((first, last),) = found
    assert first == last > 0
    driver.run()
    assert driver.device.num_snapshots == 0


def test_models_without_recurrent_groups_schedule_no_states():
    driver = driver_of(PAGES)
    driver.submit(request("a", prompt_of(9), 2))
    assert launched(driver).state_ids == ()
    driver.run()


def test_prompt_is_cut_at_its_last_border_and_the_row_after_writes_another_state():
    driver = driver_of()
    driver.submit(request("a", prompt_of(11), 4))
    rows = [launched(driver) for _ in range(3)]
    assert [row.kv_lens.tolist() for row in rows] == [[8], [11], [12]]
    (in_1, out_1), (in_2, out_2), (in_3, out_3) = [row.state_ids[0][0].tolist() for row in rows]
    assert in_1 == out_1 == in_2, "the chunk up to the border"
    assert out_2 == in_3 == out_3 != in_2, "what follows leaves the snapshot as it was"
    driver.run()


@pytest.mark.parametrize(
    ("length", "groups", "changes", "ends"),
    [
        (11, (PAGES, STATES), {}, [8, 11]),
        (12, (PAGES, STATES), {}, [8, 12]),
        (13, (PAGES, STATES), {}, [12, 13]),
        (3, (PAGES, STATES), {}, [3]),
        (30, (PAGES, STATES), {}, [16, 28, 30]),
        (11, (PAGES, STATES), {"max_chunk": 3}, [3, 4, 7, 8, 11]),
        (11, (PAGES, STATES), {"prefix_cache": False}, [11]),
        (11, (PAGES,), {}, [11]),
        (15, (PAGES, GroupConfig(12, 6, is_recurrent=True)), {}, [12, 15]),
        (11, (PAGES, GroupConfig(12, 4, prefix_cacheable=False, is_recurrent=True)), {}, [11]),
    ],
)
def test_chunks_end_where_every_group_can_be_cut(length, groups, changes, ends):
    driver = driver_of(*groups, **changes)
    driver.submit(request("a", prompt_of(length), 2))
    assert chunk_ends(driver) == ends


@pytest.mark.parametrize(
    ("group", "cached"),
    [
        (STATES, 12),
        (GroupConfig(12, 6, is_recurrent=True), 12),
        (GroupConfig(12, 8, is_recurrent=True), 8),
        (GroupConfig(12, 16, is_recurrent=True), 0),
        (GroupConfig(12, 4, prefix_cacheable=False, is_recurrent=True), 0),
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_hit_is_the_longest_prefix_whose_state_was_kept(group, cached, depth):
    driver = driver_of(PAGES, group)
    for name in "ab":
        driver.submit(request(name, prompt_of(15), 5))
        driver.run(depth)
    assert driver.finished["a", 0].num_cached_tokens == 0
    assert driver.finished["b", 0].num_cached_tokens == cached


def test_hit_reads_the_snapshot_and_writes_a_state_of_its_own():
    driver = driver_of()
    driver.submit(request("a", prompt_of(11), 2))
    snapshot = launched(driver).state_ids[0][0, 1]
    driver.run()
    for name in "bc":
        driver.submit(request(name, [*prompt_of(8), *name.encode()], 6))
    schedule = launched(driver)
    assert schedule.kv_lens.tolist() == [9, 9]
    first, second = schedule.state_ids[0].tolist()
    assert first[0] == second[0] == snapshot
    assert len({snapshot, first[1], second[1]}) == 3
    driver.run()


def test_snapshot_is_no_hit_before_it_is_settled_nor_after_its_row_failed():
    driver = driver_of(max_chunk=8)
    driver.submit(request("a", prompt_of(11), 4))
    driver.launch()
    driver.submit(request("b", prompt_of(11), 4))
    driver.launch()
    driver.fail()
    driver.submit(request("c", prompt_of(11), 4))
    driver.run()
    assert driver.finished["c", 0].num_cached_tokens == 0
    assert driver.scheduler.stats.prefix_hit_tokens == 0


def test_faulty_state_is_not_kept():
    driver = driver_of()
    driver.submit(request("a", prompt_of(11), 4))
    driver.launch()
    schedule, result = driver.device.settle()
    result.faults[0] = 2
    driver.scheduler.settle(schedule, result)
    (delta,) = driver.scheduler.take_deltas()
    assert delta.finish_reason == "error" and "a recurrent state" in delta.error
    driver.submit(request("b", prompt_of(11), 4))
    driver.run()
    assert driver.finished["b", 0].num_cached_tokens == 0


def test_snapshot_in_flight_is_not_kept_with_the_one_before_it():
    driver = driver_of(max_chunk=4)
    driver.submit(request("a", prompt_of(11), 4))
    assert [launched(driver).kv_lens[0] for _ in range(3)] == [4, 8, 11]
    driver.settle()
    schedule, result = driver.device.settle()
    result.faults[0] = 2
    driver.scheduler.settle(schedule, result)
    driver.scheduler.take_deltas()
    driver.settle()
    assert driver.scheduler.stats.num_idle_pages[1] == 1, "the faulty state was kept"


def test_longest_unused_snapshot_makes_room_for_the_next():
    driver = driver_of(PAGES, GroupConfig(4, 4, is_recurrent=True))
    for name, start in [("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 2)]:
        driver.submit(request(name, [start, *prompt_of(5)], 2))
        driver.run()
    cached = {name: delta.num_cached_tokens for (name, _), delta in driver.finished.items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 4}


def test_without_room_no_snapshot_is_kept_and_every_choice_still_runs():
    driver = driver_of(PAGES, GroupConfig(3, 4, is_recurrent=True))
    for name in range(6):
        driver.submit(request(str(name), [name, *prompt_of(10)], 9))
    most = 0
    while not driver.scheduler.is_idle:
        driver.step()
        most = max(most, driver.scheduler.num_running)
    assert most == 2 and len(driver.finished) == 6


def test_choices_go_on_from_the_first_ones_snapshot():
    driver = driver_of()
    driver.submit(request("a", prompt_of(13), 6, n=3))
    driver.run()
    assert [driver.finished["a", i].num_cached_tokens for i in range(3)] == [0, 12, 12]
    assert len({tuple(ids) for ids in driver.ids.values()}) == 3


def test_choices_recompute_where_no_state_can_be_kept():
    driver = driver_of(PAGES, GroupConfig(12, 4, prefix_cacheable=False, is_recurrent=True))
    driver.submit(request("a", prompt_of(13), 6, n=3))
    driver.launch()
    assert driver.scheduler.num_running == 3, "nobody waits for a snapshot"
    driver.run()
    assert [driver.finished["a", i].num_cached_tokens for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("end", ["abort", "stop id"])
def test_state_stays_until_the_last_launch_that_names_it_is_settled(end):
    wanted = request("a", prompt_of(3), 20)
    stop_ids = () if end == "abort" else (solo(wanted, 0)[0][0],)
    driver = driver_of(PAGES, GroupConfig(3, 4, is_recurrent=True), prefix_cache=False)
    driver.submit(request("a", prompt_of(3), 20, stop_ids))
    for _ in range(3):
        driver.launch()
    driver.submit(request("b", prompt_of(4), 3))
    driver.submit(request("c", prompt_of(5), 3))
    assert launched(driver).num_rows == 2, "two states, and two choices own them"
    if end == "abort":
        driver.abort("a")
    for _ in range(3):
        driver.settle()
        assert driver.scheduler.num_waiting == 1
        assert driver.scheduler.stats.num_free_pages[1] == 0
    driver.settle()
    assert driver.finished["a", 0].finish_reason == end.split()[0]
    assert driver.scheduler.stats.num_free_pages[1] == 1
    driver.run()
    assert driver.ids["c", 0] == solo(driver.requests["c"], 0)[0]


def test_left_snapshot_stays_until_the_row_that_reads_it_is_settled():
    driver = driver_of(PAGES, GroupConfig(4, 4, is_recurrent=True))
    driver.submit(request("a", prompt_of(7), 9))
    driver.launch()
    driver.launch()
    driver.settle()
    assert driver.scheduler.stats.num_idle_pages[1] == 0, "its reader is in flight"
    driver.settle()
    assert driver.scheduler.stats.num_idle_pages[1] == 1
    driver.run()


def test_preempted_choice_computes_its_state_again():
    driver = driver_of(GroupConfig(9, 4), STATES, prefix_cache=False)
    for name in "abcd":
        driver.submit(request(name, prompt_of(4), 24, seed=ord(name)))
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0 and len(driver.finished) == 4


def test_reset_hides_snapshots_and_keeps_the_states_of_running_choices():
    driver = driver_of()
    driver.submit(request("a", prompt_of(9), 8))
    for _ in range(4):
        driver.step()
    driver.scheduler.reset_prefix_cache(weights_version=1)
    driver.scheduler.audit()
    driver.submit(request("b", prompt_of(9), 8))
    driver.run()
    assert driver.finished["b", 0].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("deterministic", [False, True], ids=["mixed", "deterministic"])
@pytest.mark.parametrize("num_states", [4, 12])
def test_crowd_with_aborts_everywhere_equals_solo_runs(depth, deterministic, num_states):
    draw = random.Random(f"{depth} {deterministic} {num_states}")
    groups = (
        GroupConfig(12, 4),
        GroupConfig(12, 4, window=6),
        GroupConfig(num_states, 4, is_recurrent=True),
    )
    driver = driver_of(*groups, deterministic=deterministic, max_chunk=9)
    for name in range(80):
        prompt = [draw.randrange(2)] + [draw.randrange(2) for _ in range(draw.randrange(20))]
        n = draw.choice([1, 1, 1, 2])
        driver.submit(request(str(name), prompt, draw.randrange(1, 20), (3,), n=n, seed=name))
        for _ in range(draw.randrange(12)):
            driver.step(depth)
        if draw.random() < 0.3 and (live := list(driver.scheduler._requests)):
            driver.abort(draw.choice(live))
    driver.run(depth)
    stats = driver.scheduler.stats
    # Three states bound the crowd before its pages do.
    assert (stats.num_preemptions > 0) or num_states == 4
    assert stats.prefix_hit_tokens > 0 and driver.device.num_snapshots > 20
    assert len(driver.finished) == len(driver.ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pages": 2}, "num_pages is 2, a recurrent group needs at least 3"),
        ({"window": 4}, "window is 4, a recurrent group has none"),
    ],
)
def test_impossible_recurrent_groups_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GroupConfig(**{"num_pages": 9, "page_size": 4, "is_recurrent": True} | fields)


def test_audit_names_a_state_that_two_slots_write():
    driver = driver_of(prefix_cache=False)
    for name in "ab":
        driver.submit(request(name, prompt_of(3), 9))
    driver.launch()
    group = driver.scheduler._groups[1]
    first, second = np.flatnonzero(group.newest)
    group.newest[second] = group.newest[first]
    with pytest.raises(AssertionError, match="which others may read"):
        driver.scheduler.audit()


def test_audit_names_a_leaked_state():
    driver = driver_of(prefix_cache=False)
    driver.scheduler._groups[1].pool.allocate(1)
    with pytest.raises(AssertionError, match="has 0 owners but counts 1"):
        driver.scheduler.audit()
