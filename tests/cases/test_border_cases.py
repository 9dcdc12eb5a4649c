"""Inputs that must end at the border, before anything reaches a device."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import EngineConfig, Limits
from engine.execution.buckets import ProgramKey
from engine.execution.packing import check
from engine.request import SamplingParams
from engine.serving.frontend import Frontend
from tests.scheduling.driver import Driver, config, request
from tests.serving.fake_core import BOS, FakeInfo, FakeTokenizer


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
def test_negative_limit_is_refused_at_the_start(name):
    message = f"^limits.{name} is -5, a limit cannot be negative$"
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="x", limits=Limits(**{name: -5}))


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "name",
    ["max_model_len", "max_rows", "token_budget", "max_chunk_rows", "max_chunk", "page_size"],
)
def test_size_below_one_is_refused_at_the_start(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value}, it must be at least 1$"):
        EngineConfig(model="x", **{name: value})


def test_tokenizer_that_knows_more_ids_than_the_model_has_rows_is_caught_id_by_id():
    border = Frontend(FakeInfo(vocab_size=250, eos_ids=()), FakeTokenizer(adds_bos=False))
    assert border.prepare("ab").request.prompt_ids.tolist() == [*b"ab"]
    with pytest.raises(ValueError, match=rf"prompt\[1\] is {BOS}, outside the vocabulary of 250"):
        border.prepare("a<s>")
    with pytest.raises(ValueError, match=r"continuation\[0\] is 255, outside the vocabulary"):
        border.prepare_score([1], [255])
    # Neither may an end id that the model cannot produce mask a row of its logits.
    assert border.prepare("ab", SamplingParams(min_tokens=1)).request.eos_ids == ()


@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
def test_id_without_an_embedding_row_is_never_packed(bad):
    """The last host line of defence: a gather clamps, so a wrong id would be a wrong token."""
    driver = Driver(config())
    driver.submit(request("a", [1, 10, 2]))
    schedule = driver.scheduler.schedule()
    key = ProgramKey(
        is_decode=False,
        head="sample",
        rows=4,
        tokens=16,
        query_len=1,
        width=16,
        sampler="full",
        max_chunk_rows=4,
    )
    check(schedule, key, max_slots=5, vocab_size=11)
    schedule.token_ids[1] = bad
    with pytest.raises(ValueError, match=rf"token ids must lie in \[0, 11\), got .*{bad}"):
        check(schedule, key, max_slots=5, vocab_size=11)
