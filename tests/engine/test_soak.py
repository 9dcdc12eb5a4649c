"""A long seeded crowd on a tiny engine with too few pages: cancels everywhere, nothing leaks."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from engine.core import Core
from engine.request import Request
from engine.scheduling.choices import Choice
from engine.scheduling.pages import PagePool
from engine.scheduling.scheduler import Scheduler
from tests.engine import loop
from tests.families import tiny

NUM_PAGES = 18
"""Of 4 tokens: a little more than the longest request needs, so that rows are preempted often."""
LONGEST_PROMPT = 24
LENGTHS = (0, 1, 2, 4, 8, 16, 28, 36)
"""Outputs of a request, at most."""
STATES = ("queued", "chunk", "decode", "last step", "preempted")
DRAINING = "preempted, last launch not settled"
"""Seen between two steps from depth 3 on: at depth 2 the step that preempts settles that launch."""
ENOUGH = 70
"""Cancels in one state; later ones would only keep requests from finishing."""
BARRED = (2, 3, 4)
"""End ids of the tiny model."""


class AuditedScheduler(Scheduler):
    """Checks every invariant after each event: submission, abort, launch and settling."""

    num_audits = 0

    def submit(self, request):
        super().submit(request)
        self._audited()

    def abort(self, request_id, reason="abort", choice=None):
        super().abort(request_id, reason, choice)
        self._audited()

    def schedule(self):
        schedule = super().schedule()
        self._audited()
        return schedule

    def settle(self, schedule, result):
        super().settle(schedule, result)
        self._audited()

    def _audited(self):
        self.audit()
        self.num_audits += 1


class Soak:
    """One crowd: random arrivals, random cancels aimed at the state cancelled least, to the end."""

    def __init__(
        self, core: Core, seed: int, num_requests: int, lengths: tuple[int, ...] = LENGTHS
    ) -> None:
        self.core = core
        self.draw = random.Random(seed)
        self.lengths = lengths
        self.prefixes = [tiny.random_ids("llama", length) for length in (5, 9, 17)]
        self.requests = [self._request(i) for i in range(num_requests)]
        self.outputs: loop.Outputs = {}
        self.cut: set[tuple[str, int]] = set()
        """Choices cancelled before their end."""
        self.cancelled: collections.Counter[str] = collections.Counter()
        self.seen: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        """Everything submitted, stepped and cancelled; idle and leak-free at the end."""
        waiting = collections.deque(self.requests)
        while waiting or not self.core.is_idle:
            for _ in range(self.draw.choice((0, 0, 0, 1, 2, 3))):
                if waiting and self.core.scheduler.num_waiting < 12:
                    self.core.submit(waiting.popleft())
            self._cancel()
            self.core.step()
            loop.take(self.core, self.outputs)
            if self.draw.random() < 0.005:
                self.core.reset_prefix_cache()
        loop.assert_released(self.core)

    def _cancel(self) -> None:
        places = self._places()
        self.seen.update(places.keys())
        if not places:
            return
        state = min(places, key=lambda state: (self.cancelled[state], state))
        # The rare states are always taken, or their requests would leave them uncancelled.
        chance = {"preempted": 0.8, DRAINING: 1.0, "last step": 0.3, "chunk": 0.2}.get(state, 0.06)
        if self.cancelled[state] >= ENOUGH or self.draw.random() > chance:
            return
        choice = self.draw.choice(places[state])
        self.cancelled[state] += 1
        is_whole = self.draw.random() < 0.5
        self.cut.update(
            (one.request.request_id, one.index)
            for one in choice.live.choices
            if not one.is_finished and (is_whole or one is choice)
        )
        self.core.abort(
            choice.request.request_id,
            self.draw.choice(("abort", "stop")),
            None if is_whole else choice.index,
        )

    def _places(self) -> dict[str, list[Choice]]:
        """Live choices by the state they are in."""
        scheduler = self.core.scheduler
        places: dict[str, list[Choice]] = {}
        for live in scheduler._requests.values():
            for choice in live.choices:
                if not choice.is_finished:
                    places.setdefault(self._state(choice), []).append(choice)
        return places

    def _state(self, choice: Choice) -> str:
        scheduler = self.core.scheduler
        ledger, slot = scheduler._ledger, choice.slot
        if slot < 0:
            return "queued" if choice.num_cached_tokens is None else "preempted"
        if choice in scheduler._draining:
            return DRAINING
        if ledger.num_scheduled[slot] < ledger.num_prefill[slot]:
            return "chunk"
        return "decode" if ledger.has_work[slot] else "last step"

    def _request(self, index: int) -> Request:
        draw = self.draw
        prompt = self._prompt(index)
        max_tokens = draw.choice(self.lengths)
        params: dict[str, object] = {"n": draw.choice((1, 1, 1, 1, 2, 3))}
        if draw.random() < 0.5:
            params |= {
                "temperature": draw.choice((0.5, 1.0, 1.5)),
                "top_p": draw.choice((1.0, 0.9)),
                "top_k": draw.choice((0, 5, 40)),
                "min_p": draw.choice((0.0, 0.05)),
            }
        if draw.random() < 0.2:
            params |= {
                "repetition_penalty": 1.2,
                "presence_penalty": 0.3,
                "frequency_penalty": -0.2,
            }
        if draw.random() < 0.1:
            params["logit_bias"] = {7: 2.5, 11: -100.0}
        if draw.random() < 0.1:
            params["bad_word_ids"] = ((13,), (17, 19))
        if draw.random() < 0.1:
            params["allowed_token_ids"] = tuple(range(20, 90))
        if draw.random() < 0.2:
            params["min_tokens"] = min(max_tokens, 3)
        if draw.random() < 0.3:
            params["logprobs"] = draw.choice((0, 1, 4))
        if draw.random() < 0.15:
            params["prompt_logprobs"] = draw.choice((0, 2))
            params["prompt_logprobs_start"] = draw.choice((0, 1, 5, 20))
        return loop.request(
            f"r{index}",
            prompt,
            max_tokens,
            draw.choice(((), BARRED, tuple(range(2, 30)))),
            priority=draw.randrange(3),
            salt=draw.choice((b"", b"", b"mine")),
            **params,
        )

    def _prompt(self, index: int) -> list[int]:
        """Half of the prompts begin like others, so that the prefix cache has work."""
        own = tiny.random_ids("llama", 100 + index % 50).tolist()
        start = self.draw.choice(self.prefixes).tolist() if self.draw.random() < 0.5 else []
        return (start + own)[: self.draw.randint(max(1, len(start)), LONGEST_PROMPT)]


def soak(
    core: Core, seed: int, num_requests: int, lengths: tuple[int, ...] = LENGTHS, **changes: object
) -> Soak:
    """A finished soak over the programs of `core`."""
    crowded = loop.rescheduled(
        core, AuditedScheduler, num_pages=NUM_PAGES, policy="priority", max_chunk=7, **changes
    )
    crowd = Soak(crowded, seed, num_requests, lengths)
    crowd.run()
    return crowd


@pytest.mark.parametrize(
    ("depth", "num_requests", "lengths", "states"),
    [(2, 2000, LENGTHS, STATES), (3, 850, (2, 8, 28, 36), (*STATES, DRAINING))],
    ids=["depth 2", "depth 3"],
)
def test_crowd_with_cancels_in_every_state_leaks_nothing(
    llama_core, capsys, depth, num_requests, lengths, states
):
    crowd = soak(llama_core, 2026, num_requests, lengths, depth=depth)
    stats = crowd.core.stats()
    with capsys.disabled():
        print(
            f"\ndepth {depth}: {num_requests} requests, {stats.preemptions} preemptions,", end=" "
        )
        print(f"{crowd.core.scheduler.num_audits} audits; cancelled {dict(crowd.cancelled)}")
    assert crowd.cancelled.keys() == set(states)
    assert all(crowd.cancelled[state] >= 50 for state in states), crowd.cancelled
    assert stats.preemptions >= 100 and stats.prefix_hits > 0
    assert crowd.core.runner.device_counters()[0] > 0
    ends = collections.Counter(one.finish_reason for one in crowd.outputs.values())
    assert len(crowd.outputs) == sum(one.params.n for one in crowd.requests)
    assert set(ends) == {"stop", "length", "abort"}
    assert ends["stop"] + ends["length"] > len(crowd.requests) // 2
    assert_equal_to_solo_runs(crowd, every=num_requests // 120)


def assert_equal_to_solo_runs(crowd: Soak, every: int) -> None:
    """Every so manieth request, cancelled or not, said what it says alone from a cold cache."""
    solo = loop.rescheduled(crowd.core, num_pages=None, prefix_cache=False)
    num_compared = 0
    for one in crowd.requests[::every]:
        alone = loop.run(solo, [dataclasses.replace(one, priority=0)])
        for key, expected in alone.items():
            found = crowd.outputs[key]
            count = len(found.token_ids)
            assert found.token_ids == expected.token_ids[:count], key
            if key in crowd.cut:
                assert found.finish_reason in ("abort", "stop") and found.stop_id is None
            else:
                assert found.said[0] == expected.said[0] and found.said[3:] == expected.said[3:]
            # Other programs, other last bits: the ids are the same, the numbers nearly.
            assert len(found.logprobs) == min(count, len(expected.logprobs))
            for told, known in zip(found.logprobs, expected.logprobs, strict=False):
                assert told.logprob == pytest.approx(known.logprob, abs=1e-3)
            num_compared += count > 0
    assert num_compared > len(crowd.requests) // every // 2


def leak_a_page(monkeypatch):
    release, count = PagePool.release, iter(range(10**6))

    def leaking(self, pages):
        pages = list(pages)
        release(self, pages[1:] if next(count) == 40 else pages)

    monkeypatch.setattr(PagePool, "release", leaking)


def leak_a_page_unnoticed_by_counts(monkeypatch):
    release, count = PagePool.release, iter(range(10**6))

    def leaking(self, pages):
        release(self, pages)
        if self._free and next(count) == 40:
            self._free.pop()

    monkeypatch.setattr(PagePool, "release", leaking)


def release_at_the_abort(monkeypatch):
    def released(self, choice):
        if choice.slot >= 0:
            self._release(choice.slot)

    monkeypatch.setattr(Scheduler, "_release_settled", released)


def keep_a_slot(monkeypatch):
    release, count = Scheduler._release, iter(range(10**6))

    def keeping(self, slot):
        release(self, slot)
        if next(count) == 40:
            self._free_slots.remove(slot)

    monkeypatch.setattr(Scheduler, "_release", keeping)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (leak_a_page, r"page \d+ has 0 owners but counts 1"),
        (leak_a_page_unnoticed_by_counts, r"page \d+ is in 0 places"),
        (release_at_the_abort, "nothing is in flight"),
        (keep_a_slot, "a slot is lost"),
    ],
)
def test_planted_fault_turns_the_soak_red(llama_core, monkeypatch, plant, message):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        soak(llama_core, seed=7, num_requests=150)


def test_the_same_soak_without_a_fault_is_green(llama_core):
    crowd = soak(llama_core, seed=7, num_requests=150)
    assert crowd.core.scheduler.num_audits > 500


def test_a_mixture_of_experts_stays_sound_in_a_crowd(qwen3_moe_core):
    crowd = soak(qwen3_moe_core, seed=13, num_requests=200)
    assert crowd.core.runner.device_counters()[0] > 0
    assert crowd.core.stats().preemptions > 0 and crowd.core.stats().prefix_hits > 0
    assert_equal_to_solo_runs(crowd, every=5)


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "glm4_moe_lite"])
def test_latents_stay_sound_in_a_crowd(family, tmp_path):
    folder = tiny.write_checkpoint(family, tmp_path / "model")
    core = loop.start(folder, page_size=4, max_model_len=96)
    try:
        crowd = soak(core, seed=17, num_requests=60)
        assert crowd.core.runner.device_counters()[0] > 0
        assert crowd.core.stats().preemptions > 0 and crowd.core.stats().prefix_hits > 0
        assert_equal_to_solo_runs(crowd, every=5)
    finally:
        core.close()


def test_sync_lane_stays_sound_in_a_crowd(llama_core):
    crowd = soak(llama_core, seed=11, num_requests=200, ids_from_host=True)
    assert crowd.core.runner.device_counters()[0] == 0
    assert crowd.core.stats().preemptions > 0
    assert_equal_to_solo_runs(crowd, every=5)
