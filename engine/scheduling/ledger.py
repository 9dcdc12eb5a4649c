"""What the host knows of every slot, one numpy column per fact, indexed by slot."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np

from engine.config import LIMITS
from engine.request import Request
from engine.scheduling.config import SchedulerConfig
from engine.scheduling.schedule import SAMPLING_COLUMNS, Schedule

_PLACE = {name: place for place, (name, _) in enumerate(SAMPLING_COLUMNS)}


class Phase(enum.IntEnum):
    """What a slot is doing."""

    FREE = 0
    RUNNING = 1
    PREEMPTED = 2
    """Gets no more rows; results of its launches in flight still count."""
    FINISHED = 3
    """Gets no more rows; results of its launches in flight are dropped."""


class Ledger:
    """Counts of tokens, outputs and launches: scheduled = in flight + settled, always."""

    def __init__(self, config: SchedulerConfig) -> None:
        slots = config.max_slots
        self.phase = np.zeros(slots, np.int8)
        self.generation = np.zeros(slots, np.int64)
        """Counter of the slot's owners."""
        self.admission = np.zeros(slots, np.int64)
        """Counter of admissions: chunks run in this order."""
        self.known_ids = np.zeros((slots, config.max_model_len), np.int32)
        """Prompt and settled outputs."""
        self.num_known = np.zeros(slots, np.int32)
        self.prompt_len = np.zeros(slots, np.int32)
        self.max_tokens = np.zeros(slots, np.int32)
        self.min_tokens = np.zeros(slots, np.int32)
        self.stop_ids = np.full((slots, LIMITS.stop_ids), -1, np.int32)
        """Padded with -1, which no sampled id equals."""
        self.num_prefill = np.zeros(slots, np.int32)
        """Tokens that run as chunks."""
        self.num_host_ids = np.zeros(slots, np.int32)
        """Ids known at admission: the device's `last_tokens` never holds those."""
        self.num_publishable = np.zeros(slots, np.int32)
        """Leading tokens whose pages may enter the prefix cache."""
        self.num_scheduled = np.zeros(slots, np.int32)
        """Tokens with KV in launched steps, cached ones included."""
        self.num_settled = np.zeros(slots, np.int32)
        """Tokens with KV in settled steps, cached ones included."""
        self.num_outputs = np.zeros(slots, np.int32)
        """Outputs whose sampling row is launched."""
        self.num_in_flight = np.zeros(slots, np.int32)
        """Unsettled launches that name the slot."""
        self.last_step = np.zeros(slots, np.int64)
        """Newest launch that names the slot."""
        self.needs_full_sampler = np.zeros(slots, np.bool_)
        self.is_masked = np.zeros(slots, np.bool_)
        """A grammar bounds the outputs."""
        self._sampling = np.zeros((len(SAMPLING_COLUMNS), slots), np.int32)

    def occupy(
        self,
        slot: int,
        request: Request,
        choice: int,
        known_ids: np.ndarray,
        num_cached: int,
        num_prefill: int,
    ) -> None:
        """Writes every column of a slot for its new owner."""
        prompt_len, known = len(request.prompt_ids), len(known_ids)
        self.phase[slot] = Phase.RUNNING
        self.generation[slot] += 1
        self.admission[slot] = self.admission.max() + 1
        self.known_ids[slot, :known] = known_ids
        self.num_known[slot] = self.num_host_ids[slot] = known
        self.prompt_len[slot] = prompt_len
        self.max_tokens[slot] = request.max_tokens
        self.min_tokens[slot] = request.params.min_tokens
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        self.num_prefill[slot] = num_prefill
        self.num_scheduled[slot] = self.num_settled[slot] = num_cached
        self.num_outputs[slot] = known - prompt_len
        self.num_in_flight[slot] = 0
        self.needs_full_sampler[slot] = not request.params.is_plain_greedy
        self.is_masked[slot] = request.grammar is not None
        self._write_sampling(slot, request, choice)

    def _write_sampling(self, slot: int, request: Request, choice: int) -> None:
        params = request.params
        values = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "top_k": max(params.top_k, 0),
            "seed_low": request.seed & 0xFFFFFFFF,
            "seed_high": request.seed >> 32,
            "choice": choice,
            "output_index": 0,
            "min_tokens": params.min_tokens,
            "prompt_len": len(request.prompt_ids),
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
            "processed_logprobs": int(params.processed_logprobs),
        }
        for name, dtype in SAMPLING_COLUMNS:
            self._sampling[_PLACE[name], slot] = np.asarray(values[name], dtype).view(np.int32)

    def sampling(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Fresh sampling columns of rows about to be launched."""
        rows = self._sampling.take(slots, axis=1)
        rows[_PLACE["output_index"]] = self.num_outputs[slots]
        return {name: rows[_PLACE[name]].view(dtype) for name, dtype in SAMPLING_COLUMNS}

    @property
    def has_work(self) -> np.ndarray:
        """bool[slots]: running, with a row still to launch."""
        return (self.phase == Phase.RUNNING) & (
            (self.num_scheduled < self.num_prefill) | (self.num_outputs < self.max_tokens)
        )

    def launch(self, step: int, slots: np.ndarray, q_lens: np.ndarray, samples: np.ndarray) -> None:
        """Books the rows of one step."""
        self.num_scheduled[slots] += q_lens
        self.num_outputs[slots] += samples
        self.num_in_flight[slots] += 1
        self.last_step[slots] = step

    def settle(self, slots: np.ndarray, generations: np.ndarray, q_lens: np.ndarray) -> None:
        """Books the end of one launch's rows."""
        assert np.array_equal(generations, self.generation[slots]), (
            "a slot keeps its owner until the last launch that names it is settled"
        )
        self.num_in_flight[slots] -= 1
        self.num_settled[slots] += q_lens

    def append(self, slots: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds one settled output per slot.

        Returns:
          bool[rows] twice: the id is a stop id of its own row that counts, past min_tokens; it is
          the last one allowed.
        """
        self.known_ids[slots, self.num_known[slots]] = ids
        self.num_known[slots] += 1
        num_outputs = self.num_known[slots] - self.prompt_len[slots]
        is_stop = (self.stop_ids[slots] == ids[:, None]).any(axis=1)
        is_stop &= num_outputs > self.min_tokens[slots]
        return is_stop, num_outputs >= self.max_tokens[slots]

    def audit(self, in_flight: Iterable[Schedule]) -> None:
        """Checks the counts against the launches in flight.

        Raises:
          AssertionError: naming the slot and what is wrong.
        """
        launches = np.zeros_like(self.num_in_flight)
        tokens = np.zeros_like(self.num_scheduled)
        for schedule in in_flight:
            assert np.array_equal(schedule.generations, self.generation[schedule.slots]), (
                f"a slot of step {schedule.step} has a new owner before the step is settled"
            )
            launches[schedule.slots] += 1
            tokens[schedule.slots] += schedule.q_lens
        for slot in range(len(self.phase)):
            phase = Phase(self.phase[slot])
            assert launches[slot] == self.num_in_flight[slot], (
                f"slot {slot} has {launches[slot]} launches in flight, counts "
                f"{self.num_in_flight[slot]}"
            )
            if phase == Phase.FREE:
                assert not launches[slot], f"slot {slot} is free with a launch in flight"
                continue
            assert self.num_scheduled[slot] == tokens[slot] + self.num_settled[slot], (
                f"slot {slot}: {self.num_scheduled[slot]} tokens scheduled, {tokens[slot]} in "
                f"flight, {self.num_settled[slot]} settled"
            )
            assert self.num_outputs[slot] <= self.max_tokens[slot], f"slot {slot}: too many outputs"
            known_outputs = self.num_known[slot] - self.prompt_len[slot]
            assert 0 <= known_outputs <= self.num_outputs[slot], f"slot {slot}: unlaunched outputs"
            end = self.prompt_len[slot] + self.num_outputs[slot]
            assert self.num_scheduled[slot] <= end, f"slot {slot}: a row without an id"
            if phase != Phase.RUNNING:
                assert launches[slot], f"slot {slot} is {phase.name} with nothing in flight"
