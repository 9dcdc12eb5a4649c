"""Overlap, sync and eager lanes say the same; counters tell which ran and whose ids were read."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import Core, CoreStats
from engine.execution import contract
from engine.execution.buckets import Ladder, ProgramKey
from engine.execution.programs import compile_programs
from engine.execution.runner import Runner
from engine.request import Request
from engine.scheduling.schedule import (
    POISON_ID,
    SAMPLING_COLUMNS,
    Install,
    RowKind,
    Schedule,
    StepResult,
)
from tests.engine import loop
from tests.families import tiny


@pytest.fixture(scope="module")
def qwen3_core(tmp_path_factory):
    path = tiny.write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    core = loop.start(path, page_size=4, max_model_len=96)
    yield core
    core.close()


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe"])
def family(request) -> str:
    return request.param


@pytest.fixture
def core(request, family) -> Core:
    return request.getfixturevalue(f"{family}_core")


SAMPLERS = {
    "greedy": {},
    "full": {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logprobs": 2,
    },
}


def crowd(family: str, sampler: str, count: int = 20, longest: int = 60) -> list[Request]:
    """Prompts of unequal length: late comers are prefilled beside rows that decode."""
    return [
        loop.request(
            f"{sampler}{i}",
            tiny.random_ids(family, 1 + i * 17 % longest),
            max_tokens=3 + i * 5 % 14,
            **SAMPLERS[sampler],
        )
        for i in range(count)
    ]


def ids_of(outputs: loop.Outputs) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """Tokens and end of each choice."""
    return {key: (one.token_ids, one.finish_reason) for key, one in outputs.items()}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_overlap_at_depth_2_and_3_equals_the_sync_lane(core, family, sampler):
    requests = crowd(family, sampler)
    sync = loop.rescheduled(core, ids_from_host=True)
    before = sync.stats()
    expected = loop.run(sync, requests)
    after = sync.stats()
    num_rows = sum(len(one.token_ids) for one in expected.values())
    assert num_rows == sum(one.max_tokens for one in requests)
    assert after.steps["sync"] > before.steps.get("sync", 0)
    assert after.steps.get("overlap") == before.steps.get("overlap")
    assert after.device_rows == before.device_rows
    on_device, on_host = sync.runner.device_counters()
    assert (on_device, on_host) == (0, after.host_rows - before.host_rows)
    for depth in (2, 3):
        overlap = loop.rescheduled(core, depth=depth)
        before = overlap.stats()
        found = loop.run(overlap, requests)
        after = overlap.stats()
        assert ids_of(found) == ids_of(expected)
        assert after.steps["overlap"] > before.steps.get("overlap", 0)
        assert after.steps.get("sync") == before.steps.get("sync")
        # Every token but a request's first is the child of an id that the host has not seen.
        on_device, on_host = overlap.runner.device_counters()
        assert on_device == after.device_rows - before.device_rows >= num_rows - len(requests)
        assert on_host == after.host_rows - before.host_rows >= len(requests)


def test_mixed_steps_have_decode_rows_and_chunks_together(llama_core, monkeypatch):
    overlap = loop.rescheduled(llama_core)
    schedules = []
    pack = overlap.runner.pack
    monkeypatch.setattr(
        overlap.runner, "pack", lambda schedule: schedules.append(schedule) or pack(schedule)
    )
    loop.run(overlap, crowd("llama", "greedy"))
    mixed = [one for one in schedules if 0 < one.num_decode < one.num_rows]
    assert any(one.num_rows >= 3 for one in mixed)
    assert any((one.kinds & RowKind.DEVICE_ID).any() for one in mixed)


# Op by op, a mixture of experts takes a minute; the gate of tests/contract runs its eager lane.
@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_eager_lane_equals_overlap(core, family, sampler):
    requests = crowd(family, sampler, count=4)
    requests = [dataclasses.replace(one, max_tokens=4) for one in requests]
    expected = loop.run(loop.rescheduled(core), requests)
    found, stats, counters = loop.apart(lambda: run_eager(core.info.model_path, requests))
    assert ids_of(found) == ids_of(expected)
    assert set(stats.steps) == {"eager"} and stats.steps["eager"] > 4
    assert counters == (stats.device_rows, stats.host_rows)
    assert stats.device_rows > 0


def run_eager(
    path: str, requests: list[Request]
) -> tuple[loop.Outputs, CoreStats, tuple[int, int]]:
    """Runs requests through a Core that compiles no program."""
    settings = {"page_size": 4, "max_model_len": 96, "row_rungs": (8,), "token_rungs": (64,)}
    eager = Core.start(EngineConfig(path, eager=True, token_budget=64, **settings))
    assert not eager.runner.programs.steps
    found: loop.Outputs = {}
    for one in requests:
        eager.submit(one)
    while not eager.is_idle:
        eager.step()
        loop.take(eager, found)
    loop.assert_released(eager)
    stats, counters = eager.stats(), eager.runner.device_counters()
    eager.close()
    return found, stats, counters


def test_a_compile_after_ready_stops_the_engine(llama_core):
    overlap = loop.rescheduled(llama_core)
    loop.run(overlap, [*crowd("llama", "greedy"), *crowd("llama", "full")])
    guard = overlap.runner.guard
    assert guard.num_own == 0
    jax.jit(lambda x: x * 3 + 40)(np.int32(1))
    loop.run(overlap, crowd("llama", "greedy", count=2))
    assert guard.num_own == 0 and guard.num_others > 0, "compiles between steps are legal"
    pack = overlap.runner.pack

    def compiling_pack(schedule):
        jax.jit(lambda x: x * 3 + 41)(np.int32(1))
        return pack(schedule)

    overlap.runner.pack = compiling_pack
    try:
        overlap.submit(crowd("llama", "greedy", count=1)[0])
        with pytest.raises(RuntimeError, match="1 compiles after ready on the engine's thread"):
            overlap.step()
        assert overlap.stats().compiles_after_ready == 1
    finally:
        guard.num_own = 0
        overlap.runner.pack = pack
        overlap.recover("the test is over")


def test_a_shape_outside_the_ladder_is_refused_by_name(llama_core):
    runner = llama_core.runner
    key = dataclasses.replace(next(iter(runner.programs.steps)), rows=5)
    with pytest.raises(KeyError, match="no compiled program for decode rows 5"):
        runner.programs.step(key)


@pytest.mark.parametrize("corrupt", [-1, 131, 2**31 - 1])
def test_stale_id_fails_its_request_by_name_and_nobody_else(llama_core, corrupt):
    requests = [
        dataclasses.replace(one, max_tokens=12) for one in crowd("llama", "greedy", count=6)
    ]
    expected = loop.run(loop.rescheduled(llama_core), requests)
    overlap = loop.rescheduled(llama_core)
    outputs: loop.Outputs = {}
    for one in requests:
        overlap.submit(one)
    while len(outputs) < len(requests):
        assert overlap.step()
        loop.take(overlap, outputs)
    victim = requests[2].request_id
    assert outputs[victim, 0].finish_reason is None
    corrupt_newest_id(overlap, victim, corrupt)
    while not overlap.is_idle:
        overlap.step()
        loop.take(overlap, outputs)
    loop.assert_released(overlap)
    failed = outputs.pop((victim, 0))
    truth = expected.pop((victim, 0)).token_ids
    assert failed.finish_reason == "error"
    assert failed.error is not None and repr(victim) in failed.error
    assert "outside the vocabulary" in failed.error
    assert failed.token_ids == truth[: len(failed.token_ids)]
    assert ids_of(outputs) == ids_of(expected)
    # The slot and its pages serve the next owner.
    again = loop.run(overlap, requests[2:3])
    assert again[victim, 0].token_ids == truth


def corrupt_newest_id(core: Core, request_id: str, token_id: int) -> None:
    """Overwrites what the device will take as the newest id of a running request."""
    slot = core.scheduler._requests[request_id].choices[0].slot
    runner = core.runner
    last_tokens = np.array(runner.state.last_tokens)
    last_tokens[slot] = token_id
    place = runner.shapes.replicated
    runner.state = runner.state.replace(last_tokens=jax.device_put(last_tokens, place))


class TestQueryLengths:
    """Programs of 8 rows x 1 token and 4 rows x 2 tokens: equal padded size, two programs."""

    NUM_TOKENS = 9

    @pytest.fixture
    def runner(self, wide_runner) -> Runner:
        wide_runner.reset_state()
        return wide_runner

    def test_are_two_programs_that_pass_both_proofs(self, runner):
        single, double = decode_keys(runner)
        assert single.tokens == double.tokens == 8 and single != double
        assert runner.programs.step(single) is not runner.programs.step(double)
        for key in (single, double):
            assert runner.programs.findings[key] == []
            assert not contract.warm_up(runner, key)

    def test_interleaved_rows_equal_their_solo_runs(self, runner):
        """Slots 0-3 advance by drafts, right or wrong, while all eight go on one by one."""
        prompts = [tiny.random_ids("llama", 3 + slot) for slot in range(8)]
        truth = [self.solo(runner, slot, prompt) for slot, prompt in enumerate(prompts)]
        runner.reset_state()
        script = Script(runner)
        said = [[token] for token in script.prefill(dict(enumerate(prompts)))]
        is_right = np.array([True, False, True, False])
        for turn in range(3):
            result = script.decode(range(8), [[]] * 8)
            assert result.num_new.tolist() == [1] * 8
            for slot, token in enumerate(result.sampled[:, 0].tolist()):
                said[slot].append(token)
            right = [truth[slot][len(said[slot])] for slot in range(4)]
            drafts = np.where(is_right ^ (turn == 1), right, (np.array(right) + 1) % 131)
            result = script.decode(range(4), [[int(draft)] for draft in drafts])
            assert result.num_new.tolist() == np.where(drafts == right, 2, 1).tolist()
            for slot in range(4):
                said[slot] += result.sampled[slot, : result.num_new[slot]].tolist()
                assert not result.sampled[slot, result.num_new[slot] :].any()
        for slot in range(8):
            assert said[slot] == truth[slot][: len(said[slot])], slot
            assert script.num_tokens[slot] == int(runner.state.num_tokens[slot])
        counts = {key.query_len: n for key, n in runner.counters.programs.items() if key.is_decode}
        assert counts[2] >= 3 and counts[1] >= 3

    def test_rows_equal_themselves_alone_bit_for_bit(self, runner):
        prompts = [tiny.random_ids("llama", 4 + slot) for slot in range(4)]
        for drafts in ([[]] * 4, [[5]] * 4):
            runner.reset_state()
            script = Script(runner)
            script.prefill(dict(enumerate(prompts)))
            together = script.decode(range(4), drafts)
            for slot, prompt in enumerate(prompts):
                runner.reset_state()
                script = Script(runner)
                script.prefill({slot: prompt})
                alone = script.decode([slot], drafts[:1])
                for name in ("sampled", "num_new", "logprobs", "ranks"):
                    found, expected = getattr(together, name)[slot], getattr(alone, name)[0]
                    assert found.tobytes() == expected.tobytes(), (name, slot, drafts)

    def solo(self, runner: Runner, slot: int, prompt: np.ndarray) -> list[int]:
        runner.reset_state()
        script = Script(runner)
        ids = script.prefill({slot: prompt})
        for _ in range(self.NUM_TOKENS):
            ids += script.decode([slot], [[]]).sampled[0].tolist()
        return ids


@dataclasses.dataclass(frozen=True)
class TwoShapes(Ladder):
    """Decode rows of one token run eight wide, those of two tokens four wide."""

    def key_of(self, schedule: Schedule) -> ProgramKey:
        is_wide = not schedule.is_decode or schedule.q_lens[0] == 1
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Ladder(**fields | {"rows": (8,) if is_wide else (4,)}).key_of(schedule)


@pytest.fixture(scope="module")
def wide_runner(llama_core) -> Runner:
    """A runner with decode programs of 8 x 1 and 4 x 2 tokens."""
    base = llama_core.runner
    fields = dataclasses.fields(Ladder)
    ladder = TwoShapes(
        **{field.name: getattr(base.settings.ladder, field.name) for field in fields}
        | {"query_lens": (1, 2)}
    )
    single = next(key for key in base.programs.steps if key.is_decode and key.sampler == "greedy")
    double = dataclasses.replace(single, rows=4, query_len=2)
    made = compile_programs(base.shapes, [double], base.programs.install_shape, lambda *_: None)
    programs = dataclasses.replace(
        base.programs,
        steps={**base.programs.steps, **made.steps},
        findings={**base.programs.findings, **made.findings},
    )
    settings = dataclasses.replace(base.settings, ladder=ladder)
    return Runner(settings, base.model, base.params, programs, base.shapes, base.plan, base.guard)


def decode_keys(runner: Runner) -> tuple[ProgramKey, ProgramKey]:
    """The greedy programs of 8 x 1 and 4 x 2."""
    found = {
        (key.rows, key.query_len): key
        for key in runner.programs.steps
        if key.is_decode and key.sampler == "greedy"
    }
    return found[8, 1], found[4, 2]


class Script:
    """Schedules written by hand: each slot owns the same pages from the start."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        slots = runner.settings.max_slots
        self.num_tokens = np.zeros(slots, np.int64)
        width = 6
        self.table = 1 + np.arange(slots * width, dtype=np.int32).reshape(slots, width)
        assert self.table.max() < runner.plan.num_pages

    def prefill(self, prompts: dict[int, np.ndarray]) -> list[int]:
        """Installs and runs whole prompts; returns the first id of each."""
        slots = np.array(list(prompts), np.int32)
        lens = np.array([len(ids) for ids in prompts.values()], np.int32)
        installs = tuple(Install(slot, ids, 0, (), (), (), ()) for slot, ids in prompts.items())
        self.num_tokens[slots] = 0
        result = self._run(
            slots, lens, np.concatenate(list(prompts.values())), RowKind.SAMPLES, installs
        )
        self.num_tokens[slots] = lens
        return result.sampled[:, 0].tolist()

    def decode(self, slots, drafts: list[list[int]]) -> StepResult:
        """One decode step of rows whose newest id only the device knows, drafts after it."""
        slots = np.array(list(slots), np.int32)
        ids = np.array([[POISON_ID, *draft] for draft in drafts], np.int32)
        lens = np.full(len(slots), ids.shape[1], np.int32)
        kind = RowKind.DECODE | RowKind.SAMPLES | RowKind.DEVICE_ID
        result = self._run(slots, lens, ids.reshape(-1), kind, ())
        self.num_tokens[slots] += result.num_new
        return result

    def _run(self, slots, lens, ids, kind: RowKind, installs) -> StepResult:
        schedule = Schedule(
            step=0,
            is_decode=bool(kind & RowKind.DECODE),
            is_full_sampler=False,
            scores_prompt=False,
            slots=slots,
            generations=np.zeros(len(slots), np.int64),
            kinds=np.full(len(slots), int(kind), np.int32),
            q_lens=lens,
            token_ids=ids.astype(np.int32),
            kv_lens=(self.num_tokens[slots] + lens).astype(np.int32),
            page_tables=(self.table[slots],),
            sampling={name: np.zeros(len(slots), dtype) for name, dtype in SAMPLING_COLUMNS},
            installs=installs,
        )
        result = self.runner.settle(self.runner.launch(self.runner.pack(schedule)))
        assert not result.faults.any()
        return result
