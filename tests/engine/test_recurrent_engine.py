"""A model with a recurrent and a window group on both lanes: no row reads a state not its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from engine.core import Core
from engine.execution import contract, startup
from engine.execution.buckets import ProgramKey
from engine.execution.packing import batch_ranges
from engine.execution.programs import compile_programs
from engine.execution.runner import Runner
from engine.execution.step import make_step
from engine.request import Request
from engine.scheduling.schedule import Schedule
from engine.scheduling.scheduler import Scheduler
from models.batch import Tiling
from models.cache import Cache, CacheSpec, RecurrentGroup
from tests.contract import recurrent
from tests.engine import loop
from tests.families import tiny


@pytest.fixture(scope="module")
def toy_core(tmp_path_factory) -> Iterator[Core]:
    """Started by the way every engine takes: both proofs hold for each of its programs."""
    path = tiny.write_checkpoint("recurrent", tmp_path_factory.mktemp("recurrent"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        recurrent.register(monkeypatch)
        core = loop.start(path, page_size=4, max_model_len=96)
    yield core
    core.close()


def on_lane(core: Core, lane: str, depth: int = 2, num_pages: int = 0, **changes: Any) -> Core:
    """A core over the same programs from an empty state, perhaps with fewer pages and states."""
    runner = core.runner
    runner.enter_lane(lane, depth)
    config = core.scheduler._config
    groups = tuple(
        group
        if group.is_recurrent or not num_pages
        else dataclasses.replace(group, num_pages=num_pages)
        for group in runner.groups
    )
    fields = {"groups": groups, "ids_from_host": lane == "sync"} | changes
    return Core(Watched(dataclasses.replace(config, **fields)), runner, core.info)


class Watched(Scheduler):
    """Keeps every schedule."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.schedules: list[Schedule] = []

    def schedule(self) -> Schedule | None:
        schedule = super().schedule()
        if schedule is not None:
            self.schedules.append(schedule)
        return schedule

    @property
    def written(self) -> list[set[int]]:
        """States written by each step."""
        return [set(one.state_ids[0][:, 1].tolist()) for one in self.schedules]


def prompt(length: int) -> np.ndarray:
    return tiny.random_ids("recurrent", length)


def ids_of(outputs: loop.Outputs) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return {key: (one.token_ids, one.finish_reason) for key, one in outputs.items()}


def truth(core: Core, requests: Iterable[Request]) -> loop.Outputs:
    """Every request alone on the sync lane, without a prefix cache."""
    outputs: loop.Outputs = {}
    for one in requests:
        loop.run(on_lane(core, "sync", prefix_cache=False), [one], outputs)
    return outputs


def crowd(count: int = 14, **params: Any) -> list[Request]:
    return [
        loop.request(f"r{i}", prompt(1 + i * 17 % 50), max_tokens=3 + i * 5 % 14, **params)
        for i in range(count)
    ]


def test_models_with_states_pack_them_and_others_pay_nothing(toy_core, llama_core):
    shapes = toy_core.runner.shapes
    assert (shapes.num_groups, shapes.num_recurrent) == (1, 1)
    assert [group.is_recurrent for group in toy_core.runner.groups] == [True, False]
    num_states = toy_core.runner.settings.max_slots * 2 + 1
    assert shapes.state.states[0][0].shape == (num_states, 32)
    assert toy_core.runner.plan.states == num_states * 32 * 4
    plan = toy_core.runner.plan
    assert plan.total - dataclasses.replace(plan, states=0).total == plan.states
    assert "recurrent states" in str(plan)
    key = next(iter(toy_core.runner.programs.steps))
    assert batch_ranges(key, 1, 1).size == batch_ranges(key, 1).size + 2 * key.rows
    plain = llama_core.runner
    assert plain.shapes.num_recurrent == 0 and plain.state.states == ()
    assert plain.plan.states == 0 and "recurrent states" not in str(plain.plan)


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("depth", [2, 3])
def test_crowd_on_the_overlap_lane_equals_each_request_alone(toy_core, prefix_cache, depth):
    expected = ids_of(truth(toy_core, crowd()))
    core = on_lane(toy_core, "overlap", depth, prefix_cache=prefix_cache)
    found = loop.run(core, crowd())
    assert ids_of(found) == expected
    assert core.stats().device_rows > 0
    assert core.runner.device_counters()[0] > 0


@pytest.mark.parametrize("lane", ["overlap", "sync"])
def test_late_row_after_an_end_leaves_nothing_in_the_state_of_the_next_owner(toy_core, lane):
    (whole,) = truth(toy_core, [loop.request("a", prompt(9), 12)]).values()
    stop_id = whole.token_ids[4]
    end = whole.token_ids.index(stop_id) + 1
    requests = [
        loop.request("a", prompt(9), 12, stop_ids=(stop_id,)),
        loop.request("b", prompt(2), 8),
    ]
    core = on_lane(toy_core, lane, max_rows=1, max_slots=1, prefix_cache=False)
    found = loop.run(core, requests)
    assert found["a", 0].token_ids == whole.token_ids[:end]
    assert found["a", 0].finish_reason == "stop"
    assert ids_of(found) == ids_of(truth(toy_core, requests))
    num_late = sum(len(one.slots) for one in core.scheduler.schedules) - end - 8
    assert num_late == (1 if lane == "overlap" else 0)
    assert len(set.union(*core.scheduler.written)) == 1, "both wrote the same state"


