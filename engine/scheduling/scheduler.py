"""Decides who runs: requests become schedules, and settled results become deltas.

Counts are known before results are: a step is launched while older ones are in flight, and what a
launch names (slot, pages, states) is given away only after that launch is settled.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from engine.config import LIMITS
from engine.request import Delta, FinishReason, Request, TokenLogprobs
from engine.scheduling import masks, policy
from engine.scheduling.cache_events import CacheContent, CacheWatch
from engine.scheduling.choices import Choice, LiveRequest, PromptScores
from engine.scheduling.config import GroupConfig, SchedulerConfig
from engine.scheduling.ledger import Ledger, Phase
from engine.scheduling.masks import Following, MaskMaker
from engine.scheduling.pages import PageGroup
from engine.scheduling.prefix_cache import PageKeys, PrefixCache
from engine.scheduling.schedule import (
    POISON_ID,
    Install,
    Masks,
    RowFault,
    RowKind,
    Schedule,
    StepResult,
)
from engine.scheduling.states import StateGroup

__all__ = ["GroupConfig", "QueueFull", "Scheduler", "SchedulerConfig", "SchedulerStats"]

_WELL_FILLED = 5 / 8
"""Of a step's padded tokens: from here on one large step beats small ones (a mixture of experts
reads most of its weights for either; H200, 2026-11-30)."""
_NO_SLOTS = np.zeros(0, np.int64)

_QUICK_SECONDS = 2e-3
"""What a step waits for grammars that are quick as a rule, all together; the device is busy with
the next launch meanwhile. A row whose grammar took longer the last time is not waited for."""
_POLL_SECONDS = 0.01
"""What a loop with nothing but grammars to wait for waits before it looks for commands."""

_FAULTS = {
    RowFault.BAD_ID: "its slot's id lay outside the vocabulary, never written or corrupted",
    RowFault.NONFINITE_KV: "a key or value was not finite, or a recurrent state",
    RowFault.NONFINITE_LOGITS: "a logit was not finite",
    RowFault.MISSING_MASK: "its step brought no grammar mask of its own",
    RowFault.NOTHING_ALLOWED: "grammar, allowed_token_ids and bad_words together allow no id here",
}


class QueueFull(Exception):
    """Too many requests wait for admission; the caller may try again later."""


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """Counters since the start, and what is taken now."""

    num_waiting: int
    num_running: int
    num_in_flight: int
    num_preemptions: int
    num_resumed: int
    """Requests that ran again after a failed launch."""
    prefix_query_tokens: int
    """Tokens looked up in the prefix cache, per admission."""
    prefix_hit_tokens: int
    num_pages: tuple[int, ...]
    """Pages that can be given, per group; a state of a recurrent group counts as one."""
    num_free_pages: tuple[int, ...]
    num_idle_pages: tuple[int, ...]
    """Cached pages without an owner, given when the free ones are out."""


class Scheduler:
    """Owner of slots, pages, states and counts.

    One thread drives it: schedule, launch, settle in order.

    Args:
      config: sizes and rules.
      clock: seconds, for the time a request was first scheduled at; decides nothing.
      mask_maker: makes the masks of grammars; None makes each where its id is settled.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.perf_counter,
        mask_maker: MaskMaker | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._mask_maker = mask_maker or MaskMaker()
        self._following: dict[Choice, tuple[Following, Delta]] = {}
        """Grammars on their way past the newest settled id, whose delta comes behind it. A choice
        gets no row and no slot meanwhile; it may lose its slot."""
        self._ledger = Ledger(config)
        self._cache = PrefixCache(config.groups)
        self._groups = tuple(self._make_group(index) for index in range(len(config.groups)))
        self._page_groups = tuple(g for g in self._groups if isinstance(g, PageGroup))
        self._caches_prefixes = config.prefix_cache and all(
            group.prefix_cacheable for group in config.groups
        )
        self._chunk_border = self._find_chunk_border()
        self._weights_version = config.weights_version
        self._requests: dict[str, LiveRequest] = {}
        self._queue = policy.WaitingQueue()
        self._owners: list[Choice | None] = [None] * config.max_slots
        self._free_slots = list(range(config.max_slots - 1, -1, -1))
        self._draining: set[Choice] = set()  # preempted, last launch not settled
        self._in_flight: deque[Schedule] = deque()
        # Last step that names them, group, pages that no row reads any more.
        self._passed: deque[tuple[int, int, list[int]]] = deque()
        self._deltas: list[Delta] = []
        self._num_submitted = 0
        self._num_unstarted = 0
        self._num_held = 0
        self._next_step = 0
        self._was_decode = False
        self._num_preemptions = 0
        self._num_resumed = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0

    def _make_group(self, index: int) -> PageGroup | StateGroup:
        config, group = self._config, self._config.groups[index]
        on_evict = functools.partial(self._cache.evict, index)
        if group.is_recurrent:
            return StateGroup(group, config.max_slots, on_evict)
        return PageGroup(group, config.max_slots, config.max_model_len, on_evict)

    def _find_chunk_border(self) -> int | None:
        """Chunks end at its multiples where they can: lengths at which every group can be cut.

        None where the ends of chunks decide nothing: pages of any full prefix are kept.
        """
        if not self._caches_prefixes or len(self._page_groups) == len(self._groups):
            return None
        return math.lcm(*(group.config.page_size for group in self._groups))

    # What the engine asks for.

    def submit(self, request: Request) -> None:
        """Queues a validated request.

        Raises:
          ValueError: its id is live, or it can never fit; names the value, limit and way out.
          QueueFull: too many requests wait.
        """
        self._check(request)
        live = LiveRequest(request, num_unfinished=request.params.n)
        for index in range(request.params.n):
            order = policy.order_of(self._config.policy, request, self._num_submitted, index)
            choice = Choice(live, request, index, order, request.prompt_ids)
            if choice.is_scored:
                choice.scores = PromptScores(request)
            live.choices.append(choice)
        self._num_submitted += 1
        self._num_unstarted += 1
        self._requests[request.request_id] = live
        self._queue.push(live.choices[0])
        if self._caches_prefixes:
            live.held.extend(live.choices[1:])
            self._num_held += len(live.held)
        else:
            for choice in live.choices[1:]:
                self._queue.push(choice)

    def abort(
        self,
        request_id: str,
        reason: Literal["abort", "stop"] = "abort",
        choice: int | None = None,
    ) -> None:
        """Ends one choice or all of them, at any moment; nothing happens when they are over."""
        live = self._requests.get(request_id)
        if live is None:
            return
        chosen = live.choices if choice is None else live.choices[choice : choice + 1]
        for one in chosen:
            if not one.is_finished:
                self._deltas.append(self._delta(one, finish_reason=reason))
                self._finish(one)
                self._release_settled(one)

    def schedule(self) -> Schedule | None:
        """The next step, booked as launched; None when nothing can run now."""
        self._take_followed(0.0)
        decodes = self._secure_pages(self._decode_candidates())
        installs = self._admit()
        decodes, chunks = self._select(decodes, self._chunk_candidates())
        if not len(decodes) and not chunks:
            assert not installs, "who is admitted has a chunk to run"
            return None
        schedule = self._build(decodes, chunks, installs)
        self._in_flight.append(schedule)
        return schedule

    def wait_for_masks(self) -> bool:
        """Waits a moment for one that is under way; False: there is none."""
        if not self._following:
            return False
        masks.wait([one for one, _ in self._following.values()], _POLL_SECONDS, for_all=False)
        return True

    def close(self) -> None:
        """Ends the threads that make masks."""
        self._mask_maker.close()

    def settle(self, schedule: Schedule, result: StepResult) -> None:
        """Accepts the result of the oldest launch in flight.

        Raises:
          ValueError: `schedule` is not the oldest launch in flight.
        """
        if not self._in_flight or self._in_flight[0] is not schedule:
            raise ValueError(
                f"step {schedule.step} is not the oldest launch in flight; settle in launch order"
            )
        self._in_flight.popleft()
        ledger, slots = self._ledger, schedule.slots
        ledger.settle(slots, schedule.generations, schedule.q_lens)
        counts = ledger.phase[slots] != Phase.FINISHED  # results of late rows are dropped
        counts &= ~self._fail_faulty(schedule, result, counts)
        self._settle_chunks(schedule, result, counts)
        self._publish(slots[counts])
        self._settle_samples(schedule, result, counts)
        self._pass_windows(schedule)
        is_drained = (ledger.num_in_flight[slots] == 0) & (ledger.phase[slots] != Phase.RUNNING)
        for slot in slots[is_drained].tolist():
            self._release(slot)
        self._take_followed(_QUICK_SECONDS)

    def take_deltas(self) -> list[Delta]:
        """Everything new since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def void(self, schedules: Sequence[Schedule], reason: str) -> None:
        """Forgets failed launches; the device state is lost and the prefix cache is empty.

        Every running choice starts again from its settled ids, as after a preemption. A request
        that was in failed launches before ends with an error, all its choices: it may be the cause.

        Args:
          schedules: every launch in flight; settle the sound ones before.
          reason: why they failed; goes into the deltas of requests that end.

        Raises:
          ValueError: other launches are still in flight.
        """
        if {id(one) for one in self._in_flight} != {id(one) for one in schedules}:
            raise ValueError(
                f"{len(schedules)} launches are void but {len(self._in_flight)} are in flight; "
                "settle the sound ones first and void all others together"
            )
        named = [self._owners[slot] for one in schedules for slot in one.slots.tolist()]
        self._in_flight.clear()
        self._ledger.num_in_flight[:] = 0
        hit = [choice.live for choice in named if choice is not None and not choice.is_finished]
        for live in dict.fromkeys(hit):
            self._resume_or_fail(live, reason)
        self._release_passed(self._next_step)
        for slot, choice in enumerate(self._owners):
            if choice is None:
                continue
            if self._ledger.phase[slot] == Phase.RUNNING:
                self._ledger.phase[slot] = Phase.PREEMPTED
                self._draining.add(choice)
            self._release(slot)
        self.reset_prefix_cache()

    def _resume_or_fail(self, live: LiveRequest, reason: str) -> None:
        live.num_failed_launches += 1
        if live.num_failed_launches == 1:
            self._num_resumed += 1
            return
        name = live.request.request_id
        message = f"request {name!r} was in two failed launches, the last one by {reason}"
        for one in live.choices:
            if not one.is_finished:
                self._fail(one, message)

    def reset_prefix_cache(self, weights_version: int | None = None) -> None:
        """Forgets every cached page; pages of running choices stay theirs.

        Args:
          weights_version: of the weights that run from now on; None: the same.
        """
        if weights_version is not None:
            self._weights_version = weights_version
        self._cache.clear()
        for group in self._groups:
            group.pool.forget()

    def watch_prefix_cache(self, watch: CacheWatch) -> CacheContent:
        """Begins to tell `watch` of every change in the prefix cache; returns what is there now."""
        return self._cache.watch(watch)

    def unwatch_prefix_cache(self, watch: CacheWatch) -> None:
        """Ends it; one that does not watch is no error."""
        self._cache.unwatch(watch)

    @property
    def is_idle(self) -> bool:
        """True when no request is live and nothing is in flight."""
        return not self._requests and not self._in_flight

    @property
    def num_waiting(self) -> int:
        """Live choices without a slot."""
        return self._num_held + len(self._queue)

    @property
    def num_running(self) -> int:
        """Choices with rows to launch or results to come that count."""
        phase = self._ledger.phase
        return int(np.count_nonzero((phase == Phase.RUNNING) | (phase == Phase.PREEMPTED)))

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return SchedulerStats(
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_in_flight=len(self._in_flight),
            num_preemptions=self._num_preemptions,
            num_resumed=self._num_resumed,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_pages=tuple(group.config.num_pages - 1 for group in self._groups),
            num_free_pages=tuple(group.pool.num_free for group in self._groups),
            num_idle_pages=tuple(group.pool.num_idle for group in self._groups),
        )

    # Submission.

    def _check(self, request: Request) -> None:
        name, prompt_len = request.request_id, len(request.prompt_ids)
        if name in self._requests:
            raise ValueError(f"request_id {name!r} is live already; finish or abort it, or rename")
        total = prompt_len + request.max_tokens
        if total > self._config.max_model_len:
            raise ValueError(
                f"request {name!r} needs {total} tokens but max_model_len is "
                f"{self._config.max_model_len}; shorten the prompt or lower max_tokens"
            )
        if len(request.stop_ids) > LIMITS.stop_ids:
            raise ValueError(
                f"request {name!r} has {len(request.stop_ids)} stop ids, the limit is "
                f"{LIMITS.stop_ids}; name fewer"
            )
        self._check_grammar(request)
        # The last output is never fed back, so it needs no page.
        num_tokens = max(prompt_len, total - 1)
        for group in self._page_groups:
            needed, limit = group.config.pages_for(num_tokens), group.config.num_pages - 1
            if needed > limit:
                raise ValueError(
                    f"request {name!r} needs {needed} pages of {group.config.page_size} tokens "
                    f"but the pool has {limit}; shorten the prompt, lower max_tokens or start the "
                    "engine with more num_pages"
                )
        if self._num_unstarted >= self._config.queue_limit:
            raise QueueFull(
                f"{self._num_unstarted} requests wait and the limit is "
                f"{self._config.queue_limit}; try again later or raise limits.queued_requests"
            )

    def _check_grammar(self, request: Request) -> None:
        if (request.params.structured is None) != (request.grammar is None):
            raise ValueError(
                f"request {request.request_id!r} has a structure without its grammar, or a grammar "
                "without a structure; compile params.structured before it is submitted"
            )
        if request.grammar is not None and not self._config.masked_rows:
            raise ValueError(
                f"request {request.request_id!r} asks for structured output but the engine has no "
                "program that takes masks; start it with masked_rows, such as 16"
            )

    # Admission.

    def _admit(self) -> list[Install]:
        """Gives slots, pages and states to waiting choices, in order, while there is room."""
        installs: list[Install] = []
        num_active = int(np.count_nonzero(self._ledger.has_work))
        while len(self._queue) and self._free_slots and num_active < self._config.max_rows:
            choice = self._queue.peek()
            if any(other.order < choice.order for other in self._draining):
                break  # who was preempted goes first, as soon as its last launch is settled
            if choice in self._following:
                break  # its chunk could not be run to the end
            install = self._place(choice, num_active)
            if install is None:
                break
            self._queue.pop()
            installs.append(install)
            num_active += 1
        return installs

    def _place(self, choice: Choice, num_active: int) -> Install | None:
        """Gives a choice a slot, pages for its known ids, and states; None: there is no room."""
        request, ids = choice.request, choice.known_ids
        num_prefill = len(request.prompt_ids) if self._config.deterministic else len(ids)
        num_cached, cached = self._find_prefix(choice, num_prefill)
        if not all(
            group.has_room(pages, len(ids), num_active)
            for group, pages in zip(self._groups, cached, strict=True)
        ):
            return None
        slot = self._free_slots.pop()
        for group, pages in zip(self._groups, cached, strict=True):
            group.occupy(slot, pages, len(ids))
        self._ledger.occupy(slot, request, choice.index, ids, num_cached, num_prefill)
        self._ledger.num_publishable[slot] = self._num_publishable(choice)
        self._owners[slot] = choice
        choice.slot = slot
        choice.begin_grammar()
        if choice.num_cached_tokens is None:
            choice.num_cached_tokens = num_cached
            if not choice.live.is_started:
                choice.live.is_started = True
                self._num_unstarted -= 1
        self._prefix_query_tokens += num_prefill if self._caches_prefixes else 0
        self._prefix_hit_tokens += num_cached
        return _install(choice, num_cached)

    def _find_prefix(self, choice: Choice, num_prefill: int) -> tuple[int, tuple[list[int], ...]]:
        if not self._caches_prefixes:
            return 0, tuple([] for _ in self._groups)
        limit = num_prefill - 1  # one token is always computed: it makes the first sample
        if choice.scores is not None:
            limit = min(limit, choice.scores.num_cacheable)
        if self._config.deterministic and choice.is_scored:
            limit = 0  # the score program runs its whole prompt, warm or cold
        if choice.keys is None or choice.keys.weights_version != self._weights_version:
            salt = choice.request.cache_salt
            choice.keys = PageKeys(self._weights_version, salt, self._config.groups)
        hit = self._cache.find(choice.keys, choice.known_ids, limit)
        return hit.num_tokens, hit.pages

    def _num_publishable(self, choice: Choice) -> int:
        if not self._caches_prefixes:
            return 0
        if not self._config.deterministic:
            return self._config.max_model_len
        # Only what one program made may be shared: chunks without scores.
        return 0 if choice.is_scored else len(choice.request.prompt_ids)

    # Grammars.

    def _take_followed(self, seconds: float) -> None:
        """Delivers ids that grammars have gone past, with the masks behind them.

        Args:
          seconds: how long to wait for grammars that are quick as a rule, all together.
        """
        if not self._following:
            return
        if seconds:
            quick = [one for choice, (one, _) in self._following.items() if choice.is_quick]
            masks.wait(quick, seconds, for_all=True)
        for choice, (following, delta) in list(self._following.items()):
            if following.result.done() or following.seconds > self._config.mask_ms / 1e3:
                del self._following[choice]
                choice.is_quick = following.seconds <= _QUICK_SECONDS
                self._take_one(choice, following, delta)
                if choice.is_finished:
                    self._release_settled(choice)
            elif seconds:
                choice.is_quick = False  # waited for once

    def _take_one(self, choice: Choice, following: Following, delta: Delta) -> None:
        name, limit = choice.request.request_id, self._config.mask_ms
        if following.seconds > limit / 1e3:
            self._fail(
                choice,
                f"request {name!r}: the mask of its next id takes longer than {limit} ms, the "
                "limit; write a simpler structure",
                is_callers_fault=True,
            )
            return
        if (error := following.result.exception()) is not None:
            self._fail(choice, f"request {name!r}: making its mask failed: {type(error).__name__}")
            return
        followed = following.result.result()
        if not followed.is_accepted:
            self._fail_refused(choice, delta.token_ids[0], followed.fault)
            return
        if followed.mask is not None and not followed.mask.any():
            self._fail(
                choice,
                f"request {name!r}: its grammar allows no id of the vocabulary here"
                + (f" ({followed.fault}); write a simpler structure" if followed.fault else ""),
                is_callers_fault=True,
            )
            return
        choice.mask = followed.mask
        reason = "stop" if followed.is_complete else delta.finish_reason
        self._deltas.append(delta._replace(finish_reason=reason))
        if reason is not None:
            self._finish(choice)

    def _fail_refused(self, choice: Choice, token_id: int, fault: str) -> None:
        """Ends a choice whose grammar does not go past the id that was sampled."""
        name = choice.request.request_id
        assert choice.mask is not None, "a masked row brought its mask"
        word = int(choice.mask[token_id // 32]) if token_id < 32 * len(choice.mask) else 0
        if not word >> token_id % 32 & 1:
            self._fail(choice, f"request {name!r}: its grammar refused the sampled id {token_id}")
            return
        self._fail(
            choice,
            f"request {name!r}: its grammar allowed the id {token_id} and cannot go past it"
            + (f" ({fault})" if fault else "")
            + "; write a simpler structure",
            is_callers_fault=True,
        )

    # Selection of rows.

    def _decode_candidates(self) -> np.ndarray:
        ledger = self._ledger
        ready = ledger.has_work & (ledger.num_scheduled >= ledger.num_prefill)
        # A mask is a function of the newest id, so such a row waits until the host knows it.
        waits = ledger.is_masked | self._config.ids_from_host
        ready &= ~waits | (ledger.num_in_flight == 0)
        ready[[choice.slot for choice in self._following if choice.slot >= 0]] = False
        return np.flatnonzero(ready)

    def _chunk_candidates(self) -> list[int]:
        ledger = self._ledger
        ready = (ledger.phase == Phase.RUNNING) & (ledger.num_scheduled < ledger.num_prefill)
        slots = np.flatnonzero(ready)
        return slots[np.argsort(ledger.admission[slots])].tolist()

    def _secure_pages(self, slots: np.ndarray) -> np.ndarray:
        """Gives each row a page for its next token; returns the slots that have one."""
        num_tokens = self._ledger.num_scheduled[slots]
        lacks = [group.lacks_page(slots, num_tokens) for group in self._page_groups]
        if not any(lack.any() for lack in lacks):
            return slots
        if all(
            np.count_nonzero(lack) <= group.pool.num_available
            for group, lack in zip(self._page_groups, lacks, strict=True)
        ):
            for group, lack in zip(self._page_groups, lacks, strict=True):
                group.grow(slots[lack])
            return slots
        missing = np.logical_or.reduce(lacks)
        needy = sorted(slots[missing].tolist(), key=self._order)
        served = [slot for slot in needy if self._secure_page(slot)]
        keeps = ~missing | np.isin(slots, served)
        return slots[keeps & (self._ledger.phase[slots] == Phase.RUNNING)]

    def _secure_page(self, slot: int) -> bool:
        """Gives one row its page, at the cost of choices behind it; False: not this step."""
        ledger = self._ledger
        place = np.array([slot])
        while ledger.phase[slot] == Phase.RUNNING:
            short = [
                group
                for group in self._page_groups
                if group.lacks_page(place, ledger.num_scheduled[place])[0]
            ]
            lacking = [group for group in short if not group.pool.num_available]
            if not lacking:
                for group in short:
                    group.grow(place)
                return True
            if all(self._has_pages_to_come(group) for group in lacking):
                return False
            working = np.flatnonzero(ledger.has_work).tolist()
            self._preempt(max(working, key=self._order))
        return False

    def _has_pages_to_come(self, group: PageGroup) -> bool:
        """True when launches in flight hold pages of choices that need no more rows."""
        leaving = (self._ledger.phase != Phase.FREE) & ~self._ledger.has_work
        return bool(group.num_pages[leaving].any()) or bool(self._passed)

    def _order(self, slot: int) -> tuple[int, int, int]:
        choice = self._owners[slot]
        assert choice is not None, "a slot in use has an owner"
        return choice.order

    def _preempt(self, slot: int) -> None:
        choice = self._owners[slot]
        assert choice is not None, "a running slot has an owner"
        self._num_preemptions += 1
        self._ledger.phase[slot] = Phase.PREEMPTED
        self._draining.add(choice)
        self._release_settled(choice)

    def _select(self, decodes: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, dict[int, int]]:
        """Rows of the next step: decode slots, and chunk slots with their lengths."""
        decodes, chunks = self._bound_masked(decodes, chunks)
        budget = self._config.token_budget
        reserve = max(1, budget // 4)  # of a mixed step, so that prompts advance in any crowd
        if len(decodes) and chunks:
            if self._config.deterministic or budget == reserve:
                if self._was_decode:
                    decodes = _NO_SLOTS
                else:
                    chunks = []
            elif len(decodes) > budget - reserve:
                waited = np.argsort(self._ledger.last_step[decodes], kind="stable")
                decodes = decodes[waited[: budget - reserve]]
        self._was_decode = bool(len(decodes))
        return decodes, self._cut_chunks(chunks, budget - len(decodes), len(decodes))

    def _bound_masked(self, decodes: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, list[int]]:
        """Leaves out masked rows beyond those a step takes; who waited longest is in."""
        ledger, limit = self._ledger, self._config.masked_rows
        masked = np.concatenate([decodes, np.array(chunks, np.int64)])
        masked = masked[ledger.is_masked[masked]]
        if len(masked) <= limit:
            return decodes, chunks
        waited = np.argsort(ledger.last_step[masked], kind="stable")
        left_out = masked[waited[limit:]]
        chunks = [slot for slot in chunks if slot not in left_out]
        return decodes[~np.isin(decodes, left_out)], chunks

    def _cut_chunks(self, slots: list[int], budget: int, num_decode: int) -> dict[int, int]:
        config, ledger = self._config, self._ledger
        if config.deterministic and slots:
            # Scored prompts run by another program, so they share no step with others.
            is_scored = self._is_scored(slots[0])
            slots = [slot for slot in slots if self._is_scored(slot) == is_scored]
        slots = slots[: min(config.max_chunk_rows, config.max_rows - num_decode)]
        wanted = int((ledger.num_prefill[slots] - ledger.num_scheduled[slots]).sum())
        budget = min(budget, self._filled_rung(num_decode + wanted, num_decode) - num_decode)
        chunks: dict[int, int] = {}
        for slot in slots:
            if not budget:
                break
            length = min(int(ledger.num_prefill[slot] - ledger.num_scheduled[slot]), budget)
            if config.max_chunk is not None:
                length = min(length, config.max_chunk)
            if self._chunk_border is not None:
                length = self._cut_at_border(slot, length, self._chunk_border)
            chunks[slot] = length
            budget -= length
        return chunks

    def _filled_rung(self, num_tokens: int, num_decode: int) -> int:
        """Tokens of the next step: the rung below, where the one above would be mostly padding.

        The rest goes into further steps, which cost less together than one of padding.
        """
        rungs = self._config.token_rungs
        i = bisect.bisect_left(rungs, num_tokens)
        if not 0 < i < len(rungs) or num_tokens >= _WELL_FILLED * rungs[i]:
            return num_tokens
        below = rungs[i - 1]
        return below if num_decode <= below // 2 else num_tokens

    def _cut_at_border(self, slot: int, length: int, border: int) -> int:
        """Ends a chunk at the last multiple of `border` it reaches: its states are kept there.

        A hit leaves at least one token to compute, so the end of the last chunk does not count.
        """
        start, last = int(self._ledger.num_scheduled[slot]), int(self._ledger.num_prefill[slot])
        end = start + length
        cut = (end - (end == last)) // border * border
        return cut - start if cut > start else length

    def _is_scored(self, slot: int) -> bool:
        choice = self._owners[slot]
        return choice is not None and choice.is_scored

    # Building a step.

    def _build(
        self, decodes: np.ndarray, chunks: dict[int, int], installs: list[Install]
    ) -> Schedule:
        ledger, config = self._ledger, self._config
        # Longest first: rows of like length stand together.
        decodes = decodes[np.argsort(-ledger.num_scheduled[decodes], kind="stable")]
        slots = np.concatenate([decodes, np.fromiter(chunks, np.int64, len(chunks))])
        q_lens = np.ones(len(slots), np.int32)
        q_lens[len(decodes) :] = list(chunks.values())
        starts = ledger.num_scheduled[slots]
        kv_lens = starts + q_lens
        # A sample counts when its row ends at the newest id there is, launched or known.
        samples = kv_lens == ledger.prompt_len[slots] + ledger.num_outputs[slots]
        samples &= ledger.num_outputs[slots] < ledger.max_tokens[slots]
        kinds = np.where(samples, RowKind.SAMPLES, 0).astype(np.int32)
        kinds[: len(decodes)] |= RowKind.DECODE
        token_ids = [self._decode_ids(decodes, kinds)]
        for row, (slot, length) in enumerate(chunks.items(), len(decodes)):
            start = int(starts[row])
            token_ids.append(ledger.known_ids[slot, start : start + length])
            if self._scores(slot, start, start + length):
                kinds[row] |= RowKind.SCORES
        kinds |= np.where(samples & ledger.is_masked[slots], RowKind.MASKED, 0).astype(np.int32)
        sampling = ledger.sampling(slots)
        needs_full = config.deterministic or bool(
            (ledger.needs_full_sampler[slots] & samples).any()
        )
        schedule = Schedule(
            step=self._next_step,
            is_decode=not chunks,
            is_full_sampler=needs_full,
            scores_prompt=bool((kinds & RowKind.SCORES).any()),
            slots=slots.astype(np.int32),
            generations=ledger.generation[slots],
            kinds=kinds,
            q_lens=q_lens,
            token_ids=np.concatenate(token_ids),
            kv_lens=kv_lens,
            page_tables=tuple(group.rows(slots, int(kv_lens.max())) for group in self._page_groups),
            sampling=sampling,
            installs=tuple(installs),
            state_ids=self._advance_states(slots, kv_lens, len(decodes)),
            masks=self._masks(slots[kinds & RowKind.MASKED > 0]),
        )
        ledger.launch(self._next_step, slots, q_lens, samples)
        self._next_step += 1
        self._mark_scheduled(chunks)
        return schedule

    def _mark_scheduled(self, slots: Iterable[int]) -> None:
        """Notes the time for requests whose first row is in the step; that row is a chunk."""
        for slot in slots:
            choice = self._owners[slot]
            assert choice is not None, "a running slot has an owner"
            if choice.live.scheduled_at is None:
                choice.live.scheduled_at = self._clock()

    def _masks(self, slots: np.ndarray) -> Masks | None:
        """What the masked rows of a step may sample, from their choices' settled outputs."""
        if not len(slots):
            return None
        words = []
        for slot in slots.tolist():
            choice = self._owners[slot]
            assert choice is not None and choice.mask is not None, "a masked choice has a mask"
            words.append(choice.mask)
        return Masks(slots.astype(np.int32), self._ledger.generation[slots], np.stack(words))

    def _advance_states(
        self, slots: np.ndarray, kv_lens: np.ndarray, num_decode: int
    ) -> tuple[np.ndarray, ...]:
        """Per recurrent group i32[rows, 2]; what chunks leave at a border is kept as a snapshot."""
        ends = zip(slots[num_decode:].tolist(), kv_lens[num_decode:].tolist(), strict=True)
        kept = [(slot, end) for slot, end in ends if self._is_kept(slot, end)]
        found = []
        for index, group in enumerate(self._groups):
            if not isinstance(group, StateGroup):
                continue
            state_ids, left = group.advance(slots)
            found.append(state_ids)
            if left:
                self._passed.append((self._next_step, index, left))
            for slot, end in kept:
                group.keep(slot, end)
        return tuple(found)

    def _is_kept(self, slot: int, num_tokens: int) -> bool:
        """True when other choices may go on from the slot's first `num_tokens` tokens."""
        border = self._chunk_border
        is_border = border is not None and num_tokens % border == 0
        return is_border and num_tokens <= self._ledger.num_publishable[slot]

    def _decode_ids(self, decodes: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """i32[decodes], and DEVICE_ID set in `kinds` where the newest id is the device's own."""
        ledger = self._ledger
        starts = ledger.num_scheduled[decodes]
        if self._config.ids_from_host:
            return ledger.known_ids[decodes, starts]
        is_device = starts >= ledger.num_host_ids[decodes]
        kinds[: len(decodes)] |= np.where(is_device, RowKind.DEVICE_ID, 0).astype(np.int32)
        ids = ledger.known_ids[decodes, starts]
        ids[is_device] = POISON_ID
        return ids

    def _scores(self, slot: int, start: int, end: int) -> bool:
        choice = self._owners[slot]
        assert choice is not None, "a running slot has an owner"
        if self._config.deterministic:
            return choice.is_scored
        return choice.scores is not None and choice.scores.covers(start, end)

    # Settling.

    def _fail_faulty(
        self, schedule: Schedule, result: StepResult, counts: np.ndarray
    ) -> np.ndarray:
        """Fails the rows that the device flagged; returns them as bool[rows]."""
        is_empty = (schedule.kinds & RowKind.SAMPLES > 0) & (result.num_new != 1)
        is_faulty = counts & ((result.faults != 0) | is_empty)
        for row in np.flatnonzero(is_faulty).tolist():
            choice = self._owners[schedule.slots[row]]
            assert choice is not None, "a launch in flight keeps its slots"
            found = [text for fault, text in _FAULTS.items() if result.faults[row] & fault]
            what = "; ".join(found) or f"{result.num_new[row]} ids came back where one was due"
            self._fail(
                choice,
                f"request {choice.request.request_id!r} failed in step {schedule.step}, slot "
                f"{schedule.slots[row]}: {what}",
                is_callers_fault=bool(result.faults[row] == RowFault.NOTHING_ALLOWED),
            )
        return is_faulty

    def _settle_chunks(self, schedule: Schedule, result: StepResult, counts: np.ndarray) -> None:
        num_decode = schedule.num_decode
        first = num_decode
        for row in range(num_decode, schedule.num_rows):
            length = int(schedule.q_lens[row])
            choice = self._owners[schedule.slots[row]]
            if counts[row]:
                assert choice is not None, "a launch in flight keeps its slots"
                end = int(schedule.kv_lens[row])
                if choice.scores is not None and schedule.kinds[row] & RowKind.SCORES:
                    choice.scores.collect(end - length, first, length, result)
                if end >= len(choice.request.prompt_ids):
                    self._settle_prompt(choice)
            first += length

    def _settle_prompt(self, choice: Choice) -> None:
        if choice.scores is not None:
            scores, choice.scores = choice.scores.delivered(), None
            self._deltas.append(self._delta(choice, prompt_logprobs=scores))
        if choice.request.max_tokens == 0:
            self._deltas.append(self._delta(choice, finish_reason="length"))
            self._finish(choice)
        elif choice.index == 0:
            self._release_held(choice.live)

    def _settle_samples(self, schedule: Schedule, result: StepResult, counts: np.ndarray) -> None:
        rows = np.flatnonzero(counts & (schedule.kinds & RowKind.SAMPLES > 0))
        slots = schedule.slots[rows]
        ids = result.sampled[rows, 0]
        is_stop, is_last = self._ledger.append(slots, ids)
        for row, slot, token_id, stops, ends in zip(
            rows.tolist(),
            slots.tolist(),
            ids.tolist(),
            is_stop.tolist(),
            is_last.tolist(),
            strict=True,
        ):
            choice = self._owners[slot]
            assert choice is not None, "a launch in flight keeps its slots"
            request = choice.request
            wanted = request.params.logprobs
            delta = Delta(
                request.request_id,
                choice.index,
                (token_id,),
                () if wanted is None else (_logprobs(result, row, wanted),),
                None,
                "stop" if stops else "length" if ends else None,
                token_id if stops else None,
                choice.num_cached_tokens or 0,
                None,
                choice.live.scheduled_at,
            )
            if choice.matcher is not None and not stops:
                following = self._mask_maker.begin(choice.matcher, token_id, is_last=ends)
                self._following[choice] = following, delta
                continue
            self._deltas.append(delta)
            if stops or ends:
                self._finish(choice)

    def _publish(self, slots: np.ndarray) -> None:
        """Offers pages that are full and settled, and settled snapshots, to the prefix cache."""
        ledger = self._ledger
        ready = np.minimum(ledger.num_settled[slots], ledger.num_publishable[slots])
        for index, group in enumerate(self._groups):
            for slot, place, page in group.publishable(slots, ready):
                choice = self._owners[slot]
                assert choice is not None and choice.keys is not None, "a running choice has keys"
                if self._cache.publish(index, choice.keys, ledger.known_ids[slot], place, page):
                    group.pool.cache(page)

    def _pass_windows(self, schedule: Schedule) -> None:
        """Returns pages and states that rows have passed, once no launch in flight names them."""
        self._release_passed(schedule.step)
        for index, group in enumerate(self._groups):
            if not isinstance(group, PageGroup) or group.config.window is None:
                continue
            for slot in schedule.slots.tolist():
                if self._ledger.phase[slot] != Phase.RUNNING:
                    continue
                pages = group.pass_window(slot, int(self._ledger.num_settled[slot]))
                if pages:
                    self._passed.append((self._next_step - 1, index, pages))
        if not self._in_flight:
            self._release_passed(self._next_step)

    def _release_passed(self, step: int) -> None:
        while self._passed and self._passed[0][0] <= step:
            _, index, pages = self._passed.popleft()
            self._groups[index].pool.release(reversed(pages))

    # Ends.

    def _delta(
        self,
        choice: Choice,
        finish_reason: FinishReason | None = None,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
        error: str | None = None,
        is_callers_fault: bool = False,
    ) -> Delta:
        return Delta(
            choice.request.request_id,
            choice.index,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            num_cached_tokens=choice.num_cached_tokens or 0,
            error=error,
            scheduled_at=choice.live.scheduled_at,
            is_callers_fault=is_callers_fault,
        )

    def _fail(self, choice: Choice, message: str, *, is_callers_fault: bool = False) -> None:
        self._deltas.append(
            self._delta(
                choice,
                finish_reason="error",
                error=message,
                is_callers_fault=is_callers_fault,
            )
        )
        self._finish(choice)

    def _finish(self, choice: Choice) -> None:
        """Takes a choice out of service; what it owns follows when nothing is in flight."""
        live = choice.live
        choice.is_finished = True
        if choice in self._following:
            self._following.pop(choice)[0].drop()
        if choice.slot >= 0:
            self._ledger.phase[choice.slot] = Phase.FINISHED
            self._draining.discard(choice)
        elif choice in live.held:
            live.held.remove(choice)
            self._num_held -= 1
        else:
            self._queue.discard(choice)
        live.num_unfinished -= 1
        if not live.num_unfinished:
            del self._requests[live.request.request_id]
            if not live.is_started:
                self._num_unstarted -= 1
        elif choice.index == 0:
            self._release_held(live)

    def _release_held(self, live: LiveRequest) -> None:
        for choice in live.held:
            self._queue.push(choice)
        self._num_held -= len(live.held)
        live.held.clear()

    def _release_settled(self, choice: Choice) -> None:
        if choice.slot >= 0 and self._ledger.num_in_flight[choice.slot] == 0:
            self._release(choice.slot)

    def _release(self, slot: int) -> None:
        """Frees a slot, its pages and states; a preempted choice goes back to the queue."""
        choice = self._owners[slot]
        assert choice is not None and self._ledger.num_in_flight[slot] == 0, "nothing is in flight"
        if not choice.is_finished:
            known = self._ledger.num_known[slot]
            choice.known_ids = self._ledger.known_ids[slot, :known].copy()
            self._draining.discard(choice)
            self._queue.push(choice)
        for group in self._groups:
            group.vacate(slot)
        self._ledger.phase[slot] = Phase.FREE
        self._owners[slot] = None
        choice.slot = -1
        self._free_slots.append(slot)

    # Checks.

    def audit(self) -> None:
        """Checks every invariant over slots, pages, states and counts.

        Raises:
          AssertionError: saying what is wrong.
        """
        self._ledger.audit(self._in_flight)
        self._audit_places()
        for index, group in enumerate(self._groups):
            self._audit_pages(index, group)
        if self.is_idle:
            assert len(self._free_slots) == self._config.max_slots, "idle with a slot taken"
            assert not self.num_waiting and not self._num_unstarted, "idle with a queue"

    def _audit_places(self) -> None:
        owned = {slot for slot, choice in enumerate(self._owners) if choice is not None}
        free = set(self._free_slots)
        assert len(free) == len(self._free_slots), "a slot is free twice"
        assert not owned & free and len(owned | free) == self._config.max_slots, "a slot is lost"
        for slot in owned:
            choice = self._owners[slot]
            assert choice is not None and choice.slot == slot, f"slot {slot} has another owner"
            phase = self._ledger.phase[slot]
            assert choice.is_finished == (phase == Phase.FINISHED), f"slot {slot}: wrong phase"
            assert (choice in self._draining) == (phase == Phase.PREEMPTED), f"slot {slot}: drain"
        assert np.array_equal(np.flatnonzero(self._ledger.phase), sorted(owned)), "a phase is wrong"
        for choice in self._following:
            assert not choice.is_finished, f"choice {choice.order} is over and its mask is made"
            if choice.slot >= 0:
                assert not self._ledger.num_in_flight[choice.slot], "launched without its mask"
        for live in self._requests.values():
            unfinished = [one for one in live.choices if not one.is_finished]
            assert len(unfinished) == live.num_unfinished > 0, "a count of choices is wrong"
            for one in unfinished:
                places = (one.slot >= 0) + (one in live.held) + (one in self._queue)
                assert places == 1, f"choice {one.order} is in {places} places"

    def _audit_pages(self, index: int, group: PageGroup | StateGroup) -> None:
        is_owned = np.array([choice is not None for choice in self._owners])
        group.audit(is_owned, self._ledger.num_settled)
        owners = group.count_owners()
        for _, group_index, pages in self._passed:
            if group_index == index:
                np.add.at(owners, pages, 1)
        group.pool.audit(owners, self._cache.cached_pages(index))
        for schedule in self._in_flight:
            used = self._named(schedule, group)
            used = used[used > 0]
            assert (owners[used] > 0).all(), f"step {schedule.step} names a released page"

    def _named(self, schedule: Schedule, group: PageGroup | StateGroup) -> np.ndarray:
        """Pages or states of the group that a schedule names."""
        if isinstance(group, PageGroup):
            return schedule.page_tables[self._page_groups.index(group)]
        groups = [one for one in self._groups if isinstance(one, StateGroup)]
        return schedule.state_ids[groups.index(group)]


def _install(choice: Choice, num_cached: int) -> Install:
    request, params = choice.request, choice.request.params
    return Install(
        slot=choice.slot,
        known_ids=choice.known_ids,
        num_cached_tokens=num_cached,
        stop_ids=tuple(dict.fromkeys(request.stop_ids + request.eos_ids)),
        logit_bias=tuple((params.logit_bias or {}).items()),
        bad_words=params.bad_word_ids,
        allowed_ids=params.allowed_token_ids or (),
    )


def _logprobs(result: StepResult, row: int, num_top: int) -> TokenLogprobs:
    logprob, rank = float(result.logprobs[row, 0]), int(result.ranks[row, 0])
    if not num_top:
        return TokenLogprobs(logprob, rank)
    assert result.top_ids is not None and result.top_logprobs is not None
    return TokenLogprobs(
        logprob,
        rank,
        tuple(result.top_ids[row, 0, :num_top].tolist()),
        tuple(result.top_logprobs[row, 0, :num_top].tolist()),
    )
