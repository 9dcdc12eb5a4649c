from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.scheduling.schedule import POISON_ID, RowFault, RowKind
from engine.scheduling.scheduler import GroupConfig, QueueFull
from tests.scheduling.driver import Driver, config, request
from tests.scheduling.fake_device import solo


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 3 * i) % 11 for i in range(length)]


def endless(name: str = "a", length: int = 3, max_tokens: int = 20, **params):
    """A request that ends at max_tokens alone."""
    return request(name, prompt_of(length), max_tokens, **params)


# Submission.


def test_live_request_id_is_refused_and_a_finished_one_is_free_again():
    # Ledger row SCHED-32.
    driver = Driver(config())
    driver.submit(endless())
    with pytest.raises(ValueError, match="request_id 'a' is live already"):
        driver.scheduler.submit(endless())
    driver.step()
    driver.step()
    driver.abort("a")
    assert driver.device.pending, "its late rows are in flight"
    driver.finished.clear()
    driver.submit(endless())
    driver.run()
    assert driver.ids["a", 0] == solo(endless(), 0)[0]


def test_request_that_never_fits_is_refused_by_name_and_others_run():
    # Ledger row LIM-04.
    driver = Driver(config(groups=(GroupConfig(5, 4),)))
    with pytest.raises(ValueError, match="needs 5 pages of 4 tokens but the pool has 4"):
        driver.submit(endless(max_tokens=15))
    for name in range(10):
        driver.submit(endless(str(name), max_tokens=14))
    driver.run()
    assert len(driver.finished) == 10


def test_request_longer_than_the_model_names_max_model_len():
    with pytest.raises(ValueError, match="needs 65 tokens but max_model_len is 64"):
        Driver(config()).submit(endless(length=45))


def test_too_many_stop_ids_are_refused():
    with pytest.raises(ValueError, match="has 33 stop ids, the limit is 32"):
        Driver(config()).submit(endless(stop_ids=tuple(range(33))))


def test_queue_over_its_limit_refuses_and_recovers():
    driver = Driver(config(queue_limit=2, prefix_cache=False))
    driver.submit(endless("a", n=3))
    driver.submit(endless("b"))
    with pytest.raises(QueueFull, match="2 requests wait and the limit is 2"):
        driver.submit(endless("c"))
    driver.abort("b")
    driver.submit(endless("c"))
    driver.step()
    driver.submit(endless("d"))
    driver.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_rows": 0}, "max_rows is 0, it must be at least 1"),
        ({"max_slots": 3}, "max_slots is 3, it must be at least max_rows, 4"),
        ({"max_chunk": 0}, "max_chunk is 0"),
        ({"groups": ()}, "groups is empty"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1, 4, None), "num_pages is 1, it must be at least 2"),
        ((2, 0, None), "page_size is 0"),
        ((2, 4, 0), "window is 0"),
    ],
)
def test_impossible_groups_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GroupConfig(*fields)


# Rows of a step.


def test_only_the_last_chunk_samples_and_decode_rows_carry_poison():
    driver = Driver(config(max_chunk=4))
    driver.submit(endless(length=10, max_tokens=3))
    seen = []
    while (schedule := driver.scheduler.schedule()) is not None:
        driver.device.launch(schedule)
        seen.append((int(schedule.q_lens[0]), int(schedule.kinds[0]), schedule.token_ids.tolist()))
    prompt = prompt_of(10)
    decode = RowKind.DECODE | RowKind.SAMPLES | RowKind.DEVICE_ID
    assert seen == [
        (4, 0, prompt[:4]),
        (4, 0, prompt[4:8]),
        (2, RowKind.SAMPLES, prompt[8:]),
        (1, decode, [POISON_ID]),
        (1, decode, [POISON_ID]),
    ]
    driver.run()


def test_sync_lane_sends_the_true_id_and_waits_for_it():
    driver = Driver(config(ids_from_host=True))
    driver.submit(endless())
    driver.launch()
    assert driver.scheduler.schedule() is None, "its newest id is not known yet"
    driver.settle()
    schedule = driver.scheduler.schedule()
    assert schedule.kinds.tolist() == [RowKind.DECODE | RowKind.SAMPLES]
    assert schedule.token_ids.tolist() == driver.ids["a", 0]
    driver.device.launch(schedule)
    driver.run()


