"""A device that knows only what schedules tell it, and a solo run to compare with."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.request import Request, TokenLogprobs
from engine.scheduling.config import SchedulerConfig
from engine.scheduling.schedule import RowKind, Schedule, StepResult

VOCAB = 11
NUM_TOP = 3


def number(*facts: object) -> int:
    """The same number for the same facts, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=6).digest(), "little")


def sample(
    context: list[int],
    seed: int,
    choice: int,
    output_index: int,
    allowed: Sequence[int] = range(VOCAB),
) -> int:
    return allowed[number("sample", context, seed, choice, output_index) % len(allowed)]


def logprob(context: list[int], token_id: int) -> float:
    return -float(number("logprob", context, token_id) % 1000)


def solo(request: Request, choice: int) -> tuple[list[int], str, int | None]:
    """What a choice must return whatever runs beside it: ids, finish reason, stop id."""
    ids = [int(i) for i in request.prompt_ids]
    outputs: list[int] = []
    grammar: Any = request.grammar
    while len(outputs) < request.max_tokens:
        allowed = range(VOCAB) if grammar is None else grammar.allowed(outputs)
        outputs.append(sample(ids + outputs, request.seed, choice, len(outputs), allowed))
        if outputs[-1] in request.stop_ids and len(outputs) > request.params.min_tokens:
            return outputs, "stop", outputs[-1]
        if grammar is not None and grammar.is_whole(outputs):
            return outputs, "stop", None
    return outputs, "length", None


def solo_prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...]:
    ids = [int(i) for i in request.prompt_ids]
    return tuple(
        _token_logprobs(ids[:position], ids[position], request.params.prompt_logprobs or 0)
        if position
        else None
        for position in range(request.params.prompt_logprobs_start, len(ids))
    )


