"""A latent cache group in the engine: prefix hits, chunks and preemption change no bit."""

from __future__ import annotations

from unittest import mock

import jax
import pytest
from jax.sharding import PartitionSpec

from engine.execution.buckets import Ladder
from tests.engine import loop
from tests.families import tiny

NAME = "glm4_moe_lite"
NUM_PAGES = 22
"""Of 4 tokens: a little more than the longest request needs, so that rows are preempted."""


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    folder = tiny.write_checkpoint(NAME, tmp_path_factory.mktemp(NAME))
    with mock.patch.object(Ladder, "keys", loop.unscored):
        core = loop.start(folder, page_size=4, max_model_len=80, deterministic=True)
    yield core
    assert core.stats().compiles_after_ready == 0
    core.close()


@pytest.fixture(scope="module")
def requests():
    """Prompts of 1 to 60 tokens; those from the fifth on begin as another one does."""
    lengths = (1, 4, 23, 60, 29, 48, 17, 33)
    made = []
    for i, length in enumerate(lengths):
        prompt = tiny.random_ids(NAME, length)
        if i >= 4:
            shared = tiny.random_ids(NAME, 60)[: length // 2]
            prompt[: len(shared)] = shared
        made.append(loop.request(f"r{i}", prompt, max_tokens=20 - i, logprobs=0))
    return made


@pytest.fixture(scope="module")
def alone(pinned, requests) -> loop.Outputs:
    """Every request by itself, whole prompts, no cache."""
    solo = loop.rescheduled(pinned, prefix_cache=False)
    outputs: loop.Outputs = {}
    for one in requests:
        outputs |= loop.run(solo, [one])
    assert sum(len(one.token_ids) for one in outputs.values()) == sum(range(13, 21))
    assert len({id for one in outputs.values() for id in one.token_ids}) > 20
    assert solo.stats().prefix_hits == 0
    return outputs


def assert_same(found: loop.Outputs, expected: loop.Outputs) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].said == one.said, name


def test_every_device_has_latents_whole(pinned):
    """All heads read them; the pools of kv heads are cut."""
    specs = {pool.sharding.spec for pool in jax.tree.leaves(pinned.runner.state.pools)}
    assert specs == {PartitionSpec()}


def test_prefix_hits_say_what_a_cold_run_says(pinned, requests, alone):
    core = loop.rescheduled(pinned)
    assert_same(loop.run(core, requests), alone)
    cold = core.stats().prefix_hits
    found = loop.run(core, requests[::-1])
    assert_same(found, alone)
    assert core.stats().prefix_hits - cold > 150
    assert found["r3", 0].num_cached_tokens == 56


def test_chunks_of_seven_under_preemption_say_what_whole_prompts_say(pinned, requests, alone):
    core = loop.rescheduled(pinned, num_pages=NUM_PAGES, max_chunk=7)
    assert_same(loop.run(core, requests), alone)
    assert core.stats().preemptions >= 2
    assert core.runner.device_counters()[0] > 20


def test_ids_from_the_host_say_the_same(pinned, requests, alone):
    core = loop.rescheduled(pinned, ids_from_host=True)
    assert_same(loop.run(core, requests), alone)
    assert core.runner.device_counters()[0] == 0