def test_schedule_arrays_do_not_change_after_launch():
    driver = Driver(config())
    for name in range(3):
        driver.submit(endless(str(name), n=2))
    seen = []
    while not driver.scheduler.is_idle:
        schedule = driver.scheduler.schedule()
        if schedule is not None:
            driver.device.launch(schedule)
            arrays = [getattr(schedule, f.name) for f in dataclasses.fields(schedule)]
            arrays = [a for a in arrays if isinstance(a, np.ndarray)]
            arrays += [*schedule.page_tables, *schedule.sampling.values()]
            seen.append((arrays, [a.copy() for a in arrays]))
        driver.settle()
    assert seen
    for arrays, copies in seen:
        assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))
        assert all(a.base is None or a.base.flags.owndata for a in arrays)


def test_full_sampler_runs_only_for_rows_that_sample_with_it():
    driver = Driver(config(max_chunk=2))
    driver.submit(endless("greedy", length=2, temperature=0.0))
    driver.submit(endless("warm", length=4, temperature=0.5))
    assert [driver.scheduler.schedule().is_full_sampler for _ in range(3)] == [False, True, True]
    exact = Driver(config(deterministic=True))
    exact.submit(endless(temperature=0.0))
    assert exact.scheduler.schedule().is_full_sampler


def test_sampling_columns_reach_the_row():
    driver = Driver(config())
    seed = 0xFEDC_BA98_7654_3210
    driver.submit(endless(seed=seed, top_k=-1, temperature=0.25, logprobs=2, min_tokens=3))
    sampling = driver.scheduler.schedule().sampling
    assert sampling["seed_low"][0] == 0x7654_3210 and sampling["seed_high"][0] == 0xFEDC_BA98
    assert sampling["top_k"][0] == 0 and sampling["temperature"][0] == np.float32(0.25)
    assert sampling["num_logprobs"][0] == 2 and sampling["min_tokens"][0] == 3
    assert sampling["prompt_len"][0] == 3 and sampling["output_index"][0] == 0


def test_install_carries_known_ids_and_tables():
    driver = Driver(config())
    driver.submit(
        endless(
            stop_ids=(3, 4), logit_bias={5: 1.5}, bad_word_ids=((1, 2),), allowed_token_ids=(7,)
        )
    )
    (install,) = driver.scheduler.schedule().installs
    assert install.known_ids.tolist() == prompt_of(3) and install.num_cached_tokens == 0
    assert (install.stop_ids, install.logit_bias) == ((3, 4), ((5, 1.5),))
    assert (install.bad_words, install.allowed_ids) == (((1, 2),), (7,))


def test_decode_rows_do_not_starve_prompts_nor_prompts_decode_rows():
    driver = Driver(config(token_budget=4, max_rows=8, max_slots=10, groups=(GroupConfig(99, 4),)))
    for name in range(7):
        driver.submit(endless(str(name), length=1))
    for _ in range(4):
        driver.step()
    driver.submit(endless("late", length=8))
    steps = [driver.scheduler.schedule() for _ in range(3)]
    for schedule in steps:
        driver.device.launch(schedule)
        assert schedule.num_decode == 3 and schedule.num_tokens == 4
    rows = np.concatenate([schedule.slots[:3] for schedule in steps])
    assert len(set(rows.tolist())) == 7, "decode rows take turns"
    driver.run()


def test_finished_rows_waiting_to_settle_do_not_stall_a_full_batch():
    driver = Driver(config(max_rows=2, max_slots=3))
    for name in "abc":
        driver.submit(endless(name, max_tokens=2))
    driver.launch()
    driver.launch()
    schedule = driver.scheduler.schedule()  # a and b have launched all, c has a spare slot
    assert schedule is not None and schedule.num_rows == 1
    driver.device.launch(schedule)
    driver.run()


