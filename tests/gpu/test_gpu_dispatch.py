"""Small models of sizes that the kernels cover: which kernels ran, and a row that turns NaN."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest

from engine.execution.buckets import Ladder
from tests.engine import loop, poisoned
from tests.families import tiny
from tests.kernels import dispatched

NAMES = [name for name, promise in dispatched.PROMISES.items() if promise.config is not None]
PROMPT_LENS = (1, 17, 100, 64, 33, 5)
VICTIM = "r2"
NUM_PAGES, FEW_PAGES = 120, 60


@pytest.fixture(scope="module", params=NAMES)
def started(request, has_kernels, tmp_path_factory):
    """A pinned engine and the calls that were traced for it."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    settings = {
        "deterministic": True,
        "num_pages": NUM_PAGES,
        "max_rows": 8,
        "page_size": 64 if has_kernels else 16,
    }
    settings |= {"token_budget": 512, "token_rungs": (512,), "prefix_cache": False}
    if has_kernels:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(dispatched.PROMISES[name].config))
        settings["load_format"] = "dummy"
    else:
        path = tiny.write_checkpoint(name, folder)
    with mock.patch.object(Ladder, "keys", loop.unscored), dispatched.recorded() as calls:
        core = loop.start(path, **settings)
    yield name, core, calls
    assert core.stats().compiles_after_ready == 0
    core.close()


@pytest.fixture
def core(started):
    return loop.rescheduled(started[1], prefix_cache=False)


@pytest.fixture(scope="module")
def requests(started):
    draw = np.random.default_rng(5)
    size = started[1].info.vocab_size
    return [
        loop.request(f"r{i}", draw.integers(3, size, length), max_tokens=24, logprobs=2)
        for i, length in enumerate(PROMPT_LENS)
    ]


@pytest.fixture(scope="module")
def clean(started, requests) -> loop.Outputs:
    outputs = loop.run(loop.rescheduled(started[1], prefix_cache=False), requests)
    assert all(len(one.token_ids) == 24 for one in outputs.values())
    assert len({id for one in outputs.values() for id in one.token_ids}) > len(PROMPT_LENS)
    return outputs


@pytest.mark.gpu
def test_covered_model_runs_every_promised_kernel(started, say):
    name, core, calls = started
    say(f"{name}: {core.info.num_programs} programs\n{dispatched.summary(calls)}")
    assert core.info.dtype == "bfloat16"
    assert dispatched.broken(calls, dispatched.PROMISES[name].ops) == []


@pytest.mark.parametrize("where", ["in its prompt", "at a sampled id"])
def test_row_that_turns_nan_is_flagged_alone(where, core, requests, clean, say):
    if where == "in its prompt":
        victim, bad = VICTIM, poisoned.unsaid_id(requests, clean, core.info.vocab_size)
        some = poisoned.in_prompt(requests, victim, bad)
    else:
        victim, bad = poisoned.said_by_one(requests, clean)
        some = requests
    failed = poisoned.assert_flagged_alone(core, requests, clean, victim, bad, some)
    say(
        f"NaN {where}: {victim} ended after {len(failed.token_ids)} ids; {len(requests) - 1} "
        "others, and all again over its pages, are bit-equal"
    )


def test_nan_in_pages_that_nobody_owns(started, requests, clean, say):
    few = loop.rescheduled(started[1], num_pages=FEW_PAGES, prefix_cache=False)
    num_pages = poisoned.pages_from(few, FEW_PAGES)
    found = loop.run(few, requests)
    loop.assert_same(found, clean)
    assert len(found) == len(clean)
    say(f"{len(found)} answers beside {num_pages} pages of NaN are bit-equal")
