"""The loop: schedule, launch, settle. One thread owns a Core and calls everything on it."""

from __future__ import annotations

import collections
import dataclasses
import gc
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.config import EngineConfig, Lane
from engine.execution import contract, startup
from engine.execution.runner import Launch, Runner
from engine.request import Delta, Request
from engine.scheduling.cache_events import CacheContent, CacheWatch
from engine.scheduling.config import SchedulerConfig
from engine.scheduling.masks import MaskMaker
from engine.scheduling.schedule import Schedule
from engine.scheduling.scheduler import Scheduler
from models import checkpoint
from models.registry import Model

_TIMED_STEPS = 512
"""Steps whose host times are kept for the medians."""
OWN_STAGES = ("schedule", "pack", "hand_over", "settle")
"""Stages of a step that take the step's thread."""
_STAGES = ("schedule", "pack", "hand_over", "launch", "wait", "settle")
_MASK_THREADS = 4
"""Masks made at once: most of the work leaves the interpreter to the step's thread."""
_FAILURES_IN_A_ROW = 6
"""Failed steps with nothing settled between, after which the device counts as lost.

Three requests that each fail twice look like that too; fewer would let one caller who tries again
end the engine. A device whose state cannot be made anew is lost at once.
"""


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """Facts of a running engine that faces print and report."""

    model_name: str
    model_path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]
    """Sampling fields of generation_config.json."""
    lane: str
    depth: int
    dtype: str
    page_size: int
    num_pages: int
    max_rows: int
    num_programs: int
    stage_seconds: Mapping[str, float]
    """Seconds of each start-up stage; weights are loaded while programs are compiled."""
    plan: str
    """The memory plan, printable."""
    device: str
    weights_version: int
    num_parameters: int
    prefix_cache: bool
    deterministic: bool
    masked_rows: int = 0
    """Rows of one step that a grammar may bound; 0: structured output is refused."""


@dataclasses.dataclass(frozen=True)
class CoreStats:
    """Counts of one moment."""

    num_running: int
    num_waiting: int
    free_pages: int
    """Pages without an owner, cached ones included."""
    total_pages: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found there."""
    preemptions: int
    failed_launches: int
    """Failures of the device that were recovered from; launches lost together count as one."""
    resumed_requests: int
    """Requests that ran again after one."""
    steps: Mapping[str, int]
    """Steps by lane."""
    device_rows: int
    """Rows whose newest id came from the device."""
    host_rows: int
    compiles_after_ready: int
    """Compiles of the engine's own threads: a fault."""
    foreign_compiles: int
    """Compiles of other threads: legal."""
    host_ms: Mapping[str, float]
    """Median milliseconds of each stage of a step.

    The step's thread spends schedule, pack, hand_over and settle (`OWN_STAGES`). launch is the call
    of the program: beside them in the launching thread, or, on a lane without one, what hand_over
    consists of. wait is for that call and for the device.
    """

    @property
    def host_ms_per_step(self) -> float:
        """What a step takes of its thread, in milliseconds: the sum of the medians."""
        return sum(self.host_ms[stage] for stage in OWN_STAGES)


