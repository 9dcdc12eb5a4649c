"""One hand-written scene on a runner, three times: ids true on the host, poisoned, on the device.

A reference gives every row its true id from the host. B control poisons the host ids and withholds
the truth. C gate poisons the host ids and leaves the truth in `last_tokens` alone.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np

from engine.config import EngineConfig
from engine.execution import startup
from engine.execution.buckets import Ladder, ProgramKey
from engine.execution.runner import Launch, Runner
from engine.execution.step import StepState
from engine.scheduling.schedule import (
    SAMPLING_COLUMNS,
    Install,
    RowKind,
    Schedule,
    StepResult,
)
from tests.families import tiny

ROWS = {
    "LlamaForCausalLM": "llama",
    "LlamaHostEmbedForCausalLM": "llama_host_embed",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MistralForCausalLM": "mistral_swa",
    "InternLM2ForCausalLM": "internlm2",
    "DeepseekV2ForCausalLM": "deepseek_v2_lite",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
}
"""The tiny checkpoint of every registration. One without a row fails the suite."""
SYNC_ONLY = ("LlamaHostEmbedForCausalLM",)
"""Registrations that are never given an id from the device: they have no run C."""

LaneForm = Literal["compiled", "eager"]
_ALL_KEYS = Ladder.keys


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Prefill tokens of one slot; a first chunk installs a new owner."""

    slot: int
    length: int
    is_first: bool = True
    is_last: bool = True


@dataclasses.dataclass(frozen=True)
class Step:
    """Slots that decode, then slots that prefill."""

    decode: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()


SCENE = (
    Step(chunks=(Chunk(3, 5), Chunk(0, 6))),
    Step(decode=(3, 0)),
    Step(decode=(3, 0), chunks=(Chunk(2, 4, is_last=False),)),
    Step(decode=(3, 0), chunks=(Chunk(2, 3, is_first=False),)),
    Step(decode=(2, 3, 0)),
    # Slot 3 has ended; its neighbours move up a row.
    Step(decode=(2, 0)),
    # Slot 3 has another owner.
    Step(decode=(2, 0), chunks=(Chunk(3, 7),)),
    Step(decode=(3, 2, 0)),
)
"""Rows never stand at the place of their slot, so that the one cannot pass for the other."""


@dataclasses.dataclass
class Played:
    """What one run of the scene gave, and what it counted."""

    schedules: list[Schedule] = dataclasses.field(default_factory=list)
    keys: list[ProgramKey] = dataclasses.field(default_factory=list)
    results: list[StepResult] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    """f32[rows, V] of each step; eager runs only."""
    befores: list[StepState] = dataclasses.field(default_factory=list)
    """A copy of the state before each step; reference only."""
    final: StepState | None = None
    """A copy of the state after the last step."""
    host_counts: tuple[int, int] = (0, 0)
    """Rows from the device and from the host, as the runner counted them."""
    state_counts: tuple[int, int] = (0, 0)
    """The same, as the state counted them."""

    @property
    def truth(self) -> set[int]:
        """Every id that some row of the scene embeds or samples."""
        prompts = {int(i) for one in self.schedules for i in one.token_ids}
        return prompts | {int(i) for one in self.results for i in one.sampled[one.num_new > 0].flat}


def start(architecture: str, lane: LaneForm, folder: pathlib.Path) -> Runner:
    """A runner of the registration's tiny checkpoint, by the way every engine takes."""
    tiny.write_checkpoint(ROWS[architecture], folder)
    config = EngineConfig(
        model=str(folder),
        eager=lane == "eager",
        max_model_len=32,
        max_rows=4,
        row_rungs=(4,),
        token_budget=16,
        token_rungs=(16,),
        page_size=4,
        num_pages=48,
        compilation_cache=None,
    )
    model, source, _, _ = startup.open_model(config)
    assert model.registration.architecture == architecture
    with mock.patch.object(Ladder, "keys", greedy_keys):
        return startup.start(config, model, source, lambda *_: None)