# Ends.


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_row_is_launched_past_max_tokens(max_tokens, depth):
    # Ledger row LIM-08 with the next test: counts are known before ids are.
    driver = Driver(config())
    driver.submit(endless(max_tokens=max_tokens))
    driver.run(depth)
    assert driver.finished["a", 0].finish_reason == "length"
    assert driver.device.num_tokens[0] == 3 + max_tokens - 1


def test_output_reaches_max_model_len_and_never_passes_it():
    driver = Driver(config())
    driver.submit(endless(length=63, max_tokens=1))
    driver.submit(endless("b", length=40, max_tokens=24))
    driver.run(depth=3)
    assert max(driver.device.num_tokens) == 63


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_rows_after_a_stop_id_are_dropped(depth):
    for seed in range(12):
        driver = Driver(config())
        driver.submit(endless(seed=seed, stop_ids=(0, 5), logprobs=1))
        driver.run(depth)  # the driver compares ids, logprobs, reason and stop id with a solo run


def test_stop_ids_of_neighbours_do_not_mix():
    # Ledger rows STOP-12 and STOP-09 (id 0 is a stop id like any other).
    driver = Driver(config())
    for token_id in range(8):
        driver.submit(endless(str(token_id), stop_ids=(token_id,)))
    driver.run()
    reasons = {delta.stop_id for delta in driver.finished.values()}
    assert 0 in reasons and len(reasons) > 2


def test_stop_ids_of_a_slots_last_owner_are_forgotten():
    driver = Driver(config(max_rows=1, max_slots=1))
    driver.submit(endless("a", stop_ids=tuple(range(11))))
    driver.submit(endless("b"))
    driver.run()
    assert driver.finished["a", 0].finish_reason == "stop"
    assert len(driver.ids["b", 0]) == 20


def test_stop_id_before_min_tokens_does_not_end_the_output():
    # Ledger row STOP-14.
    ids, _, _ = solo(endless(), 0)
    driver = Driver(config())
    driver.submit(endless(stop_ids=(ids[0],), min_tokens=6))
    driver.run()
    assert len(driver.ids["a", 0]) > 6


def test_zero_max_tokens_fills_the_prompt_and_ends_with_length():
    driver = Driver(config(max_chunk=2))
    driver.submit(endless(length=5, max_tokens=0))
    driver.run()
    delta = driver.finished["a", 0]
    assert delta.finish_reason == "length" and delta.token_ids == ()


def test_abort_with_reason_stop_ends_one_choice_and_twice_is_once():
    driver = Driver(config())
    driver.submit(endless(n=2))
    for _ in range(4):
        driver.step()
    driver.abort("a", "stop", choice=1)
    driver.abort("a", "stop", choice=1)
    driver.abort("nobody")
    assert driver.finished["a", 1].finish_reason == "stop"
    driver.run()
    assert driver.finished["a", 0].finish_reason == "length"


def test_slots_and_pages_stay_until_the_last_launch_is_settled():
    # Ledger rows SCHED-03 and SCHED-22: aborted between chunks, nothing is recycled early.
    driver = Driver(config(max_chunk=4, max_rows=1, max_slots=1, prefix_cache=False))
    driver.submit(endless(length=12))
    driver.launch()
    driver.launch()
    free = driver.scheduler.stats.num_free_pages
    driver.abort("a")
    driver.submit(endless("b"))
    assert not driver.launch() and driver.scheduler.stats.num_free_pages == free
    driver.settle()
    assert not driver.launch() and driver.scheduler.stats.num_free_pages == free
    driver.settle()
    assert driver.scheduler.stats.num_free_pages == (16,)
    assert driver.launch()
    driver.run()


def test_settling_out_of_order_is_refused():
    driver = Driver(config())
    driver.submit(endless())
    driver.launch()
    driver.launch()
    schedule, result, _ = driver.device.pending[1]
    with pytest.raises(ValueError, match="step 1 is not the oldest launch in flight"):
        driver.scheduler.settle(schedule, result)


