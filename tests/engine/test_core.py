"""A Core over its life: aborts at any moment, failed launches, poisoned pages, a clean end."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import jax
import numpy as np
import pytest

from engine.core import Core
from engine.request import Request
from tests.engine import loop
from tests.families import tiny


@pytest.fixture
def core(llama_core) -> Core:
    return loop.rescheduled(llama_core)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        loop.request("short", tiny.random_ids("llama", 5), 9),
        loop.request("chunked", tiny.random_ids("llama", 60), 7),
        loop.request("sampled", tiny.random_ids("llama", 12), 8, temperature=1.0, n=2),
        loop.request("late", tiny.random_ids("llama", 33), 6),
    ]


@pytest.fixture(scope="module")
def expected(llama_core, requests) -> loop.Outputs:
    return loop.run(loop.rescheduled(llama_core), requests)


def ids_of(outputs: loop.Outputs) -> dict[tuple[str, int], list[int]]:
    return {key: one.token_ids for key, one in outputs.items()}


@pytest.mark.parametrize("victim", ["short", "chunked", "sampled"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_abort_after_any_number_of_steps_disturbs_nobody(
    llama_core, requests, expected, victim, depth
):
    last = 14
    reasons = set()
    for num_steps in range(last + 1):
        core = loop.rescheduled(llama_core, depth=depth)
        outputs: loop.Outputs = {}
        for one in requests:
            core.submit(one)
        for _ in range(num_steps):
            core.step()
        core.abort(victim)
        while not core.is_idle:
            core.step()
            loop.take(core, outputs)
        loop.take(core, outputs)
        loop.assert_released(core)
        for key, output in outputs.items():
            count = len(output.token_ids)
            assert output.token_ids == expected[key].token_ids[:count]
            if key[0] == victim:
                reasons.add(output.finish_reason)
            else:
                assert count == len(expected[key].token_ids)
                assert output.finish_reason == expected[key].finish_reason
        assert outputs.keys() == expected.keys()
    assert reasons == {"abort", "length"}, "the last aborts come too late, the first ones do not"


def test_aborting_everything_with_launches_in_flight_leaves_nothing(core, requests):
    for one in requests:
        core.submit(one)
    for _ in range(3):
        core.step()
    assert core.scheduler.stats.num_in_flight > 0
    for one in requests:
        core.abort(one.request_id)
        core.abort("nobody")
    while not core.is_idle:
        assert core.step()
    loop.assert_released(core)
    assert {delta.finish_reason for delta in core.poll() if delta.finish_reason} == {"abort"}
    assert not core.step() and not core.poll()


def raise_from_call(function, at: int, is_after: bool = False, count: int = 10**9):
    """`function`, which raises from its call number `at` on, after having run or instead."""
    calls = itertools.count(1)

    def failing(*args):
        is_failing = at <= next(calls) < at + count
        result = None if is_failing and not is_after else function(*args)
        if is_failing:
            raise RuntimeError("the device fell over")
        return result

    return failing


STAGES = pytest.mark.parametrize(
    ("stage", "is_after"),
    [("pack", False), ("launch", False), ("launch", True), ("settle", False)],
    ids=["packing", "before the launch", "donated state lost", "read-back"],
)


def recovering(core: Core, outputs: loop.Outputs, submitted: list[Request]) -> int:
    """Runs all requests to their ends as the engine's thread does; returns the failed steps."""
    num_failures = 0
    for one in submitted:
        core.submit(one)
    while not core.is_idle:
        try:
            core.step()
        except RuntimeError as error:
            assert str(error) == "the device fell over"
            num_failures += 1
            core.recover("a fault made for the test")
            core.scheduler.audit()
        loop.take(core, outputs)
    loop.assert_released(core)
    return num_failures


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@STAGES
def test_failed_step_is_run_again_and_no_stream_shows_it(
    core, requests, expected, monkeypatch, at, stage, is_after
):
    outputs: loop.Outputs = {}
    failing = raise_from_call(getattr(core.runner, stage), at, is_after, count=1)
    monkeypatch.setattr(core.runner, stage, failing)
    assert recovering(core, outputs, requests) == 1
    assert ids_of(outputs) == ids_of(expected)
    assert {key: one.finish_reason for key, one in outputs.items()} == {
        key: one.finish_reason for key, one in expected.items()
    }
    stats = core.stats()
    assert stats.failed_launches == 1 and 1 <= stats.resumed_requests <= len(requests)