def greedy_keys(ladder: Ladder) -> tuple[ProgramKey, ...]:
    """The decode and the mixed program that the scene runs on: the rest take long to compile.

    The start-up proofs make the same three runs of every program.
    """
    return tuple(key for key in _ALL_KEYS(ladder) if key.sampler == "greedy")


class Player:
    """Plays the scene on one runner. Eager runs keep the logits of every step too."""

    def __init__(self, runner: Runner, architecture: str) -> None:
        self.runner = runner
        self.name = ROWS[architecture]
        self._logits: list[np.ndarray] = []
        if runner.settings.lane == "eager":
            runner.model = dataclasses.replace(runner.model, registration=self._tapped(runner))

    def reference(self) -> Played:
        """Run A: each row's true id comes from the host, read from the result before.

        Prompts are tried until no id of the scene is 0, the id of a poisoned row.
        """
        for salt in range(8):
            played = self._reference(salt)
            if 0 not in played.truth:
                break
        return played

    def _reference(self, salt: int) -> Played:
        self._begin("sync", 1)
        played, script = Played(), Script(self, salt)
        for step in SCENE:
            played.befores.append(copied(self.runner.state))
            schedule = script.schedule(step)
            played.results.append(self._settle(self._launch(schedule, played)))
            script.settled(schedule, played.results[-1])
        return self._end(played)

    def control(self, a: Played, poison: int) -> Played:
        """Run B: from the state before each step of A, poison on the host and on the device."""
        self._begin("sync", 1)
        played = Played()
        for before, schedule in zip(a.befores, a.schedules, strict=True):
            start = copied(before)
            place = start.last_tokens.sharding
            no_truth = np.full(start.last_tokens.shape, poison, np.int32)
            self.runner.state = dataclasses.replace(
                start,
                last_tokens=jax.device_put(no_truth, place),
                counters=copied(self.runner.state.counters),
            )
            launch = self._launch(poisoned(schedule, poison, RowKind(0)), played)
            played.results.append(self._settle(launch))
        return self._end(played)

    def gate(self, a: Played, poison: int) -> Played:
        """Run C: a run of its own, two launches in flight, truth on the device alone."""
        self._begin("overlap", 2)
        played = Played()
        in_flight: collections.deque[Launch] = collections.deque()
        for schedule in a.schedules:
            in_flight.append(self._launch(poisoned(schedule, poison, RowKind.DEVICE_ID), played))
            if len(in_flight) == 2:
                played.results.append(self._settle(in_flight.popleft()))
        played.results.append(self._settle(in_flight.popleft()))
        return self._end(played)

    def unwritten(self, a: Played, step: int, slot: int) -> StepResult:
        """One step of A from the device's ids, the newest id of a slot never written."""
        self._begin("overlap", 2)
        start = copied(a.befores[step])
        last_tokens = np.array(start.last_tokens)
        last_tokens[slot] = -1
        place = start.last_tokens.sharding
        self.runner.state = dataclasses.replace(
            start, last_tokens=jax.device_put(last_tokens, place)
        )
        schedule = poisoned(a.schedules[step], 0, RowKind.DEVICE_ID)
        return self._settle(self._launch(schedule, Played()))

    def _begin(self, lane: Any, depth: int) -> None:
        """An empty state; the eager lane stays what it is."""
        runner = self.runner
        if runner.settings.lane != "eager":
            runner.settings = dataclasses.replace(runner.settings, lane=lane, depth=depth)
        runner.reset_state()
        runner.counters = type(runner.counters)()
        self._logits = []

    def _launch(self, schedule: Schedule, played: Played) -> Launch:
        packed = self.runner.pack(schedule)
        played.schedules.append(schedule)
        played.keys.append(packed.key)
        return self.runner.launch(packed)

    def _settle(self, launch: Launch) -> StepResult:
        return self.runner.settle(launch)

    def _end(self, played: Played) -> Played:
        counters = self.runner.counters
        played.host_counts = (counters.device_rows, counters.host_rows)
        played.state_counts = self.runner.device_counters()
        played.final = copied(self.runner.state)
        played.logits = self._logits
        return played

    def _tapped(self, runner: Runner) -> Any:
        registration = runner.model.registration
        logits = registration.logits

        def kept(config: Any, params: Any, hidden: jax.Array) -> jax.Array:
            made = logits(config, params, hidden)
            self._logits.append(np.array(made))
            return made

        return dataclasses.replace(registration, logits=kept)