def test_result_for_another_owner_of_the_slot_is_never_taken():
    driver = Driver(config())
    driver.submit(endless())
    driver.launch()
    driver.scheduler._ledger.generation[0] += 1
    schedule, result = driver.device.settle()
    with pytest.raises(AssertionError, match="a slot keeps its owner"):
        driver.scheduler.settle(schedule, result)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RowFault.BAD_ID, "its slot's id lay outside the vocabulary"),
        (RowFault.NONFINITE_KV, "a key or value was not finite"),
        (RowFault.NONFINITE_LOGITS, "a logit was not finite"),
        (None, "0 ids came back where one was due"),
    ],
    ids=["id", "kv", "logits", "nothing"],
)
def test_flagged_row_fails_its_request_by_name_and_no_other(fault, message):
    driver = Driver(config())
    driver.submit(endless("good"))
    driver.submit(endless("bad", length=9))
    driver.launch()
    driver.launch()
    schedule, result = driver.device.settle()
    slot = next(c.slot for c in driver.scheduler._requests["bad"].choices)
    row = schedule.slots.tolist().index(slot)
    if fault is None:
        result.num_new[row] = 0
    else:
        result.faults[row] = fault
    driver.scheduler.settle(schedule, result)
    deltas = driver.scheduler.take_deltas()
    (failed,) = [delta for delta in deltas if delta.request_id == "bad"]
    assert failed.finish_reason == "error" and message in failed.error and "'bad'" in failed.error
    for delta in deltas:
        if delta.request_id == "good":
            driver._take(delta, is_cutting=False)
    driver.run()
    assert driver.finished["good", 0].finish_reason == "length"
    driver.submit(endless("next", length=9))
    driver.run()
    assert driver.finished["next", 0].num_cached_tokens == 0, "a faulty page was cached"


def named_in(driver):
    """Requests of the oldest launch in flight."""
    owners = driver.scheduler._owners
    return {owners[slot].request.request_id for slot in driver.device.pending[0][0].slots}


def test_failed_launch_is_run_again_and_a_request_it_meets_twice_ends():
    driver = Driver(config(max_chunk=2, token_budget=2, max_chunk_rows=1))
    for name in "abc":
        driver.submit(endless(name, length=6))
    for _ in range(6):
        driver.step(depth=1)
    driver.launch()
    assert driver.scheduler.num_running == 3
    named = named_in(driver)
    assert 0 < len(named) < 3
    with pytest.raises(ValueError, match="0 launches are void but 1 are in flight"):
        driver.scheduler.void([], "no")
    driver.fail()
    assert not driver.finished
    assert driver.scheduler.stats.num_idle_pages == (0,)
    assert driver.scheduler.stats.num_resumed == len(named)
    while True:
        driver.launch()
        if again := named & named_in(driver):
            break
        driver.settle()
    driver.fail()
    assert {name for (name, _) in driver.finished} == again
    for name in again:
        error = driver.finished[name, 0].error
        assert f"request {name!r} was in two failed launches" in error
        assert "the device failed" in error
    driver.run()
    reasons = {name: delta.finish_reason for (name, _), delta in driver.finished.items()}
    assert reasons == {name: "error" if name in again else "length" for name in "abc"}


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_streams_go_on_without_a_gap_or_a_repeat_after_launches_were_lost(depth, num_steps):
    driver = Driver(config(max_chunk=3, token_budget=6))
    for name, params in (
        ("plain", {}),
        ("several", {"n": 2}),
        ("scored", {"prompt_logprobs": 1, "logprobs": 1}),
    ):
        driver.submit(endless(name, length=7, max_tokens=9, **params))
    for _ in range(num_steps):
        driver.step(depth)
    driver.launch()
    driver.fail()
    driver.run(depth)  # compares ids and numbers with a solo run
    assert {delta.finish_reason for delta in driver.finished.values()} == {"length"}
    assert len(driver.finished) == 4
    assert driver.scheduler.stats.num_resumed > 0


# Order and preemption.


def test_first_come_first_served_and_a_large_head_is_not_skipped():
    driver = Driver(config(max_rows=2, max_slots=2, groups=(GroupConfig(7, 4),)))
    driver.submit(endless("a", length=12, max_tokens=4))
    driver.submit(endless("large", length=20, max_tokens=2))
    driver.submit(endless("small", length=1, max_tokens=2))
    driver.run()
    assert list(driver.finished) == [("a", 0), ("large", 0), ("small", 0)]


