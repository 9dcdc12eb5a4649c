"""Only a declared registration is given device-owned ids; what others get, and who hears of it."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from engine.config import EngineConfig
from engine.core import Core
from engine.execution.settings import refuse_undeclared
from engine.serving import messages
from models import llama
from proto.treadle.v1 import generation_pb2 as pb
from tests.contract import undeclared
from tests.engine import loop
from tests.execution import toys
from tests.execution.toys import CHUNK, DECODE, LAST_CHUNK, LATE
from tests.families import tiny

DECLARED = llama.REGISTRATION

STEPS = {
    "prefill only": [(0, LAST_CHUNK, [5, 6], 0), (1, CHUNK, [7], 0)],
    "decode, ids on the host": [(0, DECODE, [5], 2), (1, DECODE, [6], 2), (2, DECODE, [7], 2)],
    "decode, ids on the device": [(0, LATE, [0], 2), (1, LATE, [0], 2), (2, LATE, [0], 2)],
    "mixed, ids on the host": [(0, DECODE, [5], 2), (3, DECODE, [6], 4), (1, CHUNK, [7, 8], 0)],
    "mixed, one id on the device": [(0, DECODE, [5], 2), (3, LATE, [0], 4), (1, CHUNK, [7, 8], 0)],
    "mixed, ids on the device": [(0, LATE, [0], 2), (3, LATE, [0], 4), (1, LAST_CHUNK, [7], 0)],
}
REFUSED = {
    "decode, ids on the device": (0, 0),
    "mixed, one id on the device": (1, 3),
    "mixed, ids on the device": (0, 0),
}
"""Row and slot of the first stale id of the steps that an undeclared forward must never run."""


@pytest.mark.parametrize("step", STEPS)
def test_declared_registration_is_given_every_step(step):
    assert refuse_undeclared(toys.schedule_of(STEPS[step]), DECLARED) is None


@pytest.mark.parametrize("step", STEPS)
def test_undeclared_registration_is_refused_exactly_the_steps_with_a_stale_host_id(step):
    schedule = toys.schedule_of(STEPS[step])
    if step not in REFUSED:
        assert refuse_undeclared(schedule, undeclared.UNDECLARED) is None
        return
    row, slot = REFUSED[step]
    with pytest.raises(ValueError) as refusal:
        refuse_undeclared(schedule, undeclared.UNDECLARED)
    assert str(refusal.value) == (
        f"row {row} (slot {slot}) takes its id from the device but UndeclaredForCausalLM does not "
        "declare device_token_ids; run it with every id from the host"
    )


@pytest.fixture
def checkpoint(request, monkeypatch, tmp_path):
    """A tiny Llama checkpoint under the name of a registration made for the test."""
    registration = request.param
    undeclared.register(registration, monkeypatch)
    name = registration.architecture
    return tiny.write_checkpoint("llama", tmp_path / "model", overrides={"architectures": [name]})


@pytest.fixture(scope="module")
def llama_core(tmp_path_factory):
    core = start(tiny.write_checkpoint("llama", tmp_path_factory.mktemp("llama")))
    yield core
    core.close()


def start(path, **fields) -> Core:
    return loop.start(path, page_size=4, max_model_len=96, **fields)


def crowd() -> list:
    return [
        loop.request(f"r{i}", tiny.random_ids("llama", 3 + 20 * i), max_tokens=6) for i in range(4)
    ]


@pytest.mark.parametrize("checkpoint", [undeclared.UNDECLARED], indirect=True)
def test_undeclared_registration_serves_on_the_sync_lane_and_says_so(
    checkpoint, llama_core, caplog
):
    with caplog.at_level(logging.WARNING):
        core = start(checkpoint, depth=3)
    assert [record.getMessage() for record in caplog.records] == [
        "UndeclaredForCausalLM runs on the sync lane: it does not declare device_token_ids, so "
        "every id comes from the host and no step overlaps the next"
    ]
    found = loop.run(core, crowd())
    stats = core.stats()
    assert (core.info.lane, core.info.depth) == ("sync", 1)
    facts = pb.GetServerInfoResponse()
    messages.fill_engine_facts(facts, core.info)
    assert facts.lane == "sync"
    assert set(stats.steps) == {"sync"} and stats.steps["sync"] > 6
    assert stats.device_rows == 0 and stats.host_rows > 20
    assert core.runner.device_counters() == (0, stats.host_rows)
    with pytest.raises(ValueError, match=r"row 0 .* UndeclaredForCausalLM does not declare"):
        core.runner.pack(toys.schedule_of(STEPS["decode, ids on the device"]))
    core.close()
    caplog.clear()
    expected = loop.run(llama_core, crowd())
    assert caplog.records == [] and llama_core.info.lane == "overlap"
    assert llama_core.stats().device_rows > 0
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in expected.items()
    }


@pytest.mark.parametrize("checkpoint", [undeclared.UNDECLARED], indirect=True)
def test_undeclared_registration_reads_host_ids_on_the_eager_lane_too(checkpoint):
    fields = {"page_size": 4, "max_model_len": 96, "row_rungs": (8,), "token_rungs": (64,)}
    core = Core.start(EngineConfig(str(checkpoint), eager=True, token_budget=64, **fields))
    for one in crowd()[:2]:
        core.submit(dataclasses.replace(one, max_tokens=3))
    outputs: loop.Outputs = {}
    while not core.is_idle:
        core.step()
        loop.take(core, outputs)
    stats = core.stats()
    assert [len(one.token_ids) for one in outputs.values()] == [3, 3]
    assert set(stats.steps) == {"eager"} and stats.device_rows == 0
    assert core.runner.device_counters() == (0, stats.host_rows)
    core.close()


@pytest.mark.parametrize("checkpoint", [undeclared.UNDECLARED], indirect=True)
def test_require_overlap_refuses_an_undeclared_registration(checkpoint):
    with pytest.raises(ValueError) as refusal:
        start(checkpoint, require_overlap=True)
    assert str(refusal.value) == (
        "require_overlap is set but the lane is sync: UndeclaredForCausalLM does not declare "
        "device_token_ids"
    )


@pytest.mark.parametrize("checkpoint", [undeclared.SINGLE], indirect=True)
def test_registration_of_one_row_is_refused_by_name_above_it(checkpoint):
    with pytest.raises(ValueError) as refusal:
        start(checkpoint, max_rows=2)
    assert str(refusal.value) == (
        "max_rows is 2 but SingleForCausalLM runs 1 rows a step; start with max_rows=1"
    )
