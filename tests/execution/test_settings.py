"""How open choices resolve, which lane is taken, and which settings are refused."""

import dataclasses

import pytest

from engine.config import EngineConfig, SettingError
from engine.execution import runner
from engine.execution.runner import _cpu_profile, _gpu_profile
from engine.execution.settings import Settings, choose_lane
from tests.execution import toys

DECLARED = toys.model_of(toys.LLAMA)
UNDECLARED = toys.model_of(dataclasses.replace(toys.LLAMA, device_token_ids=False))
CONFIG = EngineConfig(model="toy")


class Cpu:
    platform = "cpu"
    device_kind = "cpu"


class Card:
    platform = "gpu"
    device_kind = "some card"

    def memory_stats(self):
        return {"bytes_limit": 12345}


def settings(model=DECLARED, **fields) -> Settings:
    return Settings.of(dataclasses.replace(CONFIG, **fields), model, _cpu_profile(Cpu()))


# --- lanes: each term of the predicate with its polarity ---

LANES = [
    (DECLARED, {}, "overlap", None),
    (DECLARED, {"sync_lanes": ("QwenForCausalLM",)}, "overlap", None),
    (DECLARED, {"overlap": False}, "sync", "overlap is off"),
    (
        DECLARED,
        {"sync_lanes": ("LlamaForCausalLM",)},
        "sync",
        "sync_lanes names LlamaForCausalLM",
    ),
    (UNDECLARED, {}, "sync", "LlamaForCausalLM does not declare device_token_ids"),
    (UNDECLARED, {"overlap": False}, "sync", "overlap is off"),
    (DECLARED, {"eager": True}, "eager", "eager is set"),
    (DECLARED, {"eager": True, "overlap": False}, "eager", "eager is set"),
]


@pytest.mark.parametrize(("model", "fields", "lane", "reason"), LANES)
def test_lane_follows_registration_and_settings(model, fields, lane, reason):
    assert choose_lane(dataclasses.replace(CONFIG, **fields), model) == lane
    required = dataclasses.replace(CONFIG, require_overlap=True, **fields)
    if reason is None:
        assert choose_lane(required, model) == "overlap"
        return
    with pytest.raises(ValueError) as refusal:
        choose_lane(required, model)
    assert str(refusal.value) == f"require_overlap is set but the lane is {lane}: {reason}"


def test_only_the_overlap_lane_has_launches_in_flight():
    assert (settings(depth=3).lane, settings(depth=3).depth) == ("overlap", 3)
    assert settings().depth == 2
    for fields in ({"overlap": False}, {"eager": True}, {"sync_lanes": ("LlamaForCausalLM",)}):
        assert settings(depth=3, **fields).depth == 1
    assert settings(UNDECLARED, depth=3).depth == 1


# --- bounds ---


def test_model_length_is_the_models_own_or_8192():
    assert settings().max_model_len == DECLARED.config.max_position_embeddings == 128
    long = toys.model_of(toys.LLAMA, max_position_embeddings=20_000)
    assert settings(long).max_model_len == 8192
    assert settings(long, max_model_len=20_000).max_model_len == 20_000


def test_length_beyond_the_models_positions_is_refused():
    assert settings(max_model_len=128).max_model_len == 128
    with pytest.raises(ValueError, match=r"max_model_len is 129 but .* end at 128; lower"):
        settings(max_model_len=129)


def test_rows_beyond_a_registration_are_refused_by_name():
    single = toys.model_of(dataclasses.replace(toys.LLAMA, max_rows=1))
    assert settings(single, max_rows=1).max_rows == 1
    for fields in ({"max_rows": 2}, {}):
        with pytest.raises(ValueError, match="LlamaForCausalLM runs 1 rows a step; start with"):
            settings(single, **fields)


def test_slots_exceed_rows_by_a_quarter():
    assert [settings(max_rows=rows).max_slots for rows in (1, 4, 5, 8)] == [2, 5, 7, 10]


def test_pages_of_a_request_are_rounded_up():
    assert settings(max_model_len=33, page_size=16).max_pages == 3
    assert settings(max_model_len=32, page_size=16).max_pages == 2
    assert settings(max_model_len=33, page_size=16).ladder.widths == (3,)


def test_token_budget_holds_every_row():
    assert settings(max_rows=8).token_budget == 128
    assert settings(max_rows=200).token_budget == 200
    assert settings(max_rows=8, token_budget=16).token_budget == 16