def test_slot_and_state_of_an_aborted_request_serve_the_next(toy_core):
    later = loop.request("b", prompt(10), 8)
    expected = truth(toy_core, [later])["b", 0].token_ids
    for num_steps in range(1, 6):
        core = on_lane(toy_core, "overlap", 2, max_rows=1, max_slots=1, prefix_cache=False)
        core.submit(loop.request("a", prompt(13), 20))
        for _ in range(num_steps):
            core.step()
        assert core._in_flight, "its late rows write the state after the abort"
        core.abort("a")
        core.poll()
        found = loop.run(core, [later])
        assert found["b", 0].token_ids == expected
        assert len(set.union(*core.scheduler.written)) == 1, "both wrote the same state"


@pytest.mark.parametrize("lane", ["overlap", "sync"])
def test_preempted_requests_resume_with_the_state_they_would_have_had(toy_core, lane):
    requests = [loop.request(f"r{i}", prompt(2 + i), 22) for i in range(5)]
    expected = ids_of(truth(toy_core, requests))
    # Each is admitted with a page or two and grows to the three that a window of 6 tokens needs.
    core = on_lane(toy_core, lane, num_pages=9, prefix_cache=False)
    found = loop.run(core, requests)
    assert core.stats().preemptions > 0
    assert ids_of(found) == expected


@pytest.mark.parametrize("lane", ["overlap", "sync"])
@pytest.mark.parametrize("length", [9, 12, 13, 40])
def test_hit_goes_on_from_a_snapshot_and_equals_the_cold_run_bit_for_bit(toy_core, lane, length):
    core = on_lane(toy_core, lane)
    said, cached = [], []
    for name in ("cold", "warm", "warmer"):
        one = dataclasses.replace(loop.request(name, prompt(length), 10, logprobs=3), seed=5)
        output = loop.run(core, [one])[name, 0]
        said.append(output.said)
        cached.append(output.num_cached_tokens)
    border = (length - 1) // 4 * 4
    assert cached == [0, border, border]
    assert said[0] == said[1] == said[2]
    (alone,) = truth(toy_core, [loop.request("alone", prompt(length), 10)]).values()
    assert list(said[0][0]) == alone.token_ids


def test_two_hits_of_one_snapshot_run_side_by_side_with_prompts_of_their_own(toy_core):
    start = prompt(21)
    requests = [
        loop.request(name, np.concatenate([start[:20], prompt(length)]), 9)
        for name, length in [("b", 3), ("c", 5)]
    ]
    expected = ids_of(truth(toy_core, requests))
    core = on_lane(toy_core, "overlap")
    loop.run(core, [loop.request("a", start, 4)])
    found = loop.run(core, requests)
    assert [one.num_cached_tokens for one in found.values()] == [20, 20]
    assert ids_of(found) == expected
    rows = next(one for one in core.scheduler.schedules if len(one.installs) == 2)
    (first, second) = rows.state_ids[0].tolist()
    assert first[0] == second[0] and len({first[0], first[1], second[1]}) == 3


def test_choices_of_one_request_go_on_from_its_snapshot(toy_core):
    one = loop.request("a", prompt(14), 8, n=3, temperature=0.8)
    expected = ids_of(loop.run(on_lane(toy_core, "sync", prefix_cache=False), [one]))
    found = loop.run(on_lane(toy_core, "overlap"), [one])
    assert [found["a", i].num_cached_tokens for i in range(3)] == [0, 12, 12]
    assert ids_of(found) == expected


@pytest.mark.parametrize("lane", ["overlap", "sync"])
def test_state_advances_once_for_every_token_and_a_sampled_id_is_written_once(toy_core, lane):
    core = on_lane(toy_core, lane, prefix_cache=False)
    requests = [loop.request(f"r{i}", prompt(5 + 3 * i), 4 + i) for i in range(4)]
    outputs: loop.Outputs = {}
    for one in requests:
        core.submit(one)
    expected: dict[int, np.ndarray] = {}
    while not core.is_idle:
        core.step()
        loop.take(core, outputs)
        for schedule in core.scheduler.schedules:
            for install, (_, state) in zip(schedule.installs, schedule.state_ids[0], strict=False):
                expected[int(state)] = install.known_ids
    table = np.asarray(core.params["embed"].kernel)
    pool = np.asarray(core.runner.state.states[0][0])
    by_prompt = {one.prompt_ids.tobytes(): outputs[one.request_id, 0] for one in requests}
    assert len(expected) == 4
    for state, prompt_ids in expected.items():
        # The last output is never fed back.
        ids = [*prompt_ids, *by_prompt[prompt_ids.tobytes()].token_ids[:-1]]
        total = np.zeros(32, np.float32)
        for token_id in ids:
            total = np.float32(0.75) * total + table[token_id]
        np.testing.assert_allclose(pool[state], total, rtol=1e-5, atol=1e-5)


