"""Masked rows: when they run, which masks they bring and how their grammar ends them."""

from __future__ import annotations

import dataclasses
import random
import threading

import numpy as np
import pytest

from engine.request import StructuredOutput
from engine.scheduling.masks import MaskMaker
from engine.scheduling.schedule import RowFault, RowKind, Schedule
from engine.scheduling.scheduler import GroupConfig
from tests.scheduling.driver import Driver, config, request
from tests.scheduling.test_scheduler_model import state_of
from tests.scheduling.toy_grammar import ToyGrammar, ToyMatcher


class Endless(ToyGrammar):
    def is_whole(self, outputs: list[int]) -> bool:
        return False


def masked(name: str = "m", max_tokens: int = 12, grammar: ToyGrammar | None = None, **fields):
    return request(name, [1, 2, 3], max_tokens, grammar=grammar or Endless(1), **fields)


def launched(driver: Driver) -> list[Schedule]:
    return [schedule for schedule, *_ in driver.device.pending]


def test_masked_row_advances_every_second_step_and_free_rows_every_step():
    driver = Driver(config(prefix_cache=False))
    driver.submit(masked(max_tokens=20))
    driver.submit(request("f", [4, 5, 6], 20))
    driver.step()
    names_masked, names_free = [], []
    for _ in range(12):
        driver.launch()
        names_masked.append(bool((launched(driver)[-1].kinds & RowKind.MASKED).any()))
        names_free.append(launched(driver)[-1].num_rows - names_masked[-1])
        assert len(driver.device.pending) == 2, "free rows keep depth 2"
        driver.settle()
    assert names_masked == [False, True] * 6
    assert names_free == [1] * 12


def test_masked_rows_alone_run_one_launch_at_a_time():
    driver = Driver(config())
    driver.submit(masked())
    assert driver.launch()
    assert not driver.launch()
    driver.settle()
    assert driver.launch()
    driver.run()
    assert driver.finished["m", 0].finish_reason == "length"


def test_masks_come_for_masked_rows_only_and_carry_slot_and_generation():
    driver = Driver(config(prefix_cache=False))
    driver.submit(request("f", [4, 5, 6], 9))
    driver.launch()
    assert launched(driver)[0].masks is None
    driver.submit(masked())
    driver.launch()
    schedule = launched(driver)[1]
    is_masked = schedule.kinds & RowKind.MASKED > 0
    assert is_masked.sum() == 1 and schedule.num_rows == 2 and schedule.is_full_sampler
    masks = schedule.masks
    assert masks is not None
    assert masks.slots.tolist() == schedule.slots[is_masked].tolist()
    assert masks.generations.tolist() == schedule.generations[is_masked].tolist()
    driver.run()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_step_brings_more_masks_than_the_limit_and_everybody_gets_a_turn(limit):
    driver = Driver(config(masked_rows=limit, prefix_cache=False))
    for index in range(4):
        driver.submit(masked(str(index), 6))
    counts = []
    while not driver.scheduler.is_idle:
        driver.step()
        counts += [len(schedule.masks.slots) for schedule in launched(driver) if schedule.masks]
    assert max(counts) == limit
    assert len(driver.finished) == 4


def test_held_chunks_get_their_turn_among_masked_decode_rows():
    driver = Driver(config(masked_rows=1, prefix_cache=False))
    driver.submit(masked("old", 20))
    driver.submit(masked("older", 20))
    for _ in range(6):
        driver.step()
    driver.submit(masked("new", 3))
    for _ in range(16):
        driver.step()
    assert list(driver.finished) == [("new", 0)]
    driver.run()


def test_whole_grammar_ends_the_output_with_stop_and_no_stop_id():
    driver = Driver(config())
    for seed in range(8):
        driver.submit(masked(str(seed), 30, ToyGrammar(seed)))
    driver.run()
    ended = [delta for delta in driver.finished.values() if delta.finish_reason == "stop"]
    assert ended and all(delta.stop_id is None and delta.token_ids for delta in ended)