def test_token_budget_is_no_more_than_all_rows_can_hold():
    assert settings(max_rows=2, max_model_len=33).token_budget == 66
    assert settings(max_rows=2, max_model_len=33, token_budget=128).token_budget == 128


def test_chunk_rows_never_exceed_rows_or_budget():
    assert settings(max_rows=4).max_chunk_rows == 4
    assert settings(max_rows=8).max_chunk_rows == 8
    assert settings(max_rows=8, max_chunk_rows=2).max_chunk_rows == 2
    narrow = settings(max_rows=2, token_budget=2, max_chunk_rows=9)
    assert narrow.max_chunk_rows == narrow.ladder.max_chunk_rows == 2


def test_dtype_is_the_devices_unless_asked():
    assert settings().dtype == "float32"
    assert settings(dtype="bfloat16").dtype == "bfloat16"


# --- ladders ---


def test_first_rung_on_a_cpu_is_two():
    assert settings(max_rows=8).ladder.rows == (2, 4, 8)
    assert settings(max_rows=1).ladder.rows == (1,)


def test_given_rungs_are_taken_as_they_are():
    ladder = settings(
        max_rows=6,
        row_rungs=(3, 6),
        token_budget=40,
        token_rungs=(10, 40),
        max_model_len=64,
        page_table_rungs=(1, 4),
    ).ladder
    assert (ladder.rows, ladder.tokens, ladder.widths) == ((3, 6), (10, 40), (1, 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_rungs": (2, 4)}, "row_rungs ends at 4 but steps reach 8; add that rung"),
        ({"token_rungs": (64,)}, "token_rungs ends at 64 but steps reach 128; add that rung"),
        ({"page_table_rungs": (7,)}, "page_table_rungs ends at 7 but steps reach 8; add that"),
    ],
)
def test_rungs_that_end_too_early_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        settings(**fields)


def test_too_many_programs_are_refused_unless_asked_for():
    many = {"row_rungs": tuple(range(1, 9)), "token_rungs": (16, 32, 64, 128)}
    assert len(settings(**many, max_programs=28).ladder.keys()) == 28
    with pytest.raises(ValueError, match="ladder has 28 programs but max_programs is 27; give"):
        settings(**many, max_programs=27)


def test_deterministic_setting_reaches_the_ladder():
    assert settings(deterministic=True).ladder.deterministic
    assert len(settings(deterministic=True).ladder.keys()) == 3


# --- devices ---


def test_cards_profile_leaves_the_pools_to_the_plan():
    profile = _gpu_profile(Card(), CONFIG)
    assert (profile.name, profile.dtype, profile.memory_bytes) == ("some card", "bfloat16", 12345)
    assert profile.pool_bytes is None and profile.compiler_options == {}


def test_helpers_lower_two_programs_each_where_there_are_processors_for_them(monkeypatch):
    def helpers(processors: int, **fields) -> int:
        monkeypatch.setattr(runner.os, "cpu_count", lambda: processors)
        config = dataclasses.replace(CONFIG, **fields)
        return Settings.of(config, DECLARED, _gpu_profile(Card(), config)).helpers

    few = {"deterministic": True}  # others have a ladder of 23
    assert [helpers(n) for n in (1, 2, 3, 8, 64)] == [0, 0, 2, 7, 11]
    assert [helpers(64, **few), helpers(64, helpers=1, **few), helpers(64, helpers=0)] == [0, 1, 0]
    assert (settings().helpers, settings(helpers=2).helpers) == (0, 2)


def test_command_buffers_are_turned_off_by_a_compiler_option():
    off = _gpu_profile(Card(), dataclasses.replace(CONFIG, command_buffers=False))
    assert off.compiler_options == {"xla_gpu_enable_command_buffer": ""}
    assert off.probe_options["xla_gpu_enable_command_buffer"] == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_model_len": 10**6}, "--max_model_len is 1000000 but the model's positions end at"),
        ({"token_rungs": (64,)}, "--token_rungs ends at 64"),
        ({"row_rungs": (1, 2, 3, 8), "max_programs": 1}, "raise --max_programs"),
    ],
)
def test_a_face_can_spell_the_settings_of_an_error(fields, words):
    with pytest.raises(SettingError) as caught:
        settings(**fields)
    assert words in caught.value.spelt(lambda name: f"--{name}")
