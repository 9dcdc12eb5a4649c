"""The battery: prompts served at depth 2 and held against the sync lane of the same process.

Where both lanes run the same programs the ids must be equal. Where the programs differ, the sync
lane reads what was said from the host and must find each id the likeliest, within a tolerance.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.request import Delta, Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.core import Core, EngineInfo
    from engine.execution.buckets import ProgramKey

TEXT = (
    "The harbour lies where the river slows. In winter the fishing boats stay inside the wall for "
    "weeks, and the men mend nets in the long shed behind the chapel. A boy of nine carries tea "
    "from the kitchen and listens: to the price of cod in the north, to the story of the pilot who "
    "rowed home through fog by the sound of his own bell, to an argument over whether a blue hull "
    "is bad luck. Water boils at 100 degrees and freezes at 0; salt moves both. The lighthouse was "
    "built in 1874 by Ellen Marsh, an engineer from Leeds, who drew it in ink on linen: forty "
    "metres of granite, a lamp of three wicks, 212 steps. def area(radius): return 3.14159 * "
    "radius ** 2. On clear evenings you can see the island from the top, and on the island a "
    "white house with a red door. Nobody has lived there since the school closed. Dear Sir, thank "
    "you for your letter of 12 May; the three crates arrived in good order, but the fourth held "
    "apples instead of lenses. If x + 4 = 11 then x is 7. Spring comes late and all at once, with "
    "larks over the dunes, wet ropes on the quay and the first boats going out before light."
)
"""What prompts are cut from, by default."""

NUM_REPEATED = 5
NUM_TOGETHER = 4
NUM_MIXED = 64

_PINNED_PROMPT = 24


@dataclasses.dataclass(frozen=True)
class Bound:
    """What may differ between programs of one dtype."""

    gap: float
    """Logits that a served id may lie below the likeliest of the replay."""
    share: float
    """Share of the positions that may use this allowance at all."""


BOUNDS = {"float32": Bound(1e-3, 0.001), "bfloat16": Bound(0.1, 0.01)}


@dataclasses.dataclass(frozen=True)
class PartResult:
    """One part of the battery: how much ran, and why it failed if it did."""

    name: str
    num_requests: int
    num_tokens: int
    device_rows: int
    """Rows whose newest id came from the device, as the device counted."""
    num_programs: int
    found: str
    faults: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BatteryResult:
    """All parts; `faults` are of the engine as a whole."""

    parts: tuple[PartResult, ...]
    faults: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True when nothing failed and something ran."""
        return bool(self.parts) and not self.faults and not any(one.faults for one in self.parts)

    def lines(self) -> Iterator[str]:
        """A table, the reasons of failures, and the verdict."""
        if self.parts:
            yield _row("part", "requests", "tokens", "from device", "programs", "found")
        for one in self.parts:
            counts = (one.num_requests, one.num_tokens, one.device_rows, one.num_programs)
            yield _row(one.name, *counts, one.found)
        for fault in self.faults:
            yield f"FAILED: {fault}"
        for one in self.parts:
            yield from (f"FAILED: {one.name}: {fault}" for fault in one.faults)
        yield "battery holds" if self.holds else "battery FAILED"


def _row(name: object, *cells: object) -> str:
    *counts, found = cells
    return f"{name:<16}" + "".join(f"{cell!s:>13}" for cell in counts) + f"  {found}"


@dataclasses.dataclass(frozen=True)
class Part:
    """Waves of requests: each wave is submitted at once, after the wave before has ended."""

    name: str
    waves: tuple[tuple[Request, ...], ...]
    is_pinned: bool
    """Both lanes run the same programs: no answer ends early, so their steps have equal rows."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Of all waves, in order."""
        return tuple(itertools.chain.from_iterable(self.waves))


