"""The A/B/C gate: every registration reads the ids that only the device has, on every lane."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from engine.scheduling.schedule import RowFault, RowKind, StepResult
from models import registry
from tests.contract import three_runs
from tests.contract.three_runs import ROWS, SCENE, SYNC_ONLY, Played, Player
from tests.families import tiny

NUM_DECODE = sum(len(step.decode) for step in SCENE)
NUM_CHUNKS = sum(len(step.chunks) for step in SCENE)


def test_every_registration_has_a_row_of_its_own():
    assert set(ROWS) == set(registry.architectures())
    for architecture, name in ROWS.items():
        assert tiny.config(name)["architectures"] == [architecture]


def test_registrations_without_a_third_run_are_those_that_declare_nothing():
    declared = {name: registry.get(name).device_token_ids for name in registry.architectures()}
    assert {name for name, is_declared in declared.items() if not is_declared} == set(SYNC_ONLY)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every registration, or those that the asked kind of player suits."""
    names = registry.architectures()
    if "declared_player" in metafunc.fixturenames:
        names = [name for name in names if name not in SYNC_ONLY]
    if "sync_only_player" in metafunc.fixturenames:
        names = SYNC_ONLY
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def architecture(request) -> str:
    assert request.param in ROWS, f"{request.param} has no row in tests/contract/three_runs.py"
    return request.param


@pytest.fixture(scope="module", params=["compiled", "eager"])
def lane(request) -> three_runs.LaneForm:
    return request.param


@pytest.fixture(scope="module")
def player(architecture, lane, tmp_path_factory):
    runner = three_runs.start(architecture, lane, tmp_path_factory.mktemp(architecture))
    yield Player(runner, architecture)
    runner.close()


@pytest.fixture(scope="module")
def declared_player(player) -> Player:
    """A player of a registration that is given ids from the device."""
    return player


@pytest.fixture(scope="module")
def sync_only_player(player) -> Player:
    """A player of a registration that never is."""
    return player


@pytest.fixture(scope="module")
def reference(player) -> Played:
    return player.reference()


@pytest.fixture(params=["zero", "valid"])
def poison(request, reference) -> int:
    """0, and an id of the vocabulary that no row of the scene ever embeds or samples."""
    if request.param == "zero":
        return 0
    return next(i for i in range(7, 131) if i not in reference.truth)


def fields(result: StepResult) -> dict[str, np.ndarray]:
    return {name: x for name, x in vars(result).items() if x is not None}


def assert_sound(played: Played) -> None:
    """Finite and unflagged: two NaN are neither equal nor different in a way that means much."""
    for result in played.results:
        assert np.isfinite(result.logprobs).all()
        assert not result.faults.any()
    for logits in played.logits:
        assert np.isfinite(logits).all()


def test_reference_reads_true_ids_from_the_host_alone(reference, lane):
    assert_sound(reference)
    assert 0 not in reference.truth
    assert reference.host_counts == reference.state_counts == (0, NUM_DECODE + NUM_CHUNKS)
    assert len(reference.logits) == (len(SCENE) if lane == "eager" else 0)
    num_new = [result.num_new.tolist() for result in reference.results]
    assert num_new[:5] == [[1, 1], [1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]


def test_slot_has_no_id_before_its_own_prompt_is_done(reference):
    before_last_chunk, after = reference.befores[3], reference.befores[4]
    assert int(before_last_chunk.last_tokens[2]) == -1
    assert int(after.last_tokens[2]) == int(reference.results[3].sampled[2, 0])
    prompt = reference.schedules[2].installs[0].known_ids
    assert np.array_equal(before_last_chunk.history[2, : len(prompt)], prompt)


def test_control_with_poisoned_ids_differs_in_every_decode_row(player, reference, poison):
    control = player.control(reference, poison)
    assert_sound(control)
    assert control.host_counts == control.state_counts == (0, NUM_DECODE + NUM_CHUNKS)
    for a, b, schedule in zip(reference.results, control.results, control.schedules, strict=True):
        differs = (a.sampled != b.sampled) | (a.logprobs != b.logprobs)
        assert differs[: schedule.num_decode].all()
        for name, first in fields(a).items():
            second = fields(b)[name][schedule.num_decode :]
            assert first[schedule.num_decode :].tobytes() == second.tobytes(), name


def test_ids_on_the_device_alone_equal_the_reference_bit_for_bit(
    declared_player, reference, poison
):
    gate = declared_player.gate(reference, poison)
    assert_sound(gate)
    assert gate.host_counts == gate.state_counts == (NUM_DECODE, NUM_CHUNKS)
    assert gate.keys == reference.keys
    for i, (a, c) in enumerate(zip(reference.results, gate.results, strict=True)):
        for name, first in fields(a).items():
            assert first.tobytes() == fields(c)[name].tobytes(), f"step {i}: {name}"
    for a, c in zip(reference.logits, gate.logits, strict=True):
        assert a.dtype == c.dtype == np.float32 and a.tobytes() == c.tobytes()
    assert state_of(gate) == state_of(reference)


def test_id_that_was_never_written_flags_its_row_and_no_other(declared_player, reference):
    step = 4
    assert reference.schedules[step].slots.tolist() == [2, 3, 0]
    result = declared_player.unwritten(reference, step, slot=3)
    assert result.faults.tolist() == [0, RowFault.BAD_ID, 0]
    others = [0, 2]
    for name, truth in fields(reference.results[step]).items():
        assert truth[others].tobytes() == fields(result)[name][others].tobytes(), name


def test_registration_that_declares_nothing_never_runs_a_row_from_the_device(
    sync_only_player, reference
):
    runner = sync_only_player.runner
    schedule = three_runs.poisoned(reference.schedules[4], 0, RowKind.DEVICE_ID)
    assert schedule.num_rows == 3
    num_device, num_host = runner.device_counters()
    assert num_device == runner.counters.device_rows == 0
    with pytest.raises(ValueError, match=r"row 0 .* from the device but .* does not declare"):
        runner.pack(schedule)
    assert runner.device_counters() == (0, num_host)
    assert runner.counters.device_rows == 0


def state_of(played: Played) -> list[tuple[str, bytes]]:
    """Every leaf of the final state but the counters and the trash page."""
    state = played.final
    assert state is not None
    pools = jax.tree.map(lambda pool: pool[1:], state.pools)
    state = dataclasses.replace(state, counters=state.counters * 0, pools=pools)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(path), np.asarray(leaf).tobytes()) for path, leaf in leaves]