def test_grammar_that_allows_nothing_fails_its_request_by_name_and_no_other():
    driver = Driver(config())
    driver.submit(request("f", [4, 5, 6], 9))
    driver.scheduler.submit(masked("m", grammar=Endless(1, stuck_after=2)))
    deltas = []
    while not driver.scheduler.is_idle:
        if (schedule := driver.scheduler.schedule()) is not None:
            driver.device.launch(schedule)
        if driver.device.pending:
            driver.scheduler.settle(*driver.device.settle())
        deltas += driver.scheduler.take_deltas()
        driver.scheduler.audit()
    (end,) = [d for d in deltas if d.request_id == "m" and d.finish_reason]
    assert end.finish_reason == "error"
    assert end.error == "request 'm': its grammar allows no id of the vocabulary here"
    assert end.is_callers_fault
    assert [d.finish_reason for d in deltas if d.request_id == "f"][-1] == "length"


def test_id_the_grammar_refuses_fails_the_request_and_is_not_delivered():
    driver = Driver(config())
    driver.scheduler.submit(masked())
    driver.launch()
    schedule, result = driver.device.settle()
    outside = next(i for i in range(11) if i not in Endless(1).allowed([]))
    sampled = np.full_like(result.sampled, outside)
    driver.scheduler.settle(schedule, dataclasses.replace(result, sampled=sampled))
    (delta,) = driver.scheduler.take_deltas()
    assert delta.finish_reason == "error" and not delta.token_ids
    assert delta.error == f"request 'm': its grammar refused the sampled id {outside}"
    assert not delta.is_callers_fault


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (RowFault.MISSING_MASK, "brought no grammar mask of its own"),
        (RowFault.NOTHING_ALLOWED, "together allow no id here"),
    ],
)
def test_faults_of_masked_rows_are_named(fault, words):
    driver = Driver(config())
    driver.scheduler.submit(masked())
    driver.launch()
    schedule, result = driver.device.settle()
    faults = np.full_like(result.faults, int(fault))
    driver.scheduler.settle(schedule, dataclasses.replace(result, faults=faults))
    (delta,) = driver.scheduler.take_deltas()
    assert delta.finish_reason == "error" and words in (delta.error or "")
    assert delta.is_callers_fault == (fault == RowFault.NOTHING_ALLOWED)


class Broken(ToyMatcher):
    """Goes past no id, like an Earley parser that has met its limit."""

    def accept(self, token_id: int) -> bool:
        del token_id
        self.fault = "row of 1201 items"
        return False


def test_id_that_its_mask_allowed_and_its_grammar_refuses_is_the_callers_fault():
    driver = Driver(config())
    driver.scheduler.submit(masked(grammar=Scripted(Broken)))
    driver.launch()
    driver.scheduler.settle(*driver.device.settle())
    (delta,) = driver.scheduler.take_deltas()
    assert delta.finish_reason == "error" and delta.is_callers_fault and not delta.token_ids
    assert (delta.error or "").endswith(
        "and cannot go past it (row of 1201 items); write a simpler structure"
    )
    driver.scheduler.audit()


@dataclasses.dataclass(frozen=True)
class Scripted(Endless):
    """A grammar whose matchers are of another class."""

    kind: type[ToyMatcher] = ToyMatcher

    def __init__(self, kind: type[ToyMatcher]) -> None:
        super().__init__(1)
        object.__setattr__(self, "kind", kind)

    def matcher(self) -> ToyMatcher:
        return self.kind(self)


class Blocked(ToyMatcher):
    """Its masks are made when they are let go, each behind its outputs as they were."""

    gate = threading.Event()

    def mask(self) -> np.ndarray:
        if len(self.outputs) > 1:
            assert self.gate.wait(30.0)
        return super().mask()


@pytest.fixture
def gate(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Blocked, "gate", gate)
    yield gate
    gate.set()


@pytest.fixture
def beside(gate):
    """A driver whose masks are made on threads, which end with the test."""
    maker = MaskMaker(2)
    yield lambda **changes: Driver(config(**changes), maker)
    gate.set()
    maker.close()


def until_blocked(driver: Driver) -> None:
    """Until the id behind the first one is settled and held back for its mask."""
    while not (driver.ids["m", 0] and driver.scheduler.wait_for_masks()):
        driver.step()


def until_made(driver: Driver, gate: threading.Event) -> None:
    gate.set()
    for _ in range(1000):
        if not driver.scheduler.wait_for_masks():
            break
        driver.step()
    driver.run()


