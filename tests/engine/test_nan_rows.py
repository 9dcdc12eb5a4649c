"""A row that turns NaN ends by its name; who runs beside it or owns its pages next sees nothing."""

from __future__ import annotations

import pytest

from engine.core import Core
from engine.request import Request
from tests.engine import loop, poisoned
from tests.families import tiny


@pytest.fixture(params=["llama", "qwen3_moe"])
def core(request) -> Core:
    return loop.rescheduled(request.getfixturevalue(f"{request.param}_core"), prefix_cache=False)


@pytest.fixture
def requests(core) -> list[Request]:
    return [
        loop.request(f"r{i}", tiny.random_ids("llama", length), 12)
        for i, length in enumerate((5, 33, 12, 20))
    ]


@pytest.fixture
def clean(core, requests) -> loop.Outputs:
    return loop.run(core, requests)


def test_row_that_is_nan_in_its_prompt(core, requests, clean):
    bad = poisoned.unsaid_id(requests, clean, core.info.vocab_size)
    some = poisoned.in_prompt(requests, "r1", bad)
    poisoned.assert_flagged_alone(core, requests, clean, "r1", bad, some)


def test_row_that_turns_nan_at_a_sampled_id(core, requests, clean):
    victim, bad = poisoned.said_by_one(requests, clean)
    poisoned.assert_flagged_alone(core, requests, clean, victim, bad, requests)


def test_nan_in_pages_that_nobody_owns(core, requests, clean):
    few = loop.rescheduled(core, num_pages=40, prefix_cache=False)
    assert poisoned.pages_from(few, 40) > 0
    found = loop.run(few, requests)
    loop.assert_same(found, clean)
    assert len(found) == len(clean)