def test_request_in_two_failed_launches_ends_with_its_name_and_the_rest_goes_on(
    core, requests, expected, monkeypatch
):
    # The second launch of the first request fails, and so does its first one when it runs again.
    outputs: loop.Outputs = {}
    core.submit(requests[0])
    launch = core.runner.launch
    monkeypatch.setattr(core.runner, "launch", raise_from_call(launch, 2, count=2))
    assert recovering(core, outputs, []) == 2
    assert recovering(core, outputs, requests[1:]) == 0
    failed = outputs.pop(("short", 0))
    assert failed.finish_reason == "error" and failed.error is not None
    assert failed.error == (
        "request 'short' was in two failed launches, the last one by a fault made for the test"
    )
    whole = ids_of(expected)
    assert failed.token_ids == whole.pop(("short", 0))[: len(failed.token_ids)]
    assert ids_of(outputs) == whole


@STAGES
def test_device_that_never_settles_again_is_given_up(core, requests, monkeypatch, stage, is_after):
    failing = raise_from_call(getattr(core.runner, stage), 3, is_after)
    monkeypatch.setattr(core.runner, stage, failing)
    crowd = [dataclasses.replace(requests[0], request_id=f"r{i}") for i in range(40)]
    try:
        with pytest.raises(RuntimeError, match="6 steps failed with nothing settled between"):
            recovering(core, {}, crowd)
    finally:  # the runner is shared
        monkeypatch.undo()
        core.runner.reset_state()


def test_state_that_cannot_be_made_anew_is_the_end(core, requests, monkeypatch):
    core.submit(requests[0])
    core.step()
    programs = core.runner.programs
    broken = dataclasses.replace(programs, fresh=raise_from_call(programs.fresh, 1))
    monkeypatch.setattr(core.runner, "programs", broken)
    with pytest.raises(RuntimeError, match="the device fell over"):
        core.recover("a fault made for the test")
    monkeypatch.undo()
    core.runner.reset_state()


def test_prefixes_of_a_lost_state_are_not_found_again(core, requests, expected):
    loop.run(core, requests[1:2])
    core.recover("a fault made for the test")
    found = loop.run(core, requests[1:2])
    assert found["chunked", 0].num_cached_tokens == 0
    assert found["chunked", 0].token_ids == expected["chunked", 0].token_ids
    again = loop.run(core, [dataclasses.replace(requests[1], request_id="again")])
    assert again["again", 0].num_cached_tokens > 0


def test_poisoned_page_fails_its_request_by_name_and_nobody_else(core, requests, expected):
    outputs: loop.Outputs = {}
    for one in requests:
        core.submit(one)
    while len(outputs) < len(expected):
        core.step()
        loop.take(core, outputs)
    poison_first_page(core, "late")
    while not core.is_idle:
        core.step()
        loop.take(core, outputs)
    loop.assert_released(core)
    failed = outputs.pop(("late", 0))
    assert failed.finish_reason == "error" and failed.error is not None
    assert "'late'" in failed.error and "not finite" in failed.error
    assert failed.token_ids == expected["late", 0].token_ids[: len(failed.token_ids)]
    assert ids_of(outputs) == {key: ids_of(expected)[key] for key in outputs}


def poison_first_page(core: Core, request_id: str) -> None:
    """Writes NaN over the first page of a running request, in every layer."""
    slot = core.scheduler._requests[request_id].choices[0].slot
    page = int(core.scheduler._groups[0].table[slot, 0])
    assert page > 0
    runner = core.runner

    def poisoned(pool: jax.Array) -> jax.Array:
        values = np.array(pool)
        values[page] = np.nan
        return jax.device_put(values, pool.sharding)

    runner.state = runner.state.replace(pools=jax.tree.map(poisoned, runner.state.pools))


def test_unsuitable_requests_are_refused_and_the_rest_goes_on(core, requests, expected):
    core.submit(requests[0])
    with pytest.raises(ValueError, match="request_id 'short' is live already"):
        core.submit(requests[0])
    with pytest.raises(ValueError, match="needs 97 tokens but max_model_len is 96"):
        core.submit(dataclasses.replace(requests[1], request_id="long", max_tokens=37))
    found = loop.run(core, requests[1:])
    assert ids_of(found) == ids_of(expected)


def test_close_returns_all_arrays_five_times_and_another_engine_runs(
    tiny_llama, llama_core, requests, expected
):
    gc.collect()
    before = live_bytes()
    for _ in range(5):
        other = loop.start(
            tiny_llama, page_size=4, max_model_len=96, deterministic=True, num_pages=60
        )
        assert live_bytes() > before
        found = loop.run(other, requests)
        assert ids_of(found) == ids_of(expected)
        other.submit(requests[0])
        other.step()  # closed with a launch in flight
        other.close()
        del other
        gc.collect()
        assert live_bytes() == before
    # The first engine was there all the time.
    assert ids_of(loop.run(loop.rescheduled(llama_core), requests)) == ids_of(expected)


def live_bytes() -> tuple[int, int]:
    """Arrays alive in the process, and their bytes."""
    arrays = [one for one in jax.live_arrays() if not one.is_deleted()]
    return len(arrays), sum(one.nbytes for one in arrays)
