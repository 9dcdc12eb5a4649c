"""Host times are kept by stage, and a measurement can begin without those of the steps before."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

from engine.core import Core

STAGES = {"schedule", "pack", "hand_over", "launch", "wait", "settle"}


def fake_core(seconds: list[float]) -> Core:
    """A core whose runner takes the next of `seconds` to pack; everything else is instant."""
    steps = iter(seconds)
    scheduler = SimpleNamespace(
        schedule=lambda: object(),
        settle=lambda schedule, result: None,
    )
    scheduler.stats = SimpleNamespace(
        num_running=0,
        num_waiting=0,
        num_free_pages=(),
        num_idle_pages=(),
        num_pages=(),
        prefix_query_tokens=0,
        prefix_hit_tokens=0,
        num_preemptions=0,
        num_resumed=0,
    )
    runner = SimpleNamespace(
        settings=SimpleNamespace(depth=1),
        guard=SimpleNamespace(step=contextlib.nullcontext, num_own=0, num_others=0),
        counters=SimpleNamespace(steps={}, device_rows=0, host_rows=0),
        pack=lambda schedule: time.sleep(next(steps)),
        launch=lambda packed: SimpleNamespace(schedule=None, seconds=0.001),
        settle=lambda launch: None,
    )
    return Core(scheduler, runner, info=None)  # pyright: ignore[reportArgumentType]


def test_every_stage_has_a_median_and_a_reset_forgets_the_steps_before():
    core = fake_core([0.02, 0.02, 0.0])
    core.step(), core.step()
    host_ms = core.stats().host_ms
    assert set(host_ms) == STAGES and host_ms["pack"] >= 20.0
    core.reset_times()
    assert set(core.stats().host_ms.values()) == {0.0}
    core.step()
    assert 0.0 < core.stats().host_ms["pack"] < 20.0