class Core:
    """The engine: `submit`, `abort` and `poll` records; `step` until there is nothing to do."""

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self._in_flight: collections.deque[Launch] = collections.deque()
        self._launching: Schedule | None = None  # booked by the scheduler, not yet in flight
        self._num_failures = 0
        self._num_failures_in_a_row = 0
        self._times: dict[str, collections.deque[float]] = {
            stage: collections.deque(maxlen=_TIMED_STEPS) for stage in _STAGES
        }

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[str, float, str], None] | None = None,
    ) -> Core:
        """Loads, plans, compiles and proves; returns when every program is ready.

        Args:
          config: the engine's settings.
          progress: told (stage, fraction, detail) for stages "load", "plan", "compile", "prove".

        Raises:
          ValueError: settings or checkpoint do not suit.
          FileNotFoundError: no model there.
          ContractError: a proof of the id contract failed.
        """
        stages = _StageClock(progress or (lambda *_: None))
        model, source, described, generation = startup.open_model(config)
        run = startup.start(config, model, source, stages)
        contract.prove(run, stages)
        if run.settings.lane != "eager":  # which compiles each operation as it comes
            run.guard.arm()
        # Programs and parameters live as long as the engine: the collector need not visit them.
        gc.collect()
        gc.freeze()
        info = _info(config, run, described, generation, stages.seconds)
        return cls(_scheduler(run), run, info)

    def on_lane(self, lane: Lane, depth: int = 2) -> Core:
        """A core over the same programs and weights on another lane, from an empty state.

        The runner goes with it: this core is done.

        Args:
          lane: overlap or sync.
          depth: launches in flight on the overlap lane.

        Raises:
          ValueError: the engine is not idle, or the runner cannot change to that lane.
        """
        if not self.is_idle:
            raise ValueError("requests are live; finish or abort them before changing the lane")
        self.runner.enter_lane(lane, depth)
        settings = self.runner.settings
        info = dataclasses.replace(self.info, lane=settings.lane, depth=settings.depth)
        return Core(_scheduler(self.runner), self.runner, info)

    @property
    def model(self) -> Model:
        """Pure forward and logits, for study."""
        return self.runner.model

    @property
    def params(self) -> Any:
        """The parameters on the device. Never donated: safe to read."""
        return self.runner.params

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: its id is live, or it can never fit.
          QueueFull: too many wait.
        """
        self.scheduler.submit(request)

    def abort(self, request_id: str, reason: str = "abort", choice: int | None = None) -> None:
        """Ends a request or one of its choices, at any moment; unknown ids are ignored.

        Args:
          request_id: of the request.
          reason: "stop" for a stop string; anything else is an "abort".
          choice: None ends all choices.
        """
        self.scheduler.abort(request_id, "stop" if reason == "stop" else "abort", choice)

    def poll(self) -> list[Delta]:
        """What is new since the last poll."""
        return self.scheduler.take_deltas()

    def step(self) -> bool:
        """Schedules and launches a step, then settles the oldest launch once `depth` are in flight.

        Returns:
          False when nothing was launched or settled, and no mask is waited for.

        Raises:
          RuntimeError: the engine's own thread compiled something after ready.
        """
        with self.runner.guard.step():
            launch = self._launch()
            is_full = len(self._in_flight) >= self.runner.settings.depth
            if not self._in_flight or not (is_full or launch is None):
                return launch is not None or self.scheduler.wait_for_masks()
            self._settle_oldest()
        self._num_failures_in_a_row = 0
        return True

    def _launch(self) -> Launch | None:
        started = time.perf_counter()
        schedule = self._launching = self.scheduler.schedule()
        if schedule is None:
            return None
        scheduled = time.perf_counter()
        packed = self.runner.pack(schedule)
        packed_at = time.perf_counter()
        launch = self.runner.launch(packed)
        self._in_flight.append(launch)
        self._launching = None
        self._times["schedule"].append(scheduled - started)
        self._times["pack"].append(packed_at - scheduled)
        self._times["hand_over"].append(time.perf_counter() - packed_at)
        return launch

    def _settle_oldest(self) -> None:
        started = time.perf_counter()
        result = self.runner.settle(self._in_flight[0])
        launch = self._in_flight.popleft()
        waited = time.perf_counter()
        self.scheduler.settle(launch.schedule, result)
        self._times["launch"].append(launch.seconds)
        self._times["wait"].append(waited - started)
        self._times["settle"].append(time.perf_counter() - waited)

    def recover(self, reason: str) -> None:
        """After an exception of a step: what was in flight is void and runs again, once.

        The state is new and empty, and so is the prefix cache; running requests are computed again
        from their settled ids. One that such a failure meets a second time ends with an error.

        Args:
          reason: what the requests that end are told.

        Raises:
          RuntimeError: too many steps failed with nothing settled between.
          Exception: the state cannot be made anew. Either way the device is lost.
        """
        self._num_failures += 1
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= _FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"{self._num_failures_in_a_row} steps failed with nothing settled between, the "
                f"last one by {reason}; the device does not come back: restart the process"
            )
        schedules = [launch.schedule for launch in self._in_flight]
        if self._launching is not None:
            schedules.append(self._launching)
        self._in_flight.clear()
        self._launching = None
        self.scheduler.void(schedules, reason)
        self.runner.reset_state()

    @property
    def is_idle(self) -> bool:
        """No request is live and nothing is in flight."""
        return self.scheduler.is_idle and not self._in_flight

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        self.scheduler.reset_prefix_cache()

    def watch_prefix_cache(self, watch: CacheWatch) -> CacheContent:
        """Begins to tell `watch` of every change in the prefix cache; returns what is there now."""
        return self.scheduler.watch_prefix_cache(watch)

    def unwatch_prefix_cache(self, watch: CacheWatch) -> None:
        """Ends it; one that does not watch is no error."""
        self.scheduler.unwatch_prefix_cache(watch)

    def stats(self) -> CoreStats:
        """Counts of this moment."""
        scheduler, counters, guard = self.scheduler.stats, self.runner.counters, self.runner.guard
        return CoreStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            free_pages=sum(scheduler.num_free_pages) + sum(scheduler.num_idle_pages),
            total_pages=sum(scheduler.num_pages),
            prefix_queries=scheduler.prefix_query_tokens,
            prefix_hits=scheduler.prefix_hit_tokens,
            preemptions=scheduler.num_preemptions,
            failed_launches=self._num_failures,
            resumed_requests=scheduler.num_resumed,
            steps={**counters.steps},
            device_rows=counters.device_rows,
            host_rows=counters.host_rows,
            compiles_after_ready=guard.num_own,
            foreign_compiles=guard.num_others,
            host_ms={
                stage: 1e3 * statistics.median(times) if times else 0.0
                for stage, times in self._times.items()
            },
        )

    def reset_times(self) -> None:
        """Forgets the host times so far, so that a measurement reads its own steps alone."""
        for times in self._times.values():
            times.clear()

    def close(self) -> None:
        """Gives the device's memory back. Live requests are dropped."""
        try:
            while self._in_flight:
                self.runner.settle(self._in_flight.popleft())
        finally:  # one that failed keeps neither memory nor thread
            self.scheduler.close()
            self.runner.close()
            gc.unfreeze()


