"""Only a declared registration is given device-owned ids; what others get, and who hears of it."""

from __future__ import annotations

import dataclasses
import logging
import pathlib

import pytest

from engine.config import EngineConfig
from engine.core import Core
from engine.execution.settings import refuse_undeclared
from engine.serving import messages
from models import llama, llama_host_embed
from proto.treadle.v1 import generation_pb2 as pb
from tests.contract import single_row
from tests.engine import loop
from tests.execution import toys
from tests.execution.toys import CHUNK, DECODE, LAST_CHUNK, LATE
from tests.families import tiny

DECLARED = llama.REGISTRATION
UNDECLARED = llama_host_embed.REGISTRATION

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
        assert refuse_undeclared(schedule, UNDECLARED) is None
        return
    row, slot = REFUSED[step]
    with pytest.raises(ValueError) as refusal:
        refuse_undeclared(schedule, UNDECLARED)
    assert str(refusal.value) == (
        f"row {row} (slot {slot}) takes its id from the device but LlamaHostEmbedForCausalLM does "
        "not declare device_token_ids; run it with every id from the host"
    )


@pytest.fixture
def checkpoint(tmp_path) -> pathlib.Path:
    """A tiny Llama checkpoint whose table is to stay on the host."""
    return written(UNDECLARED.architecture, tmp_path)


def written(architecture: str, folder: pathlib.Path) -> pathlib.Path:
    overrides = {"architectures": [architecture]}
    return tiny.write_checkpoint("llama", folder / "model", overrides=overrides)


@pytest.fixture(scope="module")
def llama_core(tmp_path_factory):
    core = start(tiny.write_checkpoint("llama", tmp_path_factory.mktemp("llama")))
    yield core
    core.close()


def start(path, **fields) -> Core:
    return loop.start(path, page_size=4, max_model_len=96, **fields)


def crowd() -> list:
    """Greedy rows and others, prompts of unequal length."""
    sampled = {"temperature": 0.8, "logprobs": 2}
    return [
        loop.request(
            f"r{i}",
            tiny.random_ids("llama", 3 + 20 * i),
            max_tokens=6,
            **sampled if i % 2 else {},
        )
        for i in range(4)
    ]


def said(outputs: loop.Outputs) -> dict[tuple[str, int], tuple]:
    return {key: one.said for key, one in outputs.items()}


def test_undeclared_registration_serves_on_the_sync_lane_and_says_so(
    checkpoint, llama_core, caplog
):
    with caplog.at_level(logging.WARNING):
        core = start(checkpoint, depth=3)
    assert [record.getMessage() for record in caplog.records] == [
        "LlamaHostEmbedForCausalLM runs on the sync lane: it does not declare device_token_ids, so "
        "every id comes from the host and no step overlaps the next"
    ]
    found = loop.run(core, crowd())
    stats = core.stats()
    assert (core.info.lane, core.info.depth) == ("sync", 1)
    facts = pb.GetServerInfoResponse()
    messages.fill_engine_facts(facts, core.info)
    assert facts.lane == "sync" and facts.depth == 1
    assert set(stats.steps) == {"sync"} and stats.steps["sync"] > 6
    assert stats.device_rows == 0 and stats.host_rows > 20
    assert core.runner.device_counters() == (0, stats.host_rows)
    with pytest.raises(ValueError, match=r"row 0 .* LlamaHostEmbedForCausalLM does not declare"):
        core.runner.pack(toys.schedule_of(STEPS["decode, ids on the device"]))
    core.close()
    caplog.clear()
    assert len(loop.run(llama_core, crowd())) == 4
    assert caplog.records == [] and llama_core.info.lane == "overlap"
    assert llama_core.stats().device_rows > 0
    sync = loop.rescheduled(llama_core, ids_from_host=True)
    assert said(found) == said(loop.run(sync, crowd()))


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


def test_require_overlap_refuses_an_undeclared_registration(checkpoint):
    with pytest.raises(ValueError) as refusal:
        start(checkpoint, require_overlap=True)
    assert str(refusal.value) == (
        "require_overlap is set but the lane is sync: LlamaHostEmbedForCausalLM does not declare "
        "device_token_ids"
    )


def test_registration_of_one_row_is_refused_by_name_above_it(monkeypatch, tmp_path):
    single_row.register(monkeypatch)
    with pytest.raises(ValueError) as refusal:
        start(written("SingleForCausalLM", tmp_path), max_rows=2)
    assert str(refusal.value) == (
        "max_rows is 2 but SingleForCausalLM runs 1 rows a step; start with max_rows=1"
    )
