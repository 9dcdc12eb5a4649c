"""The host knows every entry of the device's page tables and sends only what differs."""

import dataclasses

import numpy as np

from engine.execution import step as steps
from engine.execution.packing import carried_pages
from engine.execution.page_tables import DeviceTables
from engine.scheduling.schedule import Install
from tests.execution import toys
from tests.execution.toys import CHUNK, LATE, on_device, schedule_of

SLOTS, WIDTH = 5, 4
ROWS = [(3, LATE, [0], 5), (1, LATE, [0], 2)]


def owning(*tables, installs=(), rows=ROWS):
    return schedule_of(
        rows,
        page_tables=tuple(np.array(table, np.int32) for table in tables),
        installs=tuple(
            Install(slot, np.array([1], np.int32), 0, (), (), (), ()) for slot in installs
        ),
    )


def launched(held: DeviceTables, schedule, carried: int = 99):
    changes = held.changes(schedule, carried)
    held.note(schedule, changes)
    return (
        [entries.T.tolist() for entries in changes.before],
        [entries.T.tolist() for entries in changes.within],
    )


def test_entry_travels_once():
    held = DeviceTables(SLOTS, WIDTH, 1)
    assert launched(held, owning([[7, 8], [9, 0]])) == (
        [[]],
        [[[3, 0, 7], [3, 1, 8], [1, 0, 9]]],
    )
    assert launched(held, owning([[7, 8], [9, 0]])) == ([[]], [[]])
    assert launched(held, owning([[7, 8, 0], [9, 5, 0]])) == ([[]], [[[1, 1, 5]]])


def test_freed_page_becomes_trash_on_the_device_too():
    held = DeviceTables(SLOTS, WIDTH, 1)
    launched(held, owning([[7, 8], [9, 0]]))
    assert launched(held, owning([[0, 8], [9, 0]])) == ([[]], [[[3, 0, 0]]])


def test_slot_that_is_installed_again_gets_its_whole_table_ahead_of_the_step():
    held = DeviceTables(SLOTS, WIDTH, 1)
    launched(held, owning([[7, 8], [9, 0]]))
    # Slot 3 holds pages 7 and 8 until the install empties it, so both travel again.
    again = owning([[7, 8], [9, 6]], installs=(3,))
    assert launched(held, again) == ([[[3, 0, 7], [3, 1, 8]]], [[[1, 1, 6]]])


def test_slot_that_is_installed_without_a_row_is_empty_on_the_device():
    held = DeviceTables(SLOTS, WIDTH, 1)
    launched(held, owning([[7, 8], [9, 0]]))
    only = owning([[9]], installs=(3,), rows=ROWS[1:])
    assert launched(held, only) == ([[]], [[]])
    assert launched(held, owning([[4, 0], [9, 0]])) == ([[]], [[[3, 0, 4]]])


def test_entries_past_the_room_of_the_step_go_ahead_of_it():
    held = DeviceTables(SLOTS, WIDTH, 2)
    schedule = owning([[7, 8], [9, 0]], [[1, 0], [2, 0]], installs=(3,))
    before, within = launched(held, schedule, carried=0)
    assert before == [[[1, 0, 9], [3, 0, 7], [3, 1, 8]], [[1, 0, 2], [3, 0, 1]]]
    assert within == [[], []]
    before, within = launched(held, owning([[7, 8, 4], [9, 5, 6]], [[1, 0], [2, 0]]), carried=2)
    assert before == [[[1, 2, 6]], []] and within == [[[3, 2, 4], [1, 1, 5]], []]


def test_reset_sends_everything_again():
    held = DeviceTables(SLOTS, WIDTH, 1)
    schedule = owning([[7, 8], [9, 0]])
    first = launched(held, schedule)
    held.reset()
    assert launched(held, schedule) == first


def test_schedule_that_is_not_launched_changes_nothing():
    held = DeviceTables(SLOTS, WIDTH, 1)
    schedule = owning([[7, 8], [9, 0]])
    assert held.changes(schedule, 99).within[0].shape == (3, 3)
    assert held.changes(schedule, 99).within[0].shape == (3, 3)


def test_a_step_has_room_for_the_pages_its_tokens_begin():
    assert carried_pages(toys.decode_key(rows=4)) == 4
    assert carried_pages(toys.mixed_key(tokens=64)) == 4 + 4


def test_the_runners_state_holds_what_schedules_name_through_prefill_decode_and_reuse():
    run = toys.start(toys.LLAMA)
    install = Install(1, np.array([1, 2, 3], np.int32), 0, (), (), (), ())
    steps_in_order = [
        schedule_of(
            [(1, CHUNK, [1, 2], 0)],
            page_tables=(np.array([[4, 6]], np.int32),),
            installs=(install,),
        ),
        schedule_of([(0, CHUNK, [1], 0)], page_tables=(np.array([[5]], np.int32),)),
        schedule_of([(1, CHUNK, [3], 2)], page_tables=(np.array([[4, 7]], np.int32),)),
    ]
    for schedule in steps_in_order:
        run.settle(run.launch(run.pack(schedule)))
    (table,) = run.state.page_tables
    assert table[:2].tolist() == [[5, 0], [4, 7]] and not table[2:].any()
    again = dataclasses.replace(install, slot=0)
    run.settle(
        run.launch(
            run.pack(
                schedule_of(
                    [(1, CHUNK, [3], 3)],
                    page_tables=(np.array([[4, 7]], np.int32),),
                    installs=(again,),
                )
            )
        )
    )
    assert run.state.page_tables[0][:2].tolist() == [[0, 0], [4, 7]]
    run.reset_state()
    assert not run.state.page_tables[0].any()
    run.settle(run.launch(run.pack(steps_in_order[2])))
    assert run.state.page_tables[0][1].tolist() == [4, 7]
    run.close()


def test_set_pages_drops_entries_past_the_last_slot():
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    changes = np.array([[1, 2, 2], [3, 0, 0], [40, 41, 42]], np.int32)
    (after,) = steps.set_pages(on_device((table,)), on_device((changes,)))
    assert after.tolist() == [[0, 1, 2, 3], [4, 5, 6, 40]]
