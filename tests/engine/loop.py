"""Drives a Core until its requests end and gathers what came back; rebuilds its scheduler."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.core import Core
from engine.execution.buckets import Ladder, ProgramKey
from engine.request import Delta, Request, SamplingParams, TokenLogprobs
from engine.scheduling.scheduler import Scheduler


@dataclasses.dataclass
class Output:
    """Everything one choice of one request gave."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    def take(self, delta: Delta) -> None:
        """Adds what is new; nothing may follow an end."""
        assert self.finish_reason is None, f"{delta.request_id} goes on after its end"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None and not self.token_ids
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_id = delta.finish_reason, delta.stop_id
        self.error, self.num_cached_tokens = delta.error, delta.num_cached_tokens

    @property
    def said(self) -> tuple[Any, ...]:
        """What must not depend on neighbours, order or cache: ids, numbers and the end."""
        return (
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.prompt_logprobs,
            self.finish_reason,
            self.stop_id,
        )


_ALL_KEYS = Ladder.keys

Outputs = dict[tuple[str, int], Output]
"""By request id and choice."""


def assert_same(found: Outputs, expected: Outputs) -> None:
    """Bit-equal ids, log-probabilities, alternatives, prompt scores and ends."""
    assert found, "nothing ran"
    wrong = [
        f"{key}: {output.said}\n  expected: {expected[key].said}"
        for key, output in found.items()
        if output.said != expected[key].said
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} are not what was expected:\n" + wrong[0]


def unscored(ladder: Ladder) -> tuple[ProgramKey, ...]:
    """Stands in for `Ladder.keys` where nobody asks for the log-probabilities of a prompt."""
    return tuple(key for key in _ALL_KEYS(ladder) if key.head != "score")


def start(model: object, **changes: Any) -> Core:
    """A Core with few programs whose compiles the test run's own cache keeps."""
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "row_rungs": (8,),
        "token_rungs": (64,),
        "token_budget": 64,
        "compilation_cache": None,
    }
    config = EngineConfig(model=str(model), **settings | changes)
    return Core.start(config)


def apart[T](work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def request(
    name: str,
    prompt_ids: Sequence[int] | np.ndarray,
    max_tokens: int = 8,
    stop_ids: tuple[int, ...] = (),
    priority: int = 0,
    salt: bytes = b"",
    **params: Any,
) -> Request:
    """A validated request; greedy unless told otherwise, its seed made from its name."""
    return Request(
        request_id=name,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        params=SamplingParams(**{"temperature": 0.0} | params),
        stop_ids=stop_ids,
        eos_ids=stop_ids[:1],
        max_tokens=max_tokens,
        seed=int.from_bytes(name.encode()[-8:].rjust(8, b"s"), "little"),
        priority=priority,
        cache_salt=salt,
    )


def take(core: Core, outputs: Outputs) -> None:
    """Adds the deltas of a Core to `outputs`."""
    for delta in core.poll():
        outputs.setdefault((delta.request_id, delta.choice), Output()).take(delta)


def run(core: Core, requests: Iterable[Request], outputs: Outputs | None = None) -> Outputs:
    """Submits everything, steps until idle; nothing compiles, no slot or page stays taken.

    What belongs to requests that ran before goes into `outputs` too.
    """
    num_compiles = core.stats().compiles_after_ready
    outputs = {} if outputs is None else outputs
    for one in requests:
        core.submit(one)
    while not core.is_idle:
        assert core.step(), "stuck: live requests, but nothing to launch or settle"
        take(core, outputs)
    take(core, outputs)
    assert_released(core)
    assert core.stats().compiles_after_ready == num_compiles
    return outputs


def assert_released(core: Core) -> None:
    """Idle, every invariant holds and every page has no owner."""
    assert core.is_idle
    core.scheduler.audit()
    stats = core.stats()
    assert stats.free_pages == stats.total_pages, "a page leaked"


def rescheduled(
    core: Core,
    kind: type[Scheduler] = Scheduler,
    *,
    depth: int = 2,
    num_pages: int | None = None,
    **changes: Any,
) -> Core:
    """A Core over the same programs and weights with a fresh state and another scheduler.

    `num_pages` may be fewer than the pools hold. `ids_from_host` makes it the sync lane. The runner
    is shared: use one of them at a time.
    """
    config, runner = core.scheduler._config, core.runner
    group = dataclasses.replace(config.groups[0], num_pages=num_pages or runner.plan.num_pages)
    config = dataclasses.replace(config, groups=(group,), **{"ids_from_host": False} | changes)
    lane, depth = ("sync", 1) if config.ids_from_host else ("overlap", depth)
    runner.enter_lane(lane, depth)
    return Core(kind(config), runner, core.info)