def _token_logprobs(context: list[int], token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple(range(token_id, token_id + num_top))
    return TokenLogprobs(
        logprob(context, token_id), token_id + 1, top, tuple(-float(i) for i in top)
    )


@dataclasses.dataclass(frozen=True)
class State:
    """What a recurrent state holds: every token that went into it, in order."""

    owner: tuple[int, int]
    """Slot and generation of the row that wrote it."""
    tokens: tuple[tuple[int, str], ...]
    """(id, program)."""


class FakeDevice:
    """Runs launches in order and hands each result out when it is settled.

    A pool entry is (id, position, program). Until a launch is settled it may write its pages and
    states again, as a copy on another queue would, so what is given away too early is corrupted.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.last_tokens = [-1] * config.max_slots
        self.num_tokens = [0] * config.max_slots
        self.history: list[list[int]] = [[] for _ in range(config.max_slots)]
        self.paged = [group for group in config.groups if not group.is_recurrent]
        self.pools: list[dict[tuple[int, int], tuple[int, int, str]]] = [{} for _ in self.paged]
        recurrent = [group for group in config.groups if group.is_recurrent]
        self.states: list[dict[int, State]] = [{} for _ in recurrent]
        self.num_snapshots = 0
        """Rows that wrote another state than the one they went on from."""
        self.pending: deque[tuple[Schedule, StepResult, list[tuple]]] = deque()
        self.program_of: dict[int, str] = {}
        self.num_device_ids = 0
        self.num_masked = 0

    def launch(self, schedule: Schedule) -> None:
        self._check_shape(schedule)
        for install in schedule.installs:
            known = [int(i) for i in install.known_ids]
            assert install.num_cached_tokens < len(known)
            self.history[install.slot] = known
            self.last_tokens[install.slot] = -1
            self.num_tokens[install.slot] = install.num_cached_tokens
        program = "decode" if schedule.is_decode else "score" if schedule.scores_prompt else "chunk"
        rows = schedule.num_rows
        sampled = np.full((rows, 1), VOCAB + 77, np.int32)  # what no row may take
        num_new = np.zeros(rows, np.int32)
        logprobs = np.zeros((rows, 1), np.float32)
        scores = np.zeros(schedule.num_tokens, np.float32)
        following = np.zeros(schedule.num_tokens, np.int32)
        writes: list[tuple] = []
        first = 0
        for row in range(rows):
            slot, q_len = int(schedule.slots[row]), int(schedule.q_lens[row])
            kind = RowKind(int(schedule.kinds[row]))
            start = self.num_tokens[slot]
            assert start + q_len == schedule.kv_lens[row], "the host's length is not the device's"
            ids = [int(i) for i in schedule.token_ids[first : first + q_len]]
            if kind & RowKind.DEVICE_ID:
                assert self.last_tokens[slot] >= 0, "the slot's own prefill has not written it"
                ids[0] = self.last_tokens[slot]
                self.num_device_ids += 1
            for group, size in enumerate(self.page_sizes):
                for offset, token_id in enumerate(ids):
                    position = start + offset
                    page = int(schedule.page_tables[group][row, position // size])
                    assert page > 0, "a real row writes the trash page"
                    writes.append((group, page, position % size, (token_id, position, program)))
                    self._store(writes[-1])
            self._advance_states(schedule, row, start, ids, program)
            context = self._read(schedule, row)
            self.num_tokens[slot] = start + q_len
            if kind & RowKind.SAMPLES:
                sampling = {name: column[row] for name, column in schedule.sampling.items()}
                index = int(sampling["output_index"])
                assert index == len(context) - sampling["prompt_len"]
                seed = int(sampling["seed_low"]) | int(sampling["seed_high"]) << 32
                allowed = self._allowed(schedule, row)
                token_id = sample(context, seed, int(sampling["choice"]), index, allowed)
                sampled[row, 0], num_new[row] = token_id, 1
                logprobs[row, 0] = logprob(context, token_id)
                self.last_tokens[slot] = token_id
                assert len(self.history[slot]) == len(context), "a sample would be written twice"
                self.history[slot].append(token_id)
            if kind & RowKind.SCORES:
                for offset in range(q_len):
                    position = start + offset + 1
                    if position < len(self.history[slot]):
                        following[first + offset] = self.history[slot][position]
                        scores[first + offset] = logprob(
                            context[:position], self.history[slot][position]
                        )
            first += q_len
        top_ids = sampled[:, :, None] + np.arange(NUM_TOP, dtype=np.int32)
        prompt_top_ids = following[:, None] + np.arange(NUM_TOP, dtype=np.int32)
        result = StepResult(
            sampled=sampled,
            num_new=num_new,
            faults=np.zeros(rows, np.int32),
            logprobs=logprobs,
            ranks=sampled + 1,
            top_ids=top_ids,
            top_logprobs=-top_ids.astype(np.float32),
            prompt_logprobs=scores,
            prompt_ranks=following + 1,
            prompt_top_ids=prompt_top_ids,
            prompt_top_logprobs=-prompt_top_ids.astype(np.float32),
        )
        self.pending.append((schedule, result, writes))

    def settle(self) -> tuple[Schedule, StepResult]:
        schedule, result, writes = self.pending.popleft()
        for write in writes:
            self._store(write)
        for pool, state_ids in zip(self.states, schedule.state_ids, strict=True):
            for row, state_id in enumerate(state_ids[:, 1].tolist()):
                owner = int(schedule.slots[row]), int(schedule.generations[row])
                # Its own later launches have gone on from here; anybody else's state is lost.
                if pool[state_id].owner != owner:
                    pool[state_id] = State(owner, ())
        return schedule, result

    def _allowed(self, schedule: Schedule, row: int) -> Sequence[int]:
        """Ids the row may sample, by the one mask of its slot and generation."""
        if not schedule.kinds[row] & RowKind.MASKED:
            return range(VOCAB)
        slot = schedule.slots[row]
        for earlier, *_ in self.pending:
            samples = earlier.slots[earlier.kinds & RowKind.SAMPLES > 0]
            assert slot not in samples, "a masked row runs before its newest id is settled"
        masks = schedule.masks
        assert masks is not None and masks.num_masks <= self.config.masked_rows
        own = (masks.slots == slot) & (masks.generations == schedule.generations[row])
        (entry,) = np.flatnonzero(own)
        self.num_masked += 1
        return [i for i in range(VOCAB) if masks.words[entry, 0] >> i & 1]

    @property
    def page_sizes(self) -> list[int]:
        return [group.page_size for group in self.paged]

    def _store(self, write: tuple) -> None:
        group, page, offset, entry = write
        self.pools[group][page, offset] = entry

    def _advance_states(
        self, schedule: Schedule, row: int, start: int, ids: list[int], program: str
    ) -> None:
        """Reads the row's state, which must hold its history, and writes it with `ids` added."""
        slot = int(schedule.slots[row])
        for pool, state_ids in zip(self.states, schedule.state_ids, strict=True):
            first, last = state_ids[row].tolist()
            assert first > 0 and last > 0, "a real row names the trash state"
            # A first chunk starts from nothing, whatever the state holds.
            before = pool[first].tokens if start else ()
            truth = self.history[slot][:start]
            assert [token_id for token_id, _ in before] == truth, (
                f"slot {slot} goes on from state {first}, which holds {before}, truth is {truth}"
            )
            after = before + tuple((token_id, program) for token_id in ids)
            owner = slot, int(schedule.generations[row])
            pool[last] = State(owner, after)
            self.num_snapshots += first != last
            if self.config.deterministic:
                for position, (_, made_by) in enumerate(after):
                    self._check_program(schedule, row, position, made_by)

    def _read(self, schedule: Schedule, row: int) -> list[int]:
        """The row's context as its pages hold it, which must be its history."""
        slot, length = int(schedule.slots[row]), int(schedule.kv_lens[row])
        truth = self.history[slot][:length]
        oldest = length - int(schedule.q_lens[row])
        for group, config in enumerate(self.paged):
            begin = 0 if config.window is None else max(0, oldest - config.window + 1)
            for position in range(begin, length):
                page = int(schedule.page_tables[group][row, position // config.page_size])
                entry = self.pools[group].get((page, position % config.page_size))
                assert entry is not None and entry[:2] == (truth[position], position), (
                    f"slot {slot} reads {entry} at {position} of page {page}, "
                    f"truth is {truth[position]}"
                )
                if self.config.deterministic:
                    self._check_program(schedule, row, position, entry[2])
        return truth

    def _check_program(self, schedule: Schedule, row: int, position: int, program: str) -> None:
        is_output = position >= int(schedule.sampling["prompt_len"][row])
        slot = int(schedule.slots[row])
        if position == 0:
            self.program_of[slot] = program
        expected = "decode" if is_output else self.program_of[slot]
        assert program == expected, f"position {position} was made by {program}, not {expected}"
        assert is_output or program != "decode", "a prompt token ran as a decode row"

    def _check_shape(self, schedule: Schedule) -> None:
        config = self.config
        num_decode = schedule.num_decode
        is_decode_row = schedule.kinds & RowKind.DECODE > 0
        assert len(set(schedule.slots.tolist())) == schedule.num_rows <= config.max_rows
        assert schedule.num_rows > 0 and (schedule.q_lens >= 1).all()
        assert is_decode_row[:num_decode].all(), "decode rows come first"
        assert (schedule.q_lens[:num_decode] == 1).all()
        assert (np.diff(schedule.kv_lens[:num_decode]) <= 0).all(), "longest first"
        assert schedule.is_decode == (num_decode == schedule.num_rows)
        assert schedule.num_tokens == schedule.q_lens.sum()
        assert (schedule.kv_lens < config.max_model_len + 1).all()
        if not schedule.is_decode:
            assert schedule.num_tokens <= config.token_budget
            assert schedule.num_rows - num_decode <= config.max_chunk_rows
            assert not (config.deterministic and num_decode), "a mixed step"
        if config.max_chunk is not None:
            assert schedule.q_lens.max() <= config.max_chunk
        if config.ids_from_host:
            assert not (schedule.kinds & RowKind.DEVICE_ID).any()
            named = {slot for one, _, _ in self.pending for slot in one.slots.tolist()}
            assert not named & set(schedule.slots[:num_decode].tolist())
        for group, size in enumerate(self.page_sizes):
            width = schedule.page_tables[group].shape[1]
            assert width * size >= schedule.kv_lens.max()