def test_other_rows_run_at_depth_two_while_a_mask_is_under_way_and_it_then_goes_on(beside, gate):
    driver = beside(prefix_cache=False)
    driver.submit(masked(grammar=Scripted(Blocked)))
    driver.submit(request("f", [4, 5, 6], 50))
    until_blocked(driver)
    driver.launch()
    driver.settle()
    for _ in range(20):
        driver.launch()
        assert len(driver.device.pending) == 2
        assert launched(driver)[-1].masks is None and launched(driver)[-1].num_rows == 1
        driver.settle()
    assert len(driver.ids["m", 0]) == 1 and len(driver.ids["f", 0]) > 20
    until_made(driver, gate)
    assert len(driver.ids["m", 0]) == 12


def test_masked_rows_alone_wait_for_their_masks_without_being_stuck(beside, gate):
    driver = beside()
    driver.submit(masked(grammar=Scripted(Blocked)))
    until_blocked(driver)
    assert not driver.device.pending
    assert driver.scheduler.schedule() is None and driver.scheduler.wait_for_masks()
    until_made(driver, gate)
    assert driver.finished["m", 0].finish_reason == "length"


@pytest.mark.parametrize("end", ["abort", "void", "preempt"])
def test_end_or_return_of_a_choice_whose_mask_is_under_way_leaks_nothing(beside, gate, end):
    driver = beside(prefix_cache=False, groups=(GroupConfig(num_pages=8, page_size=4),))
    driver.submit(request("f", [4, 5, 6, 7], 25))
    driver.submit(masked(grammar=Scripted(Blocked)))
    until_blocked(driver)
    if end == "abort":
        driver.abort("m")
        assert not driver.scheduler.wait_for_masks()
    elif end == "void":
        driver.fail()
    else:
        while not driver.scheduler.stats.num_preemptions:
            driver.step()
    if end != "abort":
        for _ in range(6):
            driver.step()
        assert len(driver.ids["m", 0]) == 1, "no row of it ran without its mask"
    driver.submit(masked("next", 5))
    until_made(driver, gate)
    assert driver.finished["m", 0].finish_reason == ("abort" if end == "abort" else "length")
    assert driver.finished["next", 0].finish_reason == "length"


def test_mask_that_takes_too_long_fails_its_row_by_the_limit_and_no_other(beside, gate):
    driver = beside(mask_ms=20)
    driver.submit(request("f", [4, 5, 6], 40))
    driver.scheduler.submit(masked(grammar=Scripted(Blocked)))
    deltas = []
    for _ in range(2000):
        if (schedule := driver.scheduler.schedule()) is not None:
            driver.device.launch(schedule)
        if driver.device.pending:
            driver.scheduler.settle(*driver.device.settle())
        driver.scheduler.wait_for_masks()
        deltas += driver.scheduler.take_deltas()
        driver.scheduler.audit()
        if driver.scheduler.is_idle:
            break
    (end,) = [d for d in deltas if d.request_id == "m" and d.finish_reason]
    assert end.finish_reason == "error" and end.is_callers_fault
    assert end.error == (
        "request 'm': the mask of its next id takes longer than 20 ms, the limit; "
        "write a simpler structure"
    )
    assert [d.finish_reason for d in deltas if d.request_id == "f"][-1] == "length"
    assert len(driver.scheduler._free_slots) == driver.config.max_slots


class Failing(ToyMatcher):
    def mask(self) -> np.ndarray:
        if self.outputs:
            raise OSError("secret of the machine")
        return super().mask()


def test_exception_that_makes_no_mask_fails_its_request_alone_and_as_our_fault(beside):
    driver = beside()
    driver.scheduler.submit(masked(grammar=Scripted(Failing)))
    schedule = driver.scheduler.schedule()
    driver.device.launch(schedule)
    driver.scheduler.settle(*driver.device.settle())
    while driver.scheduler.wait_for_masks():
        assert driver.scheduler.schedule() is None
    end = driver.scheduler.take_deltas()[-1]
    assert end.error == "request 'm': making its mask failed: OSError"
    assert not end.is_callers_fault and driver.scheduler.is_idle


def test_structure_without_its_grammar_never_runs_free():
    lacking = dataclasses.replace(masked(), grammar=None)
    with pytest.raises(ValueError, match=r"compile params\.structured before it is submitted"):
        Driver(config()).scheduler.submit(lacking)
    plain = dataclasses.replace(request("f", [1], 3), grammar=Endless(1))
    with pytest.raises(ValueError, match="has a structure without its grammar, or a grammar"):
        Driver(config()).scheduler.submit(plain)


