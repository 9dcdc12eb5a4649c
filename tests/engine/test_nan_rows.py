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


def ids_of(outputs: loop.Outputs) -> dict[tuple[str, int], list[int]]:
    return {key: one.token_ids for key, one in outputs.items()}


def assert_others_are_clean(core, requests, clean, victim, token_id, poisoned_requests) -> None:
    with poisoned.embedding(core, token_id):
        found = loop.run(core, poisoned_requests)
    poisoned.assert_failed(found.pop((victim, 0)), victim, clean[victim, 0])
    rest = {key: one for key, one in ids_of(clean).items() if key[0] != victim}
    assert ids_of(found) == rest
    assert ids_of(loop.run(core, requests)) == ids_of(clean)


def test_row_that_is_nan_in_its_prompt(core, requests, clean):
    bad = poisoned.unsaid_id(requests, clean, core.info.vocab_size)
    some = poisoned.in_prompt(requests, "r1", bad)
    assert_others_are_clean(core, requests, clean, "r1", bad, some)


def test_row_that_turns_nan_at_a_sampled_id(core, requests, clean):
    victim, bad = poisoned.said_by_one(requests, clean)
    assert_others_are_clean(core, requests, clean, victim, bad, requests)


def test_nan_in_pages_that_nobody_owns(core, requests, clean):
    few = loop.rescheduled(core, num_pages=40, prefix_cache=False)
    assert poisoned.pages_from(few, 40) > 0
    assert ids_of(loop.run(few, requests)) == ids_of(clean)