def run(
    core: Core,
    ids: Sequence[int],
    *,
    is_strict: bool = False,
    num_outputs: int = 24,
    longest_prompt: int = 512,
) -> BatteryResult:
    """Serves every part on the overlap lane, then on the sync lane, and compares.

    The core is idle before, and its runner on the sync lane afterwards: close it.

    Args:
      core: an engine on the overlap lane at depth 2; any other fails.
      ids: token ids that prompts are cut from, round and round.
      is_strict: leaves out the mixed set, whose tolerance is for trained weights.
      num_outputs: tokens of one answer; those of the mixed set have a third of it or more.
      longest_prompt: tokens of the mixed set's longest prompt, if max_model_len has room.

    Raises:
      ValueError: max_model_len is too short for the prompts, or there are no ids.
    """
    settings = core.runner.settings
    if settings.lane != "overlap" or settings.depth != 2:
        return BatteryResult(
            (),
            (
                f"the engine runs on the {settings.lane} lane at depth {settings.depth}; the "
                "battery needs the overlap lane at depth 2 (no --no-overlap, no --sync-lane, "
                "--depth 2, a registration that declares device_token_ids)",
            ),
        )
    parts = tuple(
        one
        for one in _parts(core.info, ids, num_outputs, longest_prompt)
        if one.is_pinned or not is_strict
    )
    served = [_serve(core, one.waves) for one in parts]
    reference = core.on_lane("sync")
    results = []
    for part, ours in zip(parts, served, strict=True):
        if part.is_pinned:
            theirs = _serve(reference, part.waves)
            found, faults = _compare(part, ours, theirs)
        else:
            theirs = _serve(reference, (tuple(_replays(part.requests, ours)),))
            found, faults = _judge(ours, theirs, BOUNDS[core.info.dtype])
        results.append(
            PartResult(
                name=part.name,
                num_requests=len(part.requests),
                num_tokens=ours.num_tokens,
                device_rows=ours.device_rows,
                num_programs=len(ours.programs),
                found=found,
                faults=(*_lane_faults(ours, theirs), *faults),
            )
        )
    return BatteryResult(tuple(results))


def _parts(
    info: EngineInfo, ids: Sequence[int], num_outputs: int, longest_prompt: int
) -> tuple[Part, ...]:
    if not ids:
        raise ValueError("there are no token ids to cut prompts from; give at least one")
    needed = _PINNED_PROMPT + num_outputs
    if info.max_model_len < needed:
        raise ValueError(
            f"max_model_len is {info.max_model_len} but the battery's prompts and answers need "
            f"{needed}; start with a larger max_model_len"
        )
    repeated = tuple(
        (_request(f"repeated{i}", _cut(ids, 0, _PINNED_PROMPT), num_outputs),)
        for i in range(NUM_REPEATED)
    )
    together = tuple(
        _request(f"together{i}", _cut(ids, 31 * i, _PINNED_PROMPT - i), num_outputs)
        for i in range(NUM_TOGETHER)
    )
    longest = min(longest_prompt, info.max_model_len - num_outputs)
    mixed = _mixed(info, ids, num_outputs, longest)
    return (
        Part(f"1 prompt x {NUM_REPEATED}", repeated, is_pinned=True),
        Part(f"{NUM_TOGETHER} together", (together,), is_pinned=True),
        Part(f"{NUM_MIXED} mixed", (mixed,), is_pinned=False),
    )


