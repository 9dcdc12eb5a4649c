"""The A/B/C gate of the toy with a recurrent and a window group: what it asks of every model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.scheduling.schedule import Schedule
from tests.contract import recurrent, three_runs
from tests.contract import test_three_runs as gate
from tests.contract.three_runs import Played, Player, Step


class Script(three_runs.Script):
    """Each slot owns two states: every other of its rows writes the one it does not read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        num_slots = len(self._num_tokens)
        # Backwards, so that no state stands at the place of its slot.
        self._states = 1 + np.arange(2 * num_slots, dtype=np.int32)[::-1].reshape(num_slots, 2)

    def schedule(self, step: Step) -> Schedule:
        schedule = super().schedule(step)
        slots = schedule.slots
        state_ids = self._states[slots]
        if schedule.step % 2:
            self._states[slots] = state_ids[:, ::-1]
        else:
            state_ids[:, 1] = state_ids[:, 0]
        return dataclasses.replace(schedule, state_ids=(state_ids,))


@pytest.fixture(scope="module", params=["compiled", "eager"])
def lane(request) -> three_runs.LaneForm:
    return request.param


@pytest.fixture(scope="module")
def player(lane, tmp_path_factory) -> Iterator[Player]:
    name = recurrent.REGISTRATION.architecture
    with pytest.MonkeyPatch.context() as monkeypatch:
        recurrent.register(monkeypatch)
        monkeypatch.setitem(three_runs.ROWS, name, "recurrent")
        monkeypatch.setattr(three_runs, "Script", Script)
        runner = three_runs.start(name, lane, tmp_path_factory.mktemp(name))
        yield Player(runner, name)
    runner.close()


@pytest.fixture(scope="module")
def reference(player) -> Played:
    return player.reference()


@pytest.fixture(params=["zero", "valid"])
def poison(request, reference) -> int:
    """0, and an id of the vocabulary that no row of the scene ever embeds or samples."""
    return (
        0 if request.param == "zero" else next(i for i in range(7, 131) if i not in reference.truth)
    )


def test_toy_reference_reads_true_ids_from_the_host_alone(reference, lane):
    gate.test_reference_reads_true_ids_from_the_host_alone(reference, lane)
    state_ids = np.concatenate([one.state_ids[0] for one in reference.schedules])
    in_place = state_ids[:, 0] == state_ids[:, 1]
    assert in_place.any() and not in_place.all()


def test_toy_control_with_poisoned_ids_differs_in_every_decode_row(player, reference, poison):
    gate.test_control_with_poisoned_ids_differs_in_every_decode_row(player, reference, poison)


def test_toy_with_ids_on_the_device_alone_equals_the_reference_bit_for_bit(
    player, reference, poison
):
    gate.test_ids_on_the_device_alone_equal_the_reference_bit_for_bit(player, reference, poison)


def test_toy_flags_the_row_of_an_id_that_was_never_written_and_no_other(player, reference):
    gate.test_id_that_was_never_written_flags_its_row_and_no_other(player, reference)
