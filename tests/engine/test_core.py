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


def raise_from_call(function, at: int, is_after: bool = False):
    """`function`, which raises from its call number `at` on, after having run or instead."""
    calls = itertools.count(1)

    def failing(*args):
        is_failing = next(calls) >= at
        result = None if is_failing and not is_after else function(*args)
        if is_failing:
            raise RuntimeError("the device fell over")
        return result

    return failing


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    ("stage", "is_after"),
    [("pack", False), ("launch", False), ("launch", True), ("settle", False)],
    ids=["packing", "before the launch", "donated state lost", "read-back"],
)
def test_failed_step_fails_what_was_in_flight_and_nothing_after(
    core, requests, expected, monkeypatch, at, stage, is_after
):
    outputs: loop.Outputs = {}
    for one in requests[:2]:
        core.submit(one)
    function = getattr(core.runner, stage)
    monkeypatch.setattr(core.runner, stage, raise_from_call(function, at, is_after))
    with pytest.raises(RuntimeError, match="the device fell over"):
        while core.step():
            loop.take(core, outputs)
    monkeypatch.undo()
    core.recover("a launch failed: the device fell over")
    core.scheduler.audit()
    loop.run(core, requests[2:], outputs)
    for key, one in outputs.items():
        assert one.token_ids == expected[key].token_ids[: len(one.token_ids)]
    failed = {key[0]: one.error for key, one in outputs.items() if one.finish_reason == "error"}
    assert "short" in failed and failed.keys() <= {"short", "chunked"}
    assert set(failed.values()) == {"a launch failed: the device fell over"}
    whole = {key: one.token_ids for key, one in outputs.items() if key[0] not in failed}
    assert len(whole) >= 3 and whole == {key: ids_of(expected)[key] for key in whole}


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
        return jax.device_put(values, runner.shapes.pool_sharding)

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
