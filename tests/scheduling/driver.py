"""Drives a scheduler and a fake device together and checks everything after every event."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.request import Delta, Request, SamplingParams, StructuredOutput
from engine.scheduling.masks import MaskMaker
from engine.scheduling.scheduler import GroupConfig, Scheduler, SchedulerConfig
from tests.scheduling import fake_device
from tests.scheduling.toy_grammar import ToyGrammar

JSON = StructuredOutput("json_object")


def config(**changes: object) -> SchedulerConfig:
    """A tiny scheduler: 4 rows, pages of 4 tokens."""
    base = SchedulerConfig(
        max_rows=4,
        max_slots=5,
        max_model_len=64,
        token_budget=16,
        max_chunk_rows=4,
        groups=(GroupConfig(num_pages=17, page_size=4),),
        masked_rows=2,
    )
    return dataclasses.replace(base, **changes)


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 4,
    stop_ids: tuple[int, ...] = (),
    priority: int = 0,
    salt: bytes = b"",
    seed: int = 1 << 40 | 7,
    grammar: ToyGrammar | None = None,
    **params: object,
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=np.array(prompt, np.int32),
        params=SamplingParams(**params | ({"structured": JSON} if grammar else {})),
        stop_ids=stop_ids,
        eos_ids=stop_ids[:1],
        max_tokens=max_tokens,
        seed=seed,
        priority=priority,
        cache_salt=salt,
        grammar=grammar,
    )


class Driver:
    """One engine loop in slow motion."""

    def __init__(self, config: SchedulerConfig, mask_maker: MaskMaker | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config, mask_maker=mask_maker)
        self.device = fake_device.FakeDevice(config)
        self.requests: dict[str, Request] = {}
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list] = {}
        self.finished: dict[tuple[str, int], Delta] = {}
        self.prompt_logprobs: dict[tuple[str, int], tuple] = {}

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.requests[request.request_id] = request
        for choice in range(request.params.n):
            self.ids[request.request_id, choice] = []
            self.logprobs[request.request_id, choice] = []
        self._check()

    def abort(self, name: str, reason: str = "abort", choice: int | None = None) -> None:
        self.scheduler.abort(name, reason, choice)
        self._check(is_cutting=True)

    def launch(self) -> bool:
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self.device.launch(schedule)
        self._check()
        return schedule is not None

    def settle(self) -> bool:
        if not self.device.pending:
            return False
        schedule, result = self.device.settle()
        self.scheduler.settle(schedule, result)
        self._check()
        return True

    def fail(self) -> None:
        """Every launch in flight is lost, and the device state with them."""
        schedules = [schedule for schedule, _, _ in self.device.pending]
        self.device = fake_device.FakeDevice(self.config)
        self.scheduler.void(schedules, "the device failed")
        self._check(is_cutting=True)

    def step(self, depth: int = 2) -> bool:
        """Launches, and settles what is `depth` launches old; False: nothing to do."""
        is_launched = self.launch()
        if len(self.device.pending) >= depth or not is_launched:
            return self.settle() or is_launched
        return True

    def run(self, depth: int = 2) -> None:
        """Until idle; every finished request must equal its solo run."""
        for _ in range(10_000):
            if self.scheduler.is_idle:
                break
            is_waiting = not self.device.pending and self.scheduler.wait_for_masks()
            assert self.step(depth) or is_waiting, "stuck: nothing to launch or settle"
        assert self.scheduler.is_idle
        stats = self.scheduler.stats
        for total, free, idle in zip(
            stats.num_pages, stats.num_free_pages, stats.num_idle_pages, strict=True
        ):
            assert free + idle == total, "a page leaked"

    def _check(self, is_cutting: bool = False) -> None:
        """Takes the deltas; `is_cutting`: an abort or a failure may end a choice anywhere."""
        for delta in self.scheduler.take_deltas():
            self._take(delta, is_cutting)
        self.scheduler.audit()

    def _take(self, delta: Delta, is_cutting: bool) -> None:
        key = (delta.request_id, delta.choice)
        request = self.requests[delta.request_id]
        assert key not in self.finished, f"{key} goes on after its end"
        self.ids[key].extend(delta.token_ids)
        self.logprobs[key].extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            assert key not in self.prompt_logprobs and not self.ids[key]
            self.prompt_logprobs[key] = delta.prompt_logprobs
        ids, reason, stop_id = fake_device.solo(request, delta.choice)
        assert self.ids[key] == ids[: len(self.ids[key])], f"{key} differs from its solo run"
        if delta.finish_reason is None:
            assert self.ids[key] != ids or not ids, f"{key} has all its ids but no end"
            return
        self.finished[key] = delta
        if is_cutting:
            assert not delta.token_ids and delta.stop_id is None
            return
        assert (self.ids[key], delta.finish_reason, delta.stop_id) == (ids, reason, stop_id)
        self._check_logprobs(request, key)

    def _check_logprobs(self, request: Request, key: tuple[str, int]) -> None:
        context = [int(i) for i in request.prompt_ids]
        wanted = request.params.logprobs
        assert len(self.logprobs[key]) == (0 if wanted is None else len(self.ids[key]))
        for token_id, found in zip(self.ids[key], self.logprobs[key], strict=False):
            assert found == fake_device._token_logprobs(context, token_id, wanted)
            context = [*context, token_id]
        if key[1] == 0 and request.params.prompt_logprobs is not None:
            assert self.prompt_logprobs[key] == fake_device.solo_prompt_logprobs(request)
