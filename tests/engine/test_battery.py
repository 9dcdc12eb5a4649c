"""The battery holds on a real model, and sees ids that are one step old."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable

import jax
import numpy as np
import pytest

from engine.core import Core
from engine.execution import battery
from engine.execution.runner import Launch, PackedSchedule, Runner
from engine.serving import cli
from engine.text.tokenizer import load_tokenizer
from models import registry
from tests.engine import loop

# The program shapes of test_identity.py, so that both share what is compiled.
BUDGET = 128
run = functools.partial(battery.run, num_outputs=6, longest_prompt=48)


@pytest.fixture(scope="module")
def started(smollm2_gguf):
    core = loop.start(
        smollm2_gguf,
        page_size=8,
        max_model_len=160,
        token_rungs=(BUDGET,),
        token_budget=BUDGET,
    )
    yield core
    assert core.stats().compiles_after_ready == 0
    core.close()


@pytest.fixture
def core(started) -> Core:
    return loop.rescheduled(started)


@pytest.fixture(scope="module")
def ids(smollm2_gguf) -> list[int]:
    return list(load_tokenizer(smollm2_gguf).encode(battery.TEXT, add_special_tokens=False))


def test_every_part_holds_on_a_real_model(core, ids):
    result = run(core, ids)
    assert result.holds, "\n".join(result.lines())
    repeated, together, mixed = result.parts
    assert (repeated.num_requests, together.num_requests, mixed.num_requests) == (5, 4, 64)
    assert repeated.num_tokens == 5 * 6 and together.num_tokens == 4 * 6
    # All but the first id of an answer are fed back, and only on the device.
    assert repeated.device_rows == 5 * 5 and together.device_rows == 4 * 5
    assert mixed.num_tokens - 64 <= mixed.device_rows <= mixed.num_tokens
    assert "limit 0.10%" in mixed.found and list(result.lines())[-1] == "battery holds"


def plant(monkeypatch: pytest.MonkeyPatch, is_planted: Callable[[PackedSchedule], bool]) -> None:
    """After chosen launches of the overlap lane, `last_tokens` stays as it was before them."""
    launch = Runner.launch

    def stale(self: Runner, packed: PackedSchedule) -> Launch:
        before = np.array(self.state.last_tokens)
        launched = launch(self, packed)
        if self.settings.lane == "overlap" and is_planted(packed):
            after = np.array(self.state.last_tokens)
            old = np.where((before >= 0) & (after >= 0), before, after)
            put = jax.device_put(old, self.state.last_tokens.sharding)
            self.state = dataclasses.replace(self.state, last_tokens=put)
        return launched

    monkeypatch.setattr(Runner, "launch", stale)


def test_an_id_one_step_old_fails_the_exact_parts(core, ids, monkeypatch):
    plant(monkeypatch, lambda packed: packed.key.is_decode)
    result = run(core, ids, is_strict=True)
    assert not result.holds and len(result.parts) == 2
    for part in result.parts:
        assert any("on the overlap lane" in fault for fault in part.faults)
    assert list(result.lines())[-1] == "battery FAILED"


def test_an_id_one_step_old_in_mixed_steps_alone_fails_the_mixed_set_alone(core, ids, monkeypatch):
    def is_mixed_step(packed: PackedSchedule) -> bool:
        return not packed.key.is_decode and packed.schedule.num_decode > 0

    plant(monkeypatch, is_mixed_step)
    result = run(core, ids)
    repeated, together, mixed = result.parts
    assert not result.holds and not repeated.faults and not together.faults
    assert any("below the replay's likeliest" in fault for fault in mixed.faults)


@pytest.mark.parametrize(("lane", "depth"), [("overlap", 1), ("overlap", 3), ("sync", 1)])
def test_another_lane_or_depth_fails_by_name(started, ids, lane, depth):
    core = loop.rescheduled(started, depth=depth, ids_from_host=lane == "sync")
    result = run(core, ids)
    assert not result.holds and not result.parts
    assert f"the {lane} lane at depth {depth}" in result.faults[0]


def test_a_depth_that_is_claimed_but_not_kept_fails(core, ids, monkeypatch):
    step = Core.step

    def settle_at_once(self: Core) -> bool:
        did = step(self)
        while self._in_flight:
            self._settle_oldest()
        return did

    monkeypatch.setattr(Core, "step", settle_at_once)
    result = run(core, ids, is_strict=True)
    assert any("1 launches were in flight at most, not 2" in x for x in result.parts[0].faults)


def test_ids_from_the_host_on_the_overlap_lane_fail(started, ids):
    core = loop.rescheduled(started, ids_from_host=True)
    core.runner.enter_lane("overlap", 2)
    result = run(core, ids, is_strict=True)
    assert any("no row was resolved from the device" in x for x in result.parts[0].faults)


def test_prompts_need_ids_and_room(core, ids):
    with pytest.raises(ValueError, match="no token ids to cut prompts from"):
        run(core, [])
    core.info = dataclasses.replace(core.info, max_model_len=29)
    with pytest.raises(ValueError, match=r"max_model_len is 29 but .* need 30"):
        run(core, ids)


def test_a_live_engine_keeps_its_lane(core, ids):
    core.submit(loop.request("live", ids[:4]))
    with pytest.raises(ValueError, match="requests are live"):
        core.on_lane("sync")
    loop.run(core, [])


def test_no_lane_leads_to_or_from_eager(core):
    with pytest.raises(ValueError, match="overlap and cannot become eager"):
        core.on_lane("eager")


@pytest.mark.parametrize(("depth", "code", "last"), [("2", 0, "holds"), ("1", 1, "FAILED")])
def test_the_command_prints_the_table_and_exits_by_it(tmp_path, capsys, depth, code, last):
    described = registry.get("LlamaForCausalLM").example | {"architectures": ["LlamaForCausalLM"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(described))
    sizes = ("--max-rows", "4", "--max-model-len", "64", "--token-budget", "32")
    others = ("--load-format", "dummy", "--compilation-cache", "off", "--depth", depth)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["check", "--battery", "--strict", "--model", str(path), *sizes, *others])
    lines = capsys.readouterr().out.splitlines()
    assert exit_.value.code == code
    assert lines[-1] == f"battery {last}"
    assert ("1 prompt x 5" in "".join(lines)) == (depth == "2")