def test_lower_priority_number_runs_first_under_the_priority_policy():
    driver = Driver(config(policy="priority", max_rows=1, max_slots=1))
    for name, priority in [("a", 5), ("b", 1), ("c", 1), ("d", 0)]:
        driver.submit(endless(name, priority=priority))
    driver.run()
    assert [name for name, _ in driver.finished] == ["d", "b", "c", "a"]


def test_newest_choice_is_preempted_and_the_oldest_never():
    # Ledger row SCHED-17: seeded output equals the run without preemption.
    driver = Driver(config(groups=(GroupConfig(9, 4),), prefix_cache=False))
    for name in "abcd":
        driver.submit(endless(name, length=4, max_tokens=24))
    victims = []
    original = driver.scheduler._preempt

    def preempt(slot):
        victims.append(driver.scheduler._owners[slot].request.request_id)
        original(slot)

    driver.scheduler._preempt = preempt
    driver.run()
    assert victims and "a" not in victims and victims[0] == "d"
    assert [name for name, _ in driver.finished] == ["a", "b", "c", "d"]


def test_admission_keeps_a_page_for_each_running_row():
    driver = Driver(config(groups=(GroupConfig(4, 4),), prefix_cache=False))
    driver.submit(endless("a", length=4, max_tokens=4))
    driver.submit(endless("b", length=8, max_tokens=1))
    driver.launch()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 1)
    driver.run()
    assert driver.scheduler.stats.num_preemptions == 0


def test_nobody_overtakes_a_preempted_choice_whose_launches_are_in_flight():
    driver = Driver(config(groups=(GroupConfig(99, 4),)))
    driver.submit(endless("a"))
    driver.launch()
    driver.launch()
    driver.scheduler._preempt(driver.scheduler._requests["a"].choices[0].slot)
    driver.submit(endless("b"))
    assert not driver.launch() and driver.scheduler.num_waiting == 1
    driver.settle()
    assert not driver.launch()
    driver.settle()
    assert driver.launch() and driver.scheduler.num_waiting == 0
    driver.run()


def test_outputs_in_flight_at_a_preemption_are_kept_once_and_resume_waits():
    # Ledger rows SCHED-02 and SCHED-15.
    driver = Driver(config(groups=(GroupConfig(9, 4),), prefix_cache=False))
    for name in "abcd":
        driver.submit(endless(name, length=4, max_tokens=24))
    while not driver.scheduler._draining:
        driver.step(depth=3)
    (choice,) = driver.scheduler._draining
    before = len(driver.ids[choice.request.request_id, 0])
    slot, in_flight = choice.slot, int(driver.scheduler._ledger.num_in_flight[choice.slot])
    assert in_flight > 0
    for left in range(in_flight, 0, -1):
        assert choice.slot == slot and driver.scheduler._ledger.num_in_flight[slot] == left
        driver.settle()
    assert choice.slot == -1
    assert len(driver.ids[choice.request.request_id, 0]) == before + in_flight
    driver.run(depth=3)


def test_deterministic_resume_replays_outputs_as_decode_rows_from_the_host():
    driver = Driver(config(deterministic=True, groups=(GroupConfig(9, 4),), prefix_cache=False))
    for name in "abcd":
        driver.submit(endless(name, length=4, max_tokens=24))
    replays = 0
    while not driver.scheduler.is_idle:
        schedule = driver.scheduler.schedule()
        if schedule is not None:
            driver.device.launch(schedule)
            is_replay = (schedule.kinds & (RowKind.DECODE | RowKind.DEVICE_ID)) == RowKind.DECODE
            replays += int(is_replay.sum())
        driver._check()
        if len(driver.device.pending) >= 2 or schedule is None:
            driver.settle()
    assert replays > 0 and len(driver.finished) == 4


