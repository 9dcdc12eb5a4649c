"""Sixty-four mixed requests to a real model: what each says does not depend on its company."""

from __future__ import annotations

import random

import pytest

from engine.request import Request
from tests.engine import loop, mixed
from tests.engine.loop import assert_same
from tests.engine.mixed import NUM_REQUESTS, SETTINGS

LOGIT_TOLERANCE = 1e-3
"""float32; two ids closer than this may change places between two programs."""


@pytest.fixture(scope="module")
def requests(smollm2_gguf) -> list[Request]:
    return mixed.made(smollm2_gguf)


@pytest.fixture(scope="module")
def pinned(smollm2_gguf):
    core = loop.start(smollm2_gguf, deterministic=True, **SETTINGS)
    yield core
    assert core.stats().compiles_after_ready == 0
    core.close()


@pytest.fixture(scope="module")
def alone(pinned, requests) -> loop.Outputs:
    return mixed.alone(pinned, requests)


def test_batched_in_reverse_in_chunks_of_64_and_again_from_a_warm_cache(pinned, requests, alone):
    batched = loop.rescheduled(pinned, max_chunk=64)
    assert_same(loop.run(batched, requests[::-1]), alone)
    cold = batched.stats()
    assert_same(loop.run(batched, requests), alone)
    assert batched.stats().prefix_hits - cold.prefix_hits > cold.prefix_hits + 500
    assert batched.runner.device_counters()[0] > NUM_REQUESTS


def test_shuffled_in_chunks_of_7_under_forced_preemption(pinned, requests, alone):
    queue = random.Random(7).sample(requests, len(requests))
    crowded = loop.rescheduled(pinned, mixed.Preempting, num_pages=60, max_chunk=7)
    assert_same(loop.run(crowded, queue), alone)
    assert crowded.stats().preemptions >= 20


def test_prompts_token_by_token(pinned, requests, alone):
    # A step per prompt token is slow: a quarter of the requests, the longest left out.
    short = [one for one in requests if len(one.prompt_ids) <= 40][: NUM_REQUESTS // 4]
    assert_same(loop.run(loop.rescheduled(pinned, max_chunk=1, prefix_cache=False), short), alone)


def test_whole_prompts_on_the_sync_lane(pinned, requests, alone):
    sync = loop.rescheduled(pinned, ids_from_host=True, prefix_cache=False)
    before = sync.stats()
    assert_same(loop.run(sync, requests), alone)
    after = sync.stats()
    assert after.device_rows == before.device_rows and after.host_rows > before.host_rows
    assert sync.runner.device_counters()[0] == 0


@pytest.fixture(scope="module")
def core(smollm2_gguf):
    core = loop.start(smollm2_gguf, **SETTINGS)
    yield core
    assert core.stats().compiles_after_ready == 0
    core.close()


def test_served_tokens_are_the_best_of_a_replay(core, requests):
    served = loop.run(core, requests)
    assert core.stats().device_rows > 0
    found = mixed.forced(requests, served, mixed.replayed(core, requests, served))
    assert found.apart <= LOGIT_TOLERANCE and found.gap <= LOGIT_TOLERANCE, found
    assert found.num_greedy > 150
    assert found.num_allowed * 1000 <= found.num_greedy, found
