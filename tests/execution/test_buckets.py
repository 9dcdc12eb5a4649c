"""Which programs a ladder holds, and which one a schedule runs on."""

import collections
import dataclasses

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.execution.buckets import Ladder, powers_of_two
from engine.execution.runner import _gpu_profile
from engine.execution.settings import Settings
from engine.scheduling.schedule import RowKind
from tests.execution import toys
from tests.execution.toys import CHUNK, DECODE, LAST_CHUNK, LATE, schedule_of

LADDER = Ladder(
    rows=(1, 4, 6),
    tokens=(8, 32),
    widths=(3, 5),
    query_lens=(1, 2),
    max_chunk_rows=3,
    deterministic=False,
)
KEYS = LADDER.keys()


class Card:
    platform = "gpu"
    device_kind = "some card"

    def memory_stats(self):
        return {"bytes_limit": 2**37}


def decode_rows(count: int, query_len: int = 1):
    return [(slot, LATE, [0] * query_len, 4) for slot in range(count)]


def test_default_gpu_ladder_has_the_budgeted_programs():
    config = EngineConfig(model="toy")
    profile = _gpu_profile(Card(), config)
    keys = Settings.of(config, toys.model_of(toys.LLAMA), profile).ladder.keys()
    kinds = collections.Counter((key.is_decode, key.head, key.sampler) for key in keys)
    assert kinds == {
        (True, "sample", "greedy"): 8,
        (True, "sample", "full"): 8,
        (False, "sample", "greedy"): 3,
        (False, "sample", "full"): 3,
        (False, "score", "full"): 3,
    }
    assert len(keys) == len(set(keys)) == 25 == config.max_programs
    rows = [key.rows for key in keys if key.is_decode and key.sampler == "full"]
    assert rows == [1, 4, 8, 16, 32, 64, 128, 256]
    assert {key.rows for key in keys if not key.is_decode} == {256}
    assert {key.tokens for key in keys if not key.is_decode} == {512, 2048, 8192}


def test_small_card_takes_smaller_steps():
    class Small(Card):
        def memory_stats(self):
            return {"bytes_limit": 2**35}

    config = EngineConfig(model="toy")
    settings = Settings.of(config, toys.model_of(toys.LLAMA), _gpu_profile(Small(), config))
    assert settings.token_budget == 2048
    assert settings.ladder.tokens == (512, 2048)


def test_every_combination_of_rungs_is_a_program_once():
    # 2 samplers x 2 query lengths x 2 widths x 3 row rungs, 2 x 2 mixed, 2 score.
    assert len(KEYS) == len(set(KEYS)) == 24 + 4 + 2
    assert {(key.rows, key.query_len, key.tokens) for key in KEYS if key.is_decode} == {
        (rows, q, rows * q) for rows in (1, 4, 6) for q in (1, 2)
    }
    assert {key.width for key in KEYS if not key.is_decode} == {5}
    assert {key.max_chunk_rows for key in KEYS} == {0, 3}


def test_equal_padded_size_and_another_query_length_is_another_program():
    two_rungs = dataclasses.replace(LADDER, rows=(2, 4))
    single = two_rungs.key_of(schedule_of(decode_rows(4)))
    double = two_rungs.key_of(schedule_of(decode_rows(2, query_len=2)))
    assert single.tokens == double.tokens == 4
    assert single != double and str(single) != str(double)
    assert {single, double} <= set(two_rungs.keys())


@pytest.mark.parametrize(("rows", "rung"), [(1, 1), (2, 4), (4, 4), (5, 6), (6, 6)])
def test_decode_rows_take_the_smallest_rung_that_holds_them(rows, rung):
    key = LADDER.key_of(schedule_of(decode_rows(rows)))
    assert (key.rows, key.tokens, key.width) == (rung, rung, 3)
    assert key in KEYS


def test_wider_page_tables_take_a_wider_program():
    tables = (np.ones((1, 4), np.int32),)
    assert LADDER.key_of(schedule_of(decode_rows(1), page_tables=tables)).width == 5
    # The widest group counts.
    groups = (np.ones((1, 1), np.int32), np.ones((1, 4), np.int32))
    assert LADDER.key_of(schedule_of(decode_rows(1), page_tables=groups)).width == 5


def test_chunks_take_a_mixed_program_by_their_tokens():
    rows = [(0, DECODE, [1], 3), (1, CHUNK, [1] * 7, 0)]
    key = LADDER.key_of(schedule_of(rows))
    assert (key.is_decode, key.tokens, key.rows, key.width) == (False, 8, 6, 5)
    assert (key.max_chunk_rows, key.query_len) == (3, 1)
    more = [(0, DECODE, [1], 3), (1, CHUNK, [1] * 8, 0)]
    assert LADDER.key_of(schedule_of(more)).tokens == 32


def test_sampler_and_head_follow_the_schedule():
    chunk = [(0, LAST_CHUNK, [1, 2], 0)]
    assert LADDER.key_of(schedule_of(chunk)).sampler == "greedy"
    assert LADDER.key_of(schedule_of(chunk, is_full_sampler=True)).sampler == "full"
    scored = schedule_of([(0, LAST_CHUNK | RowKind.SCORES, [1, 2], 0)])
    key = LADDER.key_of(scored)
    assert (key.head, key.sampler) == ("score", "full")
    assert key in KEYS


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedule_of(decode_rows(7)), "a step of 7 rows exceeds the largest rung 6"),
        (
            schedule_of(decode_rows(1), page_tables=(np.ones((1, 6), np.int32),)),
            "a step of 6 pages in a row's table exceeds the largest rung 5",
        ),
        (
            schedule_of([(0, CHUNK, [1] * 33, 0)]),
            "a step of 33 tokens exceeds the largest rung 32",
        ),
        (
            schedule_of([(s, CHUNK, [1], 0) for s in range(7)]),
            "a step of 7 rows exceeds the largest rung 6",
        ),
        (
            schedule_of([(0, CHUNK, [1], 0)], page_tables=(np.ones((1, 6), np.int32),)),
            "a step of 6 pages in a row's table exceeds the largest rung 5",
        ),
    ],
)
def test_step_beyond_every_rung_is_refused_with_its_shape(schedule, message):
    with pytest.raises(ValueError, match=message):
        LADDER.key_of(schedule)


def test_deterministic_ladder_pins_one_shape_of_each_kind():
    ladder = dataclasses.replace(LADDER, query_lens=(1,), deterministic=True)
    keys = ladder.keys()
    kinds = [(key.is_decode, key.head, key.sampler, key.rows, key.tokens) for key in keys]
    assert kinds == [
        (True, "sample", "full", 6, 6),
        (False, "sample", "full", 6, 32),
        (False, "score", "full", 6, 32),
    ]
    for rows in ([(0, LATE, [0], 3)], [(0, LAST_CHUNK, [1], 0)]):
        key = ladder.key_of(schedule_of(rows))
        assert key in keys and key.sampler == "full" and key.rows == 6 and key.width == 5


def test_rungs_double_up_to_a_last_one_that_need_not_be_a_power():
    assert powers_of_two(1, 8) == (1, 2, 4, 8)
    assert powers_of_two(2, 6) == (2, 4, 6)
    assert powers_of_two(5, 5) == (5,)


def test_program_prints_its_shape():
    assert str(toys.decode_key()) == "decode rows 2 tokens 2 query 1 pages 2 greedy"
    assert str(toys.mixed_key(head="score", sampler="full")) == (
        "mixed+score rows 4 tokens 8 query 1 pages 3 full"
    )
