"""Sixty-four mixed requests to a real model, and what must not depend on their company."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import Core
from engine.request import Request, TokenLogprobs
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import load_tokenizer
from tests.engine import loop

TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_REQUESTS = 64
LONGEST = 120
BUDGET = 128
"""Tokens of one prefill step: the longest prompt fits whole."""

SETTINGS = {
    "page_size": 8,
    "max_model_len": 160,
    "token_rungs": (BUDGET,),
    "token_budget": BUDGET,
}

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.7, "top_p": 0.95, "n": 2},
    {"prompt_logprobs": 3},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.1, "processed_logprobs": True},
)


def made(gguf: Path) -> list[Request]:
    """Prompts of 1 to 120 tokens of a real text, some with a common beginning; 4 to 16 outputs."""
    tokenizer = load_tokenizer(gguf)
    ids = tokenizer.encode(" ".join(TEXT.read_text().split()), add_special_tokens=False)
    eos = tokenizer.text_to_id("<|im_end|>")
    assert eos is not None and len(ids) > 1500
    draw = random.Random(64)
    requests = []
    for i in range(NUM_REQUESTS):
        length = (1, LONGEST, 16, 17, 64)[i] if i < 5 else draw.randrange(1, 56)
        start = 0 if i % 5 == 0 else draw.randrange(len(ids) - LONGEST)
        params: dict[str, Any] = {"logprobs": 0} | KINDS[i % len(KINDS)]
        prompt = ids[start : start + length]
        requests.append(
            loop.request(
                f"r{i}", prompt, min(draw.randrange(4, 17), draw.randrange(4, 17)), (eos,), **params
            )
        )
    return requests


def alone(core: Core, requests: Sequence[Request]) -> loop.Outputs:
    """Every request by itself, no cache, overlap lane."""
    solo = loop.rescheduled(core, prefix_cache=False)
    outputs: loop.Outputs = {}
    for one in requests:
        outputs |= loop.run(solo, [one])
    assert len(outputs) == sum(one.params.n for one in requests) > NUM_REQUESTS
    assert all(one.finish_reason in ("stop", "length") for one in outputs.values())
    assert sum(len(set(one.token_ids)) > 3 for one in outputs.values()) > NUM_REQUESTS // 2
    assert solo.stats().prefix_hits == 0
    return outputs


class Preempting(Scheduler):
    """Preempts the newest row every few steps: short outputs would seldom run out of pages."""

    EVERY = 6

    def schedule(self):
        working = np.flatnonzero(self._ledger.has_work).tolist()
        if len(working) > 1 and self._next_step % self.EVERY == 0:
            self._preempt(max(working, key=self._order))
        return super().schedule()


Scores = dict[tuple[str, int], tuple[TokenLogprobs | None, ...]]
"""Of each output, by request id and choice."""


def replayed(core: Core, requests: Sequence[Request], served: loop.Outputs) -> Scores:
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
    scored: Scores = {}
    for (name, _), output in outputs.items():
        request_id, choice = name.split("/")
        assert output.prompt_logprobs is not None
        scored[request_id, int(choice)] = output.prompt_logprobs
    return scored


@dataclasses.dataclass(frozen=True)
class Forced:
    """How far a replay is from what was served."""

    num_greedy: int
    """Positions whose id had to be the likeliest."""
    num_allowed: int
    """Of these, positions whose id was not the likeliest of the replay."""
    gap: float
    """What the id lay below the likeliest, at most."""
    apart: float
    """Served and replayed log-probability of an id, at most."""


def forced(requests: Sequence[Request], served: loop.Outputs, scored: Scores) -> Forced:
    """Holds every served id against its replay."""
    gaps, apart = [], [0.0]
    for one in requests:
        for choice in range(one.params.n):
            key = (one.request_id, choice)
            for told, found in zip(served[key].logprobs, scored[key], strict=True):
                assert found is not None
                if not one.params.processed_logprobs:
                    apart.append(abs(told.logprob - found.logprob))
                if one.params.is_greedy and one.params.repetition_penalty == 1.0:
                    gaps.append(found.top_logprobs[0] - found.logprob)
    assert np.isfinite([*gaps, *apart]).all()
    return Forced(len(gaps), sum(gap > 0 for gap in gaps), max(gaps, default=0.0), max(apart))
