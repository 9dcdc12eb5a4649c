"""Sixty-four mixed requests to a real model: what each says does not depend on its company."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from engine.core import Core
from engine.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import load_tokenizer
from tests.engine import loop

TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_REQUESTS = 64
LONGEST = 120
BUDGET = 128
"""Tokens of one prefill step: the longest prompt fits whole."""

LOGIT_TOLERANCE = 1e-3
"""float32; two ids closer than this may change places between two programs."""

SETTINGS = {
    "page_size": 8,
    "max_model_len": 160,
    "token_rungs": (BUDGET,),
    "token_budget": BUDGET,
}

KINDS: tuple[dict[str, object], ...] = (
    {},
    {"logprobs": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.7, "top_p": 0.95, "n": 2},
    {"prompt_logprobs": 3},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.1, "processed_logprobs": True},
)


@pytest.fixture(scope="module")
def requests(smollm2_gguf) -> list[Request]:
    """Prompts of 1 to 120 tokens of a real text, some with a common beginning; 4 to 16 outputs."""
    tokenizer = load_tokenizer(smollm2_gguf)
    ids = tokenizer.encode(" ".join(TEXT.read_text().split()), add_special_tokens=False)
    eos = tokenizer.text_to_id("<|im_end|>")
    assert eos is not None and len(ids) > 1500
    draw = random.Random(64)
    made = []
    for i in range(NUM_REQUESTS):
        length = (1, LONGEST, 16, 17, 64)[i] if i < 5 else draw.randrange(1, 56)
        start = 0 if i % 5 == 0 else draw.randrange(len(ids) - LONGEST)
        params = {"logprobs": 0} | KINDS[i % len(KINDS)]
        prompt = ids[start : start + length]
        made.append(
            loop.request(
                f"r{i}", prompt, min(draw.randrange(4, 17), draw.randrange(4, 17)), (eos,), **params
            )
        )
    return made


@pytest.fixture(scope="module")
def pinned(smollm2_gguf):
    core = loop.start(smollm2_gguf, deterministic=True, **SETTINGS)
    yield core
    assert core.stats().compiles_after_ready == 0
    core.close()


@pytest.fixture(scope="module")
def alone(pinned, requests) -> loop.Outputs:
    """Every request by itself, no cache, overlap lane."""
    solo = loop.rescheduled(pinned, prefix_cache=False)
    outputs: loop.Outputs = {}
    for one in requests:
        outputs |= loop.run(solo, [one])
    assert len(outputs) == sum(one.params.n for one in requests) > NUM_REQUESTS
    assert all(one.finish_reason in ("stop", "length") for one in outputs.values())
    assert sum(len(set(one.token_ids)) > 3 for one in outputs.values()) > NUM_REQUESTS // 2
    assert solo.stats().prefix_hits == 0
    return outputs


def test_batched_in_reverse_in_chunks_of_64_and_again_from_a_warm_cache(pinned, requests, alone):
    batched = loop.rescheduled(pinned, max_chunk=64)
    assert_same(loop.run(batched, requests[::-1]), alone)
    cold = batched.stats()
    assert_same(loop.run(batched, requests), alone)
    assert batched.stats().prefix_hits - cold.prefix_hits > cold.prefix_hits + 500
    assert batched.runner.device_counters()[0] > NUM_REQUESTS


class Preempting(Scheduler):
    """Preempts the newest row every few steps: short outputs would seldom run out of pages."""

    EVERY = 6

    def schedule(self):
        working = np.flatnonzero(self._ledger.has_work).tolist()
        if len(working) > 1 and self._next_step % self.EVERY == 0:
            self._preempt(max(working, key=self._order))
        return super().schedule()


def test_shuffled_in_chunks_of_7_under_forced_preemption(pinned, requests, alone):
    queue = random.Random(7).sample(requests, len(requests))
    crowded = loop.rescheduled(pinned, Preempting, num_pages=60, max_chunk=7)
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
    scored = replayed(core, requests, served)
    num_greedy = num_allowed = 0
    for one in requests:
        for choice in range(one.params.n):
            key = (one.request_id, choice)
            for told, found in zip(served[key].logprobs, scored[key], strict=True):
                if not one.params.processed_logprobs:
                    assert told.logprob == pytest.approx(found.logprob, rel=0, abs=LOGIT_TOLERANCE)
                if one.params.is_greedy and one.params.repetition_penalty == 1.0:
                    gap = found.top_logprobs[0] - found.logprob
                    assert gap <= LOGIT_TOLERANCE
                    num_greedy += 1
                    num_allowed += gap > 0
    assert num_greedy > 150
    assert num_allowed * 1000 <= num_greedy, f"{num_allowed} of {num_greedy} used the allowance"


def replayed(core: Core, requests: list[Request], served: loop.Outputs) -> dict:
    """Log-probabilities of the served ids as prompt ids of the score program, one request each."""
    replays = []
    for one in requests:
        for choice in range(one.params.n):
            ids = [*one.prompt_ids, *served[one.request_id, choice].token_ids]
            replays.append(
                loop.request(
                    f"{one.request_id}/{choice}",
                    ids,
                    max_tokens=0,
                    prompt_logprobs=1,
                    prompt_logprobs_start=len(one.prompt_ids),
                )
            )
    reference = loop.rescheduled(core, ids_from_host=True, prefix_cache=False)
    outputs = loop.run(reference, replays)
    assert reference.runner.device_counters()[0] == 0
    scored = {}
    for (name, _), output in outputs.items():
        request_id, choice = name.split("/")
        scored[request_id, int(choice)] = output.prompt_logprobs
    return scored


def assert_same(found: loop.Outputs, expected: loop.Outputs) -> None:
    """Bit-equal ids, log-probabilities, alternatives, prompt scores and ends."""
    assert found, "nothing ran"
    wrong = [
        f"{key}: {output.said}\n  alone: {expected[key].said}"
        for key, output in found.items()
        if output.said != expected[key].said
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} differ from their run alone:\n" + wrong[0]
