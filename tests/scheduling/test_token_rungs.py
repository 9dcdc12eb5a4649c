"""A step is cut where its program would run mostly padding."""

import pytest

from engine.scheduling.config import GroupConfig
from tests.scheduling.driver import Driver, config, request

RUNGS = (8, 32, 128)


def driver(**changes):
    base = {
        "max_rows": 16,
        "max_slots": 20,
        "max_model_len": 128,
        "token_budget": 128,
        "max_chunk_rows": 16,
        "groups": (GroupConfig(num_pages=257, page_size=4),),
        "token_rungs": RUNGS,
        "prefix_cache": False,
    }
    return Driver(config(**base | changes))


def step_tokens(run, prompts):
    """Tokens of each step with chunks, until no prompt has any left."""
    for number, length in enumerate(prompts):
        run.submit(request(f"r{number}", list(range(1, length + 1)), max_tokens=1))
    found = []
    while run.launch():
        found.append(run.device.pending[-1][0].num_tokens)
        run.settle()
    return found


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([8], [8]),
        ([9], [8, 1]),
        ([19], [8, 8, 3]),
        ([20], [20]),  # fills 5/8 of a step of 32
        ([32, 32], [32, 32]),
        ([32, 32, 15], [32, 32, 8, 7]),
        ([64, 16], [80]),  # fills 5/8 of a step of 128
        ([100, 100], [128, 32, 32, 8]),
    ],
)
def test_steps_are_cut_to_the_rung_below_where_the_next_would_be_mostly_padding(prompts, expected):
    assert step_tokens(driver(), prompts) == expected


@pytest.mark.parametrize("changes", [{"token_rungs": ()}, {"token_rungs": (128,)}])
def test_without_a_smaller_program_nothing_is_cut(changes):
    assert step_tokens(driver(**changes), [32, 32, 15]) == [79]


def test_decoding_rows_are_never_crowded_out_by_the_cut():
    """Half of the rung below is for the prompt, or the step keeps its size."""
    run = driver()
    for number in range(5):
        run.submit(request(f"d{number}", [1], max_tokens=9))
    run.launch()
    run.settle()
    run.submit(request("prompt", list(range(1, 9)), max_tokens=1))
    run.launch()
    schedule, *_ = run.device.pending[-1]
    assert schedule.num_rows == 6 and schedule.num_tokens == 13