def _mixed(
    info: EngineInfo, ids: Sequence[int], num_outputs: int, longest: int
) -> tuple[Request, ...]:
    """Lengths from 1 to the longest, short ones more often; answers may end early."""
    draw = random.Random(NUM_MIXED)
    lengths = [1, longest] + [int(longest ** draw.uniform(0.0, 1.0)) for _ in range(NUM_MIXED - 2)]
    return tuple(
        _request(
            f"mixed{i}",
            _cut(ids, draw.randrange(len(ids)), length),
            draw.randint(-(-num_outputs // 3), num_outputs),
            info.eos_ids,
        )
        for i, length in enumerate(lengths)
    )


def _cut(ids: Sequence[int], start: int, length: int) -> np.ndarray:
    return np.asarray([ids[(start + i) % len(ids)] for i in range(length)], np.int32)


def _request(
    name: str, ids: np.ndarray, max_tokens: int, eos_ids: tuple[int, ...] = (), **params: Any
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=ids,
        params=SamplingParams(**{"temperature": 0.0, "logprobs": 0} | params),
        stop_ids=eos_ids,
        eos_ids=eos_ids,
        max_tokens=max_tokens,
        seed=0,
    )


def _replays(requests: Iterable[Request], served: _Served) -> Iterator[Request]:
    """What was asked and said as one prompt each, whose second half is scored."""
    for one in requests:
        said = np.asarray(served.token_ids[one.request_id], np.int32)
        yield _request(
            one.request_id,
            np.concatenate([one.prompt_ids, said]),
            max_tokens=0,
            prompt_logprobs=1,
            prompt_logprobs_start=len(one.prompt_ids),
        )


@dataclasses.dataclass
class _Served:
    """What a lane said, and what was counted meanwhile."""

    token_ids: dict[str, list[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    logprobs: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    scores: dict[str, tuple[TokenLogprobs | None, ...]] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)
    programs: collections.Counter[ProgramKey] = dataclasses.field(
        default_factory=collections.Counter
    )
    device_rows: int = 0
    """As the device counted."""
    scheduled_device_rows: int = 0
    """As the host scheduled."""
    depth: int = 0
    """Most launches that were unsettled at once."""

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids.values())

    def take(self, deltas: Iterable[Delta]) -> None:
        for one in deltas:
            self.token_ids[one.request_id] += one.token_ids
            self.logprobs[one.request_id] += [position.logprob for position in one.logprobs]
            if one.prompt_logprobs is not None:
                self.scores[one.request_id] = one.prompt_logprobs
            if one.error is not None:
                self.errors.append(f"request {one.request_id} failed: {one.error}")


def _serve(core: Core, waves: Iterable[Sequence[Request]]) -> _Served:
    """Runs the waves to their ends, each from an empty prefix cache: repetitions are alike."""
    runner, served = core.runner, _Served()
    num_device, _ = runner.device_counters()
    num_scheduled = runner.counters.device_rows
    programs = runner.counters.programs.copy()
    for wave in waves:
        core.reset_prefix_cache()
        for request in wave:
            core.submit(request)
        while not core.is_idle:
            if not core.step():
                raise RuntimeError("live requests, but nothing to launch or settle")
            # A step settles the oldest launch once `depth` are in flight: one fewer is seen here.
            served.depth = max(served.depth, core.scheduler.stats.num_in_flight + 1)
            served.take(core.poll())
        served.take(core.poll())
    served.device_rows = runner.device_counters()[0] - num_device
    served.scheduled_device_rows = runner.counters.device_rows - num_scheduled
    served.programs = runner.counters.programs - programs
    return served


def _lane_faults(ours: _Served, theirs: _Served) -> Iterator[str]:
    """Why the two runs were not the two lanes, or did not end well."""
    if ours.depth != 2:
        yield f"{ours.depth} launches were in flight at most, not 2"
    if not ours.device_rows:
        yield "no row was resolved from the device"
    if ours.device_rows != ours.scheduled_device_rows:
        yield (
            f"{ours.device_rows} rows were resolved from the device but "
            f"{ours.scheduled_device_rows} were scheduled so"
        )
    if theirs.device_rows or theirs.depth != 1:
        yield (
            f"the sync lane resolved {theirs.device_rows} rows from the device at depth "
            f"{theirs.depth}; it must be none at depth 1"
        )
    yield from (f"overlap lane: {error}" for error in ours.errors)
    yield from (f"sync lane: {error}" for error in theirs.errors)


def _compare(part: Part, ours: _Served, theirs: _Served) -> tuple[str, list[str]]:
    """Token for token, under the same programs run as often."""
    faults = []
    if ours.programs != theirs.programs:
        faults.append("the lanes ran different programs, so equal ids were not to be expected")
    wrong = [name for name, said in ours.token_ids.items() if theirs.token_ids[name] != said]
    faults += [_first_difference(name, ours, theirs) for name in wrong]
    if len(part.waves) > 1:
        first = ours.token_ids[part.requests[0].request_id]
        odd = [one.request_id for one in part.requests if ours.token_ids[one.request_id] != first]
        if odd:
            faults.append(f"the repetitions {', '.join(odd)} differ from the first")
    if wrong:
        return f"{len(wrong)} of {len(part.requests)} answers differ", faults
    apart = max(
        (
            abs(one - other)
            for name in ours.logprobs
            for one, other in zip(ours.logprobs[name], theirs.logprobs[name], strict=True)
        ),
        default=math.nan,
    )
    return f"equal ids, log-probabilities at most {apart:.2g} apart", faults


def _first_difference(name: str, ours: _Served, theirs: _Served) -> str:
    one, other = ours.token_ids[name], theirs.token_ids[name]
    place = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return (
        f"answer {name} differs at output {place}: {one[place : place + 4]} on the overlap lane, "
        f"{other[place : place + 4]} on the sync lane"
    )


def _judge(ours: _Served, replay: _Served, bound: Bound) -> tuple[str, list[str]]:
    """Each served id is the likeliest of its replay, but for a bounded share and gap."""
    gaps = [
        position.top_logprobs[0] - position.logprob if position is not None else math.nan
        for name in ours.token_ids
        for position in replay.scores.get(name, ())
    ]
    num_allowed = sum(gap != 0.0 for gap in gaps)
    num_beyond = sum(not gap <= bound.gap for gap in gaps)  # NaN is beyond
    share = num_allowed / max(len(gaps), 1)
    faults = []
    if len(gaps) != ours.num_tokens:
        faults.append(f"{ours.num_tokens} ids were served but {len(gaps)} replayed")
    if num_beyond:
        faults.append(f"{num_beyond} ids lie more than {bound.gap:g} below the replay's likeliest")
    if share > bound.share:
        faults.append(f"{share:.2%} of the ids used the tolerance, the limit is {bound.share:.2%}")
    found = (
        f"{num_allowed} of {len(gaps)} ids ({share:.2%}, limit {bound.share:.2%}) below the "
        f"likeliest, by {max(gaps, default=math.nan):.2g} at most (limit {bound.gap:g})"
    )
    return found, faults
