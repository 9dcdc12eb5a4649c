from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.scheduling.scheduler import GroupConfig
from tests.scheduling.driver import Driver, config, request
from tests.scheduling.toy_grammar import ToyGrammar

PROMPTS = st.integers(0, 2).flatmap(
    lambda family: st.integers(1, 20).map(lambda n: [family, *([1 + family, 2, 3, 4] * 5)][:n])
)


RECURRENT = {
    "few states": GroupConfig(4, 4, is_recurrent=True),
    "an interval of its own": GroupConfig(12, 6, is_recurrent=True),
    "no snapshots": GroupConfig(7, 4, prefix_cacheable=False, is_recurrent=True),
}


class Interleavings(RuleBasedStateMachine):
    """Everything that can happen to the scheduler, in any order, at any depth."""

    @initialize(
        depth=st.integers(1, 3),
        prefix_cache=st.booleans(),
        deterministic=st.booleans(),
        ids_from_host=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_chunk=st.sampled_from([None, 1, 3, 7]),
        token_budget=st.sampled_from([1, 2, 5, 16]),
        num_pages=st.sampled_from([9, 11, 14, 40]),
        masked_rows=st.integers(1, 4),
        other=st.sampled_from(
            [None, GroupConfig(12, 3), GroupConfig(12, 3, window=4), *RECURRENT.values()]
        ),
    )
    def start(self, depth, num_pages, other, **changes):
        groups = (GroupConfig(num_pages, 4), other)
        self.depth = depth
        self.driver = Driver(config(groups=tuple(g for g in groups if g), **changes))
        self.num_submitted = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stop_ids=st.sampled_from([(), (3,), (0, 5)]),
        min_tokens=st.sampled_from([0, 0, 2]),
        salt=st.sampled_from([b"", b"", b"a"]),
        priority=st.integers(0, 2),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        start=st.sampled_from([0, 1, 6, 30]),
        grammar=st.sampled_from([None, ToyGrammar(1), ToyGrammar(2)]),
    )
    def submit(
        self, prompt, max_tokens, stop_ids, salt, priority, start, min_tokens, grammar, **params
    ):
        self.driver.submit(
            request(
                str(self.num_submitted),
                prompt,
                max_tokens,
                stop_ids,
                priority,
                salt,
                seed=self.num_submitted % 3,
                prompt_logprobs_start=start,
                min_tokens=0 if grammar else min(min_tokens, max_tokens),
                grammar=grammar,
                **params,
            )
        )
        self.num_submitted += 1

    @precondition(lambda self: self.num_submitted)
    @rule(back=st.integers(0, 6), choice=st.sampled_from([None, 0, 1]), stop=st.booleans())
    def abort(self, back, choice, stop):
        name = str(max(0, self.num_submitted - 1 - back))
        self.driver.abort(name, "stop" if stop else "abort", choice)

    @precondition(lambda self: len(self.driver.device.pending) < self.depth)
    @rule()
    def launch(self):
        self.driver.launch()

    @precondition(lambda self: self.driver.device.pending)
    @rule()
    def settle(self):
        self.driver.settle()

    @rule(steps=st.integers(1, 12))
    def run(self, steps):
        for _ in range(steps):
            self.driver.step(self.depth)

    @rule()
    def reset_prefix_cache(self):
        self.driver.scheduler.reset_prefix_cache()
        self.driver.scheduler.audit()

    @rule(happens=st.integers(0, 9))
    def fail(self, happens):
        if happens == 9:
            self.driver.fail()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run(self.depth)
            assert len(self.driver.finished) == len(self.driver.ids)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def state_of(driver: Driver, name: str) -> str:
    """Where the first unfinished choice of a request stands."""
    scheduler = driver.scheduler
    live = scheduler._requests[name]
    choice = next(one for one in live.choices if not one.is_finished)
    if choice.slot < 0:
        return "resuming" if choice.num_cached_tokens is not None else "queued"
    ledger, slot = scheduler._ledger, choice.slot
    if choice in scheduler._draining:
        return "preempted"
    if ledger.num_scheduled[slot] < ledger.num_prefill[slot]:
        return "chunk"
    return "decode" if ledger.has_work[slot] else "last step"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("deterministic", [False, True], ids=["mixed", "deterministic"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
def test_crowded_pool_with_aborts_everywhere_equals_solo_runs(depth, deterministic, prefix_cache):
    # Ledger rows SCHED-02, 03, 05, 06, 15, 17, 22.
    draw = random.Random(f"{depth} {deterministic} {prefix_cache}")
    driver = Driver(
        config(
            groups=(GroupConfig(num_pages=12, page_size=4),),
            deterministic=deterministic,
            prefix_cache=prefix_cache,
            max_chunk=5,
        )
    )
    aborted: dict[str, int] = {}
    for name in range(100):
        prompt = [draw.randrange(3)] + [draw.randrange(2) for _ in range(draw.randrange(20))]
        n = draw.choice([1, 1, 1, 2])
        logprobs = draw.choice([None, 1])
        driver.submit(
            request(
                str(name), prompt, draw.randrange(1, 20), (3,), n=n, seed=name, logprobs=logprobs
            )
        )
        for _ in range(draw.randrange(12)):
            driver.step(depth)
        if draw.random() < 0.4 and (live := list(driver.scheduler._requests)):
            victim = draw.choice(live)
            state = state_of(driver, victim)
            aborted[state] = aborted.get(state, 0) + 1
            driver.abort(victim)
    driver.run(depth)
    stats = driver.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.prefix_hit_tokens > 0) == prefix_cache
    assert aborted.keys() >= {"queued", "chunk", "decode"}
    assert len(driver.finished) == len(driver.ids)
    assert driver.device.num_device_ids > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_sync_lane_equals_solo_runs_and_resolves_no_row_from_the_device(depth):
    driver = Driver(config(ids_from_host=True, groups=(GroupConfig(12, 4),)))
    for name in range(12):
        driver.submit(request(str(name), [name % 3, 1, 2, 3, 4], 16, seed=name))
    driver.run(depth)
    assert driver.scheduler.stats.num_preemptions > 0
    assert driver.device.num_device_ids == 0
