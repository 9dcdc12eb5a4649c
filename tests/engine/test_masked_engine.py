"""Masked rows through a whole engine: lanes, depth, both proofs, and ends that stay closed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine.core import Core
from engine.execution import contract
from engine.execution import step as steps
from engine.request import Request, StructuredOutput
from engine.scheduling.masks import MaskMaker
from engine.scheduling.schedule import RowKind, Schedule
from engine.scheduling.scheduler import Scheduler
from tests.engine import loop

VOCAB = 131


@dataclasses.dataclass(frozen=True)
class Stairs:
    """Output k is one of three ids that depend on k; whole after `length` outputs."""

    length: int = 6
    stuck_at: int | None = None

    def allowed(self, place: int) -> list[int]:
        return [] if place == self.stuck_at else [(place * 7 + j) % VOCAB for j in (3, 4, 64)]

    def matcher(self) -> Climber:
        return Climber(self)

    @property
    def first_mask(self) -> np.ndarray:
        return self.matcher().mask()


class Climber:
    def __init__(self, stairs: Stairs) -> None:
        self.stairs = stairs
        self.place = 0
        self.fault = ""

    def accept(self, token_id: int) -> bool:
        self.place += 1
        return token_id in self.stairs.allowed(self.place - 1)

    def mask(self) -> np.ndarray:
        bits = np.zeros(160, np.uint8)
        bits[self.stairs.allowed(self.place)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def is_complete(self) -> bool:
        return self.place == self.stairs.length


@pytest.fixture(scope="module")
def core(tiny_llama) -> Iterator[Core]:
    core = loop.start(tiny_llama, page_size=4, max_model_len=96, masked_rows=2)
    yield core
    core.close()


def masked(name: str, stairs: Stairs | None = None, max_tokens: int = 20, **fields) -> Request:
    plain = loop.request(
        name,
        [5, 6, 7, *name.encode()],
        max_tokens,
        structured=StructuredOutput("json_object"),
        **fields,
    )
    return dataclasses.replace(plain, grammar=stairs or Stairs())


def assert_climbed(output: loop.Output, stairs: Stairs) -> None:
    assert output.finish_reason == "stop" and output.stop_id is None, output.error
    assert len(output.token_ids) == stairs.length
    for place, token_id in enumerate(output.token_ids):
        assert token_id in stairs.allowed(place)


class Watched:
    """Schedules as they are launched, and what was in flight before each."""

    def __init__(self, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedules: list[Schedule] = []
        self.in_flight: list[int] = []
        launch = core.runner.launch

        def watched(packed):
            self.schedules.append(packed.schedule)
            self.in_flight.append(len(core._in_flight))
            return launch(packed)

        monkeypatch.setattr(core.runner, "launch", watched)


def test_masked_engine_has_three_more_programs_and_both_proofs_hold(core, llama_core):
    assert core.info.num_programs == llama_core.info.num_programs + 3
    masked_keys = [key for key in core.runner.programs.steps if key.masked_rows]
    assert len(masked_keys) == 3
    for key in masked_keys:
        assert contract.prove_program(core.runner, key) == []
    core.runner.reset_state()


def test_every_id_of_a_masked_request_is_one_its_grammar_allows(core):
    requests = [
        masked("greedy"),
        masked("random", temperature=3.0, seed=4),
        masked("several", n=3, temperature=1.0),
        masked("penalized", repetition_penalty=5.0, presence_penalty=2.0),
        masked("biased", logit_bias={i: 100.0 for i in range(20)}),
        masked("narrow", temperature=1.0, top_p=0.1, top_k=2, logprobs=3),
        masked("scored", prompt_logprobs=1),
        *(loop.request(f"free {i}", [i, 2, 3], 15) for i in range(4)),
    ]
    outputs = loop.run(loop.rescheduled(core), requests)
    for (name, _), output in outputs.items():
        if name.startswith("free"):
            assert output.finish_reason == "length" and len(output.token_ids) == 15
        else:
            assert_climbed(output, Stairs())
    assert len(outputs["narrow", 0].logprobs) == 6
    assert outputs["scored", 0].prompt_logprobs is not None


def test_free_rows_run_in_every_step_at_depth_two_beside_a_masked_one(core, monkeypatch):
    core = loop.rescheduled(core)
    watched = Watched(core, monkeypatch)
    length = 14
    free = [loop.request(f"f{i}", [i, 2, 3], 2 * length + 1) for i in range(3)]
    loop.run(core, [masked("m", Stairs(length)), *free])
    is_masked = [bool((one.kinds & RowKind.MASKED).any()) for one in watched.schedules]
    assert is_masked == [i % 2 == 0 and i < 2 * length for i in range(2 * length + 1)]
    num_free = [one.num_rows - m for one, m in zip(watched.schedules, is_masked, strict=True)]
    assert num_free == [3] * (2 * length + 1)
    assert watched.in_flight == [0] + [1] * (2 * length)
    has_masks = [one.masks is not None for one in watched.schedules]
    assert has_masks == is_masked


def test_masked_decode_rows_take_their_id_from_the_device_on_the_overlap_lane(core, monkeypatch):
    core = loop.rescheduled(core)
    watched = Watched(core, monkeypatch)
    loop.run(core, [masked("m")])
    decodes = [int(one.kinds[0]) for one in watched.schedules[1:]]
    assert len(decodes) == 5 and all(kind & RowKind.DEVICE_ID for kind in decodes)


@pytest.mark.parametrize("change", ["generation", "slot", "none"])
def test_row_without_its_own_mask_is_failed_and_its_neighbours_go_on(core, monkeypatch, change):
    core = loop.rescheduled(core)
    pack = core.runner.pack

    def broken(schedule, key=None):
        masks, given = schedule.masks, schedule
        if masks is not None and schedule.is_decode:
            if change == "generation":
                masks = dataclasses.replace(masks, generations=masks.generations + 1)
            elif change == "slot":
                masks = dataclasses.replace(masks, slots=masks.slots + 1)
            else:
                masks = dataclasses.replace(
                    masks,
                    slots=masks.slots[:0],
                    generations=masks.generations[:0],
                    words=masks.words[:0],
                )
            schedule = dataclasses.replace(schedule, masks=masks)
        return dataclasses.replace(pack(schedule, key), schedule=given)

    monkeypatch.setattr(core.runner, "pack", broken)
    outputs = loop.run(core, [masked("m"), loop.request("f", [1, 2, 3], 9)])
    assert outputs["m", 0].finish_reason == "error"
    assert "brought no grammar mask of its own" in (outputs["m", 0].error or "")
    assert len(outputs["m", 0].token_ids) == 1
    assert outputs["f", 0].finish_reason == "length" and len(outputs["f", 0].token_ids) == 9


def test_grammar_and_allowed_ids_without_a_common_id_fail_the_request(core):
    core = loop.rescheduled(core)
    outputs = loop.run(core, [masked("m", allowed_token_ids=(3, 100)), masked("other")])
    assert outputs["m", 0].token_ids == [3] and outputs["m", 0].finish_reason == "error"
    assert "allow no id here" in (outputs["m", 0].error or "")
    assert_climbed(outputs["other", 0], Stairs())


def test_end_at_max_tokens_cuts_the_form_and_says_length(core):
    # Ledger row LIM-11.
    outputs = loop.run(loop.rescheduled(core), [masked("m", max_tokens=1)])
    assert outputs["m", 0].finish_reason == "length" and len(outputs["m", 0].token_ids) == 1


def test_stop_id_ends_a_masked_output(core):
    stop = tuple(Stairs().allowed(2))
    outputs = loop.run(loop.rescheduled(core), [masked("m", stop_ids=stop)])
    assert outputs["m", 0].finish_reason == "stop" and outputs["m", 0].stop_id in stop
    assert len(outputs["m", 0].token_ids) == 3


@pytest.mark.parametrize("lane", [{}, {"ids_from_host": True}, {"deterministic": True}], ids=str)
def test_preempted_masked_requests_go_on_in_their_grammar(core, lane):
    # Ledger row STRUCT-11.
    core = loop.rescheduled(core, num_pages=9, **lane)
    requests = [masked(f"m{i}", Stairs(12), temperature=1.0) for i in range(5)]
    requests += [loop.request(f"f{i}", [i, 2, 3], 12) for i in range(3)]
    outputs = loop.run(core, requests)
    assert core.stats().preemptions > 0
    for (name, _), output in outputs.items():
        if name.startswith("m"):
            assert_climbed(output, Stairs(12))


def test_lost_device_resumes_masked_requests_where_they_stood(core):
    core = loop.rescheduled(core)
    outputs: loop.Outputs = {}
    for request in (masked("m", Stairs(12)), loop.request("f", [1, 2, 3], 12)):
        core.submit(request)
    for _ in range(7):
        core.step()
        loop.take(core, outputs)
    core.recover("a test")
    loop.run(core, [], outputs)
    assert_climbed(outputs["m", 0], Stairs(12))
    assert len(outputs["f", 0].token_ids) == 12


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_of_a_masked_request_at_any_step_leaves_nothing_behind(core, num_steps):
    core = loop.rescheduled(core)
    core.submit(masked("m", Stairs(12)))
    core.submit(loop.request("f", [1, 2, 3], 8))
    outputs: loop.Outputs = {}
    for _ in range(num_steps):
        core.step()
    core.abort("m")
    loop.run(core, [masked("next")], outputs)
    assert outputs["m", 0].finish_reason == "abort"
    assert_climbed(outputs["next", 0], Stairs())
    assert len(outputs["f", 0].token_ids) == 8


def test_structural_proof_refuses_masks_read_by_another_part_than_the_sampler(core, monkeypatch):
    runner, named, lay_out, seen = core.runner, steps._named, steps.lay_out, []

    def recording(name, function):
        jitted = named(name, function)
        if name != "unpack":
            return jitted
        return lambda flat: seen.append(jitted(flat)) or seen[-1]

    def reading(key, tiling, packed, num_tokens, tables):
        masks = seen[-1][1].masks
        return lay_out(key, tiling, packed, num_tokens + masks.words[0, 0], tables)

    monkeypatch.setattr(steps, "_named", recording)
    monkeypatch.setattr(steps, "lay_out", reading)
    key = next(key for key in runner.programs.steps if key.masked_rows)
    jaxpr = runner.shapes.step(key).trace().jaxpr
    (finding,) = contract.check_structure(key, jaxpr, runner.shapes.num_groups)
    assert finding.reason.startswith("masks are read by ['")
    assert finding.reason.endswith("'], only sample may read them")


def beside(core: Core, maker: MaskMaker) -> Core:
    """A Core whose masks are made on threads, as those of a served engine are."""
    core = loop.rescheduled(core)
    return Core(Scheduler(core.scheduler._config, mask_maker=maker), core.runner, core.info)


@dataclasses.dataclass(frozen=True)
class Gated(Stairs):
    """Masks behind the second output wait for an event."""

    gate: threading.Event = dataclasses.field(default_factory=threading.Event)

    def matcher(self) -> Climber:
        return GatedClimber(self)


class GatedClimber(Climber):
    def mask(self) -> np.ndarray:
        if self.place > 1:
            assert isinstance(self.stairs, Gated) and self.stairs.gate.wait(60.0)
        return super().mask()


def test_masks_made_beside_the_loop_give_the_outputs_of_masks_made_in_it(core):
    requests = [
        masked("several", n=3, temperature=1.0),
        masked("greedy", Stairs(12)),
        masked("stop", stop_ids=tuple(Stairs().allowed(2))),
        masked("cut", max_tokens=2, logprobs=2),
        loop.request("free", [1, 2, 3], 20),
    ]
    inline = loop.run(loop.rescheduled(core), requests)
    maker = MaskMaker(2)
    threaded = loop.run(beside(core, maker), requests)
    maker.close()
    assert {key: one.said for key, one in threaded.items()} == {
        key: one.said for key, one in inline.items()
    }


def test_free_rows_keep_depth_two_while_a_mask_is_under_way(core, monkeypatch):
    stairs, maker = Gated(length=8), MaskMaker(1)
    core = beside(core, maker)
    watched = Watched(core, monkeypatch)
    outputs: loop.Outputs = {}
    core.submit(masked("m", stairs))
    core.submit(loop.request("f", [1, 2, 3], 40))
    while len(outputs.get(("f", 0), loop.Output()).token_ids) < 30:
        core.step()
        loop.take(core, outputs)
    assert len(outputs["m", 0].token_ids) == 1
    assert watched.in_flight[1:] == [1] * (len(watched.in_flight) - 1)
    stairs.gate.set()
    loop.run(core, [], outputs)
    maker.close()
    assert_climbed(outputs["m", 0], stairs)


def test_engine_with_nothing_but_masks_to_wait_for_stays_open_for_commands(core):
    stairs, maker = Gated(), MaskMaker(1)
    core = beside(core, maker)
    core.submit(masked("m", stairs))
    outputs: loop.Outputs = {}
    for _ in range(20):
        assert core.step(), "a loop that sleeps here would look for no command"
        loop.take(core, outputs)
    core.abort("m")
    stairs.gate.set()
    loop.run(core, [masked("next")], outputs)
    maker.close()
    assert outputs["m", 0].finish_reason == "abort" and len(outputs["m", 0].token_ids) == 1
    assert_climbed(outputs["next", 0], Stairs())