class Script:
    """Turns steps into schedules; each slot owns the same pages from start to end."""

    def __init__(self, player: Player, salt: int) -> None:
        settings = player.runner.settings
        self._name = player.name
        self._salt = salt
        self._num_groups = player.runner.shapes.num_groups
        width = settings.max_pages
        pages = 1 + np.arange(settings.max_slots * width, dtype=np.int32)
        # Backwards, so that no page stands at the place of its slot or position.
        self._table = pages[::-1].reshape(settings.max_slots, width)
        self._num_tokens = np.zeros(settings.max_slots, np.int32)
        self._newest = np.zeros(settings.max_slots, np.int32)
        self._prompts: dict[int, np.ndarray] = {}
        self._num_steps = 0

    def schedule(self, step: Step) -> Schedule:
        """The next step with every id true on the host."""
        installs = tuple(self._install(chunk) for chunk in step.chunks if chunk.is_first)
        slots = np.array([*step.decode, *(chunk.slot for chunk in step.chunks)], np.int32)
        q_lens = np.array([1] * len(step.decode) + [one.length for one in step.chunks], np.int32)
        kinds = [RowKind.DECODE | RowKind.SAMPLES] * len(step.decode)
        kinds += [RowKind.SAMPLES if one.is_last else RowKind(0) for one in step.chunks]
        token_ids = [self._newest[list(step.decode)], *(self._ids(one) for one in step.chunks)]
        kv_lens = self._num_tokens[slots] + q_lens
        self._num_tokens[slots] = kv_lens
        self._num_steps += 1
        return Schedule(
            step=self._num_steps,
            is_decode=not step.chunks,
            is_full_sampler=False,
            scores_prompt=False,
            slots=slots,
            generations=np.zeros(len(slots), np.int64),
            kinds=np.array([int(kind) for kind in kinds], np.int32),
            q_lens=q_lens,
            token_ids=np.concatenate(token_ids).astype(np.int32),
            kv_lens=kv_lens,
            page_tables=tuple(self._table[slots] for _ in range(self._num_groups)),
            sampling={name: np.zeros(len(slots), dtype) for name, dtype in SAMPLING_COLUMNS},
            installs=installs,
        )

    def settled(self, schedule: Schedule, result: StepResult) -> None:
        """Takes the newest id of every row that sampled."""
        has_new = result.num_new > 0
        self._newest[schedule.slots[has_new]] = result.sampled[has_new, 0]

    def _install(self, chunk: Chunk) -> Install:
        length = chunk.length if chunk.is_last else 7
        prompt = tiny.random_ids(self._name, 40 + 10 * self._num_steps + self._salt)[-length:]
        self._prompts[chunk.slot] = prompt
        self._num_tokens[chunk.slot] = 0
        return Install(chunk.slot, prompt, 0, (), (), (), ())

    def _ids(self, chunk: Chunk) -> np.ndarray:
        start = self._num_tokens[chunk.slot]
        return self._prompts[chunk.slot][start : start + chunk.length]


def poisoned(schedule: Schedule, poison: int, kind: RowKind) -> Schedule:
    """The schedule with the host id of every decode row poisoned, and `kind` added to the row."""
    token_ids, kinds = schedule.token_ids.copy(), schedule.kinds.copy()
    token_ids[: schedule.num_decode] = poison
    kinds[: schedule.num_decode] |= int(kind)
    return dataclasses.replace(schedule, token_ids=token_ids, kinds=kinds)


def copied[T](tree: T) -> T:
    """Arrays of their own, which survive the donation of the others."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)