class _StageClock:
    """Passes progress on and keeps the seconds of each stage; stages may run side by side."""

    def __init__(self, report: Callable[[str, float, str], None]) -> None:
        self._report = report
        self._created = time.perf_counter()
        self._begun: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, fraction: float, detail: str) -> None:
        now = time.perf_counter()
        if not self._begun:
            self.seconds["open"] = now - self._created
        self.seconds[stage] = now - self._begun.setdefault(stage, now)
        self._report(stage, fraction, detail)


def _scheduler(run: Runner) -> Scheduler:
    return Scheduler(_scheduler_config(run), mask_maker=MaskMaker(_MASK_THREADS))


def _scheduler_config(run: Runner) -> SchedulerConfig:
    settings, config = run.settings, run.settings.config
    return SchedulerConfig(
        max_rows=settings.max_rows,
        max_slots=settings.max_slots,
        max_model_len=settings.max_model_len,
        token_budget=settings.token_budget,
        max_chunk_rows=settings.max_chunk_rows,
        token_rungs=() if config.deterministic else settings.ladder.tokens,
        max_chunk=config.max_chunk,
        groups=run.groups,
        policy=config.policy,
        prefix_cache=config.prefix_cache,
        deterministic=config.deterministic,
        ids_from_host=settings.lane == "sync" or not run.model.registration.device_token_ids,
        queue_limit=config.limits.queued_requests,
        masked_rows=settings.ladder.masked_rows,
        mask_ms=config.limits.grammar_mask_ms,
    )


def _info(
    config: EngineConfig,
    run: Runner,
    described: Mapping[str, Any],
    generation: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> EngineInfo:
    settings = run.settings
    path = pathlib.Path(config.model)
    return EngineInfo(
        model_name=path.stem if path.suffix else path.name,
        model_path=str(path),
        architecture=run.model.registration.architecture,
        vocab_size=run.model.vocab_size,
        max_model_len=settings.max_model_len,
        eos_ids=checkpoint.eos_token_ids(described, generation),
        generation_defaults=dict(generation),
        lane=settings.lane,
        depth=settings.depth,
        dtype=settings.dtype,
        page_size=settings.page_size,
        num_pages=run.plan.num_pages,
        max_rows=settings.max_rows,
        num_programs=len(run.programs.steps),
        stage_seconds=dict(seconds),
        plan=str(run.plan),
        device=settings.profile.name,
        weights_version=run.weights_version,
        num_parameters=run.num_parameters,
        prefix_cache=config.prefix_cache,
        deterministic=config.deterministic,
        masked_rows=settings.ladder.masked_rows,
    )