def test_padding_rows_write_the_trash_state_alone(toy_core):
    core = on_lane(toy_core, "overlap", prefix_cache=False)
    loop.run(core, [loop.request("a", prompt(6), 5)])
    (state,) = set.union(*core.scheduler.written)
    pool = np.asarray(core.runner.state.states[0][0])
    changed = np.flatnonzero(pool.any(axis=1)).tolist()
    assert state in changed and set(changed) <= {0, state}


def test_state_that_is_not_finite_flags_its_row_and_is_kept_out_of_the_pool(toy_core):
    core = on_lane(toy_core, "overlap", prefix_cache=False)
    runner = core.runner
    core.submit(loop.request("bad", prompt(6), 9))
    core.submit(loop.request("good", prompt(7), 9))
    for _ in range(3):
        core.step()
    bad, good = core.scheduler.schedules[-1].state_ids[0][:, 1].tolist()
    slots = core.scheduler.schedules[-1].slots.tolist()
    if core.scheduler._owners[slots[0]].request.request_id != "bad":
        bad, good = good, bad
    pool = runner.state.states[0][0].at[bad].set(jnp.inf)
    runner.state = dataclasses.replace(runner.state, states=((pool,),))
    found = loop.run(core, [])
    assert found["bad", 0].finish_reason == "error"
    assert "a recurrent state" in found["bad", 0].error
    assert found["good", 0].finish_reason == "length"
    assert np.isfinite(np.asarray(runner.state.states[0][0])).all()


def decode_key(core: Core) -> ProgramKey:
    return next(k for k in core.runner.programs.steps if k.is_decode and k.sampler == "greedy")


def proved(core: Core, forward: Any) -> list[str]:
    """What the start-up proofs say of the greedy decode program of another forward."""
    base = core.runner
    model = dataclasses.replace(
        base.model, registration=dataclasses.replace(recurrent.REGISTRATION, forward=forward)
    )
    shapes, key = dataclasses.replace(base.shapes, model=model), decode_key(core)
    programs = compile_programs(shapes, [key], base.programs.install_shape, lambda *_: None)
    runner = Runner(base.settings, model, base.params, programs, shapes, base.plan, base.guard)
    return [f"{one.proof}: {one.reason}" for one in contract.prove_program(runner, key)]


def stale(config, params, cache, token_ids, batch, *, tap=recurrent.identity):
    """Hidden states of the state alone, to which this step's ids are added too late."""
    hidden, after = recurrent.forward(config, params, cache, token_ids, batch, tap=tap)
    before, _ = recurrent.forward(config, params, cache, jnp.zeros_like(token_ids), batch, tap=tap)
    return before + 0 * hidden, after


def test_start_up_proofs_hold_for_the_toy_and_refuse_a_forward_that_reads_old_states(toy_core):
    on_lane(toy_core, "overlap")
    assert proved(toy_core, recurrent.forward) == []
    reasons = proved(toy_core, stale)
    assert len(reasons) == 1
    assert reasons[0].startswith("dynamic: run B (poisoned ids) equals run A")


def lossy(config, params, cache, token_ids, batch, *, tap=recurrent.identity):
    """Leaves the pool of states out of the new cache."""
    hidden, after = recurrent.forward(config, params, cache, token_ids, batch, tap=tap)
    return hidden, Cache(after.pools, after.is_nonfinite)


def test_forward_that_drops_its_states_does_not_compile(toy_core):
    with pytest.raises(ValueError, match="pytree"):
        proved(toy_core, lossy)


def test_decode_rows_with_drafts_are_refused_by_name(toy_core):
    key = dataclasses.replace(decode_key(toy_core), query_len=2, tokens=16)
    with pytest.raises(NotImplementedError, match="query length 2 with a recurrent cache group"):
        make_step(toy_core.model, key, Tiling(), 1, 1)


def test_group_that_keeps_no_snapshots_gets_a_state_for_each_slot_alone(toy_core):
    settings = toy_core.runner.settings
    spec = toy_core.model.cache_spec(4, "float32")
    assert spec.snapshot_tokens(spec.recurrent[0]) == 4
    own = dataclasses.replace(spec.recurrent[0], snapshot_tokens=32)
    assert spec.snapshot_tokens(own) == 32 and own.state_bytes == 128
    plain = CacheSpec((dataclasses.replace(own, prefix_cacheable=False), *spec.paged))
    assert startup._num_states(settings, spec) == 2 * settings.max_slots + 1
    assert startup._num_states(settings, plain) == settings.max_slots + 1


def test_a_model_without_pages_is_refused():
    group = RecurrentGroup(layers=(0,), state_shape=(4,), dtype="float32")
    with pytest.raises(ValueError, match="no group has pages"):
        CacheSpec((group,))