def test_engine_without_masks_refuses_structured_output():
    with pytest.raises(ValueError, match="start it with masked_rows, such as 16"):
        Driver(config(masked_rows=0)).scheduler.submit(masked())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("deterministic", [False, True], ids=["mixed", "deterministic"])
def test_preempted_aborted_and_failed_masked_choices_equal_solo_runs(depth, deterministic):
    # Ledger row STRUCT-11: after each return to a slot the masks go on where they stood.
    draw = random.Random(f"{depth} {deterministic}")
    driver = Driver(
        config(
            groups=(GroupConfig(num_pages=12, page_size=4),),
            deterministic=deterministic,
            max_chunk=5,
            masked_rows=2,
        )
    )
    aborted: set[str] = set()
    for name in range(60):
        prompt = [draw.randrange(3)] + [draw.randrange(2) for _ in range(draw.randrange(20))]
        grammar = draw.choice([None, Endless(1), Endless(2), ToyGrammar(3)])
        n = draw.choice([1, 1, 2])
        driver.submit(
            request(str(name), prompt, draw.randrange(1, 20), n=n, seed=name, grammar=grammar)
        )
        for _ in range(draw.randrange(12)):
            driver.step(depth)
        if draw.random() < 0.4 and (live := list(driver.scheduler._requests)):
            victim = draw.choice(live)
            if driver.requests[victim].grammar:
                aborted.add(state_of(driver, victim))
            driver.abort(victim)
        if draw.random() < 0.03:
            driver.fail()
    driver.run(depth)
    assert driver.scheduler.stats.num_preemptions > 0
    assert aborted >= {"queued", "decode"}
    assert driver.device.num_masked > 0
    assert len(driver.finished) == len(driver.ids)


@pytest.mark.parametrize("sync", [False, True], ids=["overlap", "sync"])
def test_masked_rows_of_either_lane_equal_solo_runs(sync):
    driver = Driver(config(ids_from_host=sync))
    for index in range(6):
        grammar = ToyGrammar(index) if index % 2 else None
        driver.submit(request(str(index), [index, 1, 2], 12, (3,), seed=index, grammar=grammar))
    driver.run()
    assert (driver.device.num_device_ids > 0) == (not sync)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 2}, "min_tokens is 2 together with structured"),
        ({"ignore_eos": True}, "ignore_eos is True together with structured"),
    ],
)
def test_what_contradicts_a_grammar_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        masked(**fields)


@pytest.mark.parametrize(
    ("structure", "error", "message"),
    [
        ({"kind": "xml", "text": "a"}, ValueError, "structured.kind is 'xml', it must be one of"),
        ({"kind": "regex"}, ValueError, "structured.text is '' for the kind regex; give the text"),
        ({"kind": "json_object", "text": "a"}, ValueError, "leave it empty"),
        ({"kind": "choice"}, ValueError, "choices has 0 strings .* give at least one"),
        ({"kind": "regex", "text": "a", "choices": ["b"]}, ValueError, "has 1 strings .* leave it"),
        ({"kind": "choice", "choices": ["a", ""]}, ValueError, "holds an empty string; remove"),
        ({"kind": "choice", "choices": [1]}, TypeError, "structured.choices holds 1"),
        ({"kind": "regex", "text": 3}, TypeError, "structured.text is 3, it must be a string"),
        ({"kind": "regex", "txt": "a"}, ValueError, "structured has the unknown field 'txt'"),
        ({"text": "a"}, ValueError, "structured has no kind"),
        ("a+", TypeError, "structured is 'a\\+', it must be StructuredOutput or a mapping"),
        ({"kind": "regex", "text": "é" * 40_000}, ValueError, "80000 bytes of text, the limit is"),
        (
            {"kind": "choice", "choices": [str(i) for i in range(1025)]},
            ValueError,
            "structured.choices has 1025 strings, the limit is 1024",
        ),
    ],
)
def test_bad_structures_are_refused_by_name(structure, error, message):
    with pytest.raises(error, match=message):
        request("m", [1], structured=structure)


def test_a_mapping_stands_for_a_structure_and_a_schema_may_be_a_mapping():
    found = request("m", [1], structured={"kind": "json_schema", "text": {"type": "null"}})
    assert found.params.structured == StructuredOutput("json_schema", '{"type": "null"}')