def test_deterministic_steps_are_never_mixed_and_take_turns():
    driver = Driver(config(deterministic=True, max_chunk=2))
    driver.submit(endless("a", length=2))
    driver.step()
    driver.submit(endless("b", length=12))
    kinds = []
    for _ in range(6):
        schedule = driver.scheduler.schedule()
        driver.device.launch(schedule)
        assert schedule.num_decode in (0, schedule.num_rows)
        kinds.append(schedule.is_decode)
    assert kinds == [True, False] * 3
    driver.run()


# Choices.


def test_choices_differ_hit_the_first_ones_pages_and_end_alone():
    driver = Driver(config(max_chunk=4))
    driver.submit(endless(length=13, n=3))
    driver.launch()
    assert driver.scheduler.num_running == 1 and driver.scheduler.num_waiting == 2
    for _ in range(6):
        driver.step()
    assert driver.scheduler.num_running == 3, "they start when its prompt is settled"
    driver.run()
    assert [driver.finished["a", choice].num_cached_tokens for choice in range(3)] == [0, 12, 12]
    assert len({tuple(ids) for ids in driver.ids.values()}) == 3


def test_choices_that_wait_for_an_aborted_first_one_still_run():
    driver = Driver(config(max_chunk=4))
    driver.submit(endless(length=13, n=3))
    driver.launch()
    driver.abort("a", choice=0)
    driver.run()
    assert [driver.finished["a", choice].finish_reason for choice in range(3)] == [
        "abort",
        "length",
        "length",
    ]


# Prompt log-probabilities.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("start", [0, 1, 2, 5, 9, 12, 13, 40])
def test_prompt_logprobs_are_complete_cold_and_warm(start, deterministic):
    driver = Driver(config(max_chunk=5, deterministic=deterministic))
    for name in "ab":
        driver.submit(endless(name, length=13, n=2, prompt_logprobs=2, prompt_logprobs_start=start))
        driver.run()
        assert len(driver.prompt_logprobs[name, 0]) == max(0, 13 - start)
        assert (name, 1) not in driver.prompt_logprobs
    cached = driver.finished["b", 0].num_cached_tokens
    assert cached == (0 if deterministic else min(max(start, 1) - 1, 12) // 4 * 4)


def test_prompt_logprobs_of_one_token_are_one_none():
    driver = Driver(config())
    driver.submit(endless(length=1, prompt_logprobs=0))
    driver.run()
    assert driver.prompt_logprobs["a", 0] == (None,)


def test_only_chunks_that_score_a_wanted_position_run_the_score_head():
    driver = Driver(config(max_chunk=4))
    driver.submit(endless(length=13, max_tokens=2, prompt_logprobs=0, prompt_logprobs_start=6))
    scores = [driver.scheduler.schedule().scores_prompt for _ in range(5)]
    assert scores == [False, True, True, False, False]


def test_scored_prompts_share_no_step_with_others_in_deterministic_mode():
    driver = Driver(config(deterministic=True, max_chunk=4))
    driver.submit(endless("scored", length=8, prompt_logprobs=0, prompt_logprobs_start=6))
    driver.submit(endless("plain", length=8))
    first = driver.scheduler.schedule()
    assert first.scores_prompt and first.num_rows == 1
    driver.device.launch(first)
    driver.run()


# Idle.


def test_nothing_is_left_after_many_short_requests():
    # Ledger row SCHED-05.
    driver = Driver(config())
    for name in range(300):
        driver.submit(endless(str(name), length=1 + name % 9, max_tokens=1 + name % 3))
        driver.step()
        if name % 7 == 0:
            driver.abort(str(name))
    driver.run()
    scheduler = driver.scheduler
    assert not scheduler._requests and not scheduler._draining
    assert not scheduler._passed and not scheduler._queue._heap
    assert scheduler.schedule() is None and scheduler.take_deltas() == []


def test_aborted_requests_do_not_pile_up_behind_a_blocked_head():
    driver = Driver(config(max_rows=1, max_slots=1))
    driver.submit(endless("a"))
    driver.launch()
    driver.submit(endless("head"))
    for name in range(200):
        driver.scheduler.submit(endless(str(name)))
        driver.scheduler.abort(str(name))
    assert len(driver.scheduler._queue._heap) < 40
    driver.scheduler.take_deltas()
    driver.run()
