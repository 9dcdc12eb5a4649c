"""Latent prefill attention: the kernels' values, interpreted, what they take and decline."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.mla import api, prefill
from tests.kernels import chunks, interpretation, mla_prefill_cases
from tests.kernels.mla_prefill_cases import (
    CUT,
    CUT_AT,
    GUARDED,
    HEAD_BLOCK,
    IN_TURNS,
    VALUES,
    Case,
)

# Beside weights and output, keys and values are rounded to bfloat16 when they are expanded: a
# score of 8 is off by 2^-7 or so, and with it a weight.
TOLERANCE = 8e-3


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_mla_prefill", tmp_path_factory.mktemp("interpreted"))


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernels_give_the_values_of_the_reference(interpreted, case):
    found = interpreted[str(case)]
    expected = mla_prefill_cases.exact(case, mla_prefill_cases.inputs(case))
    assert found.shape == expected.shape
    assert chunks.token_errors(found, expected).max() < TOLERANCE


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_tokens_of_no_chunk_are_zero_and_no_others_are(interpreted, case):
    found = interpreted[str(case)]
    assert np.array_equal(found.any(axis=(1, 2)), case.is_chunk_token)
    assert not interpreted["empty"].any()


def test_nan_in_pages_without_a_chunks_key_changes_no_bit(interpreted):
    assert np.array_equal(interpreted["bystanders"], interpreted[str(GUARDED)])


def test_nan_in_a_query_reaches_its_own_token_and_no_other(interpreted):
    found, clean = interpreted["nan"], interpreted[str(GUARDED)]
    is_poisoned = np.arange(GUARDED.num_tokens) == chunks.POISONED_TOKEN
    assert GUARDED.is_chunk_token[chunks.POISONED_TOKEN]
    assert np.isnan(found[is_poisoned]).all()
    assert np.array_equal(found[~is_poisoned], clean[~is_poisoned])


def test_rows_and_heads_that_take_turns_change_no_bit(interpreted):
    assert plan_of(IN_TURNS).heads == 1
    assert np.array_equal(interpreted["in turns"], interpreted[str(GUARDED)])


def test_where_a_chunk_is_cut_changes_nothing(interpreted):
    first, last = interpreted["first part"][:CUT_AT], interpreted["last part"]
    parts = np.concatenate([first, last[: CUT.num_tokens - CUT_AT]])
    # Bit for bit on the device; a CPU without AVX-512 sums a product's last rows in another order.
    np.testing.assert_allclose(parts, interpreted[str(CUT)], rtol=2.0**-7, atol=2.0**-10)
    assert parts.any(axis=(1, 2)).all()


def test_every_interpreted_call_ran_the_kernels(interpreted):
    assert interpreted["mosaic calls"] == interpreted["calls"] == len(VALUES) + 1


# --- the work lists ---


def plan_of(case: Case, **changes) -> prefill._Plan:
    rows, width = case.structs[4].shape
    sizes = dict(
        num_tokens=-(-case.num_tokens // 8) * 8,
        rows=rows,
        max_chunk_rows=len(case.chunks) + 1,
        num_heads=case.num_heads,
        key_dim=case.nope,
        value_dim=case.value,
        latent=case.latent,
        page_size=case.page_size,
        width=width,
        scale=1.0,
        workspace_bytes=case.workspace,
    )
    return prefill._Plan(**(sizes | changes))


EMPTY = Case(((0, 0),), (5, 9))
# Every chunk of the first one starts and ends beside a multiple of 8; rows of the second fill turns
# that end with none, one and several of them.
FULL = Case(((122, 0),) * 7, (1,) * 7, padding=58)
MANY = Case(((9, 0), (1, 300), (5, 127), (0, 0), (200, 200), (3, 0), (2, 9)) * 3, (4, 4))
LISTS = [
    *VALUES,
    EMPTY,
    IN_TURNS,
    FULL,
    MANY,
    *(dataclasses.replace(MANY, workspace=blocks * 2 * HEAD_BLOCK) for blocks in (4, 5, 9)),
]


@pytest.fixture(params=LISTS, ids=str)
def lists(request):
    """A case, its plan and its work."""
    case = request.param
    plan = plan_of(case)
    work = prefill._work(*mla_prefill_cases.inputs(case)[5:], plan)
    work = jax.tree.map(np.asarray, dataclasses.asdict(work))
    return case, plan, work | {"turns": work["turns"][: work["num_turns"]]}


def test_turns_cover_every_token_of_a_chunk_once_and_no_other(lists):
    case, plan, work = lists
    covered = np.zeros(plan.num_tokens, int)
    starts = np.cumsum([0, *case.query_lens])
    for first, count, *_ in work["turns"]:
        for row, slab, begin, end, position, num_keys, _ in work["tiles"][first : first + count]:
            assert 0 <= begin < end <= 128
            tokens = 8 * slab + np.arange(begin, end)
            covered[tokens] += 1
            assert set(np.searchsorted(starts[1:], tokens, side="right")) == {row}
            assert position + begin == tokens[0] - starts[row + 1] + case.kv_lens[row]
            assert num_keys == position + end
    assert np.array_equal(covered[: case.num_tokens] > 0, case.is_chunk_token)
    assert covered.max() <= 1


def test_a_turn_expands_every_key_of_its_rows_where_they_look_for_it(lists):
    case, plan, work = lists
    assert (len(work["turns"]) > 0) == case.is_chunk_token.any()
    for first, count, first_block, num_blocks in work["turns"]:
        assert num_blocks <= plan.blocks
        blocks = work["blocks"][first_block : first_block + num_blocks].tolist()
        rows = set()
        for row, *_, base in work["tiles"][first : first + count].tolist():
            length = case.kv_lens[row]
            lengths = [min(length - start, 128) for start in range(0, length, 128)]
            expected = [[row, place, keys] for place, keys in enumerate(lengths)]
            assert blocks[base : base + len(expected)] == expected
            rows.add(row)
        assert {row for row, *_ in blocks} == rows


def test_longest_tiles_of_a_turn_come_first(lists):
    _, _, work = lists
    tiles = [work["tiles"][first : first + count] for first, count, *_ in work["turns"]]
    assert all((np.diff(of_turn[:, 5]) <= 0).all() for of_turn in tiles)


def test_rows_share_turns_as_far_as_the_workspace_goes():
    def turns(blocks: int) -> int:
        plan = plan_of(dataclasses.replace(MANY, workspace=blocks * 2 * HEAD_BLOCK))
        return int(prefill._work(*mla_prefill_cases.inputs(MANY)[5:], plan).num_turns)

    assert [turns(blocks) for blocks in (4, 9, 32, 1000)] == [18, 6, 2, 1]


@pytest.mark.parametrize(
    ("num_heads", "dims", "context", "heads"),
    [
        (16, (128, 128), 4096, 16),
        (16, (128, 128), 2**16, 16),
        (16, (128, 128), 163840, 4),
        (20, (192, 256), 8192, 20),
        (20, (192, 256), 202752, 2),
        (128, (128, 128), 8192, 128),
        (20, (192, 256), 2**20, 0),
    ],
)
def test_as_many_heads_take_a_turn_as_a_whole_row_fits_of(num_heads, dims, context, heads):
    case = Case(((1, 0),), num_heads=num_heads, nope=dims[0], value=dims[1])
    plan = plan_of(case, width=context // 64)
    assert plan.heads == heads
    if heads:
        assert plan.heads * plan.blocks * plan.block_bytes <= plan.workspace_bytes


# --- coverage ---


CHUNKS = ((300, 700), (100, 0))
COVERED = [
    (Case(CHUNKS, num_heads=16), 0),
    (Case(CHUNKS, num_heads=16, page_size=16), 0),
    (Case(CHUNKS, num_heads=128, page_size=32), 0),
    (Case(CHUNKS, num_heads=20, nope=192, value=256), 0),
    (Case(CHUNKS, num_heads=20, nope=192, value=256, page_size=16), 0),
    (Case(CHUNKS, num_heads=16, workspace=2**24), 1),
    (Case(((3, 4),), num_heads=1, latent=256), 0),
]


@pytest.mark.parametrize(("case", "loops"), COVERED, ids=str)
def test_prefill_kernels_take_and_lower(case, loops):
    before = dict(api.prefill.counts)
    traced = jax.jit(case.prefill("mosaic")).trace(*case.structs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert api.prefill.counts["mosaic"] == before.get("mosaic", 0) + 1
    assert api.prefill.counts["reference"] == before.get("reference", 0)
    assert text.count("mosaic_gpu_v2") == 2
    assert text.count("stablehlo.while") == loops


SMALL = Case(((5, 3),), num_heads=2, latent=128)


@pytest.mark.parametrize(
    ("changed", "kernels", "reason"),
    [
        ({}, "plain", "kernels are 'plain'"),
        ({"nope": 64}, "mosaic", r"keys and values of a head have \(64, 128\) dims"),
        ({"rope": 32}, "mosaic", "a rotary key has 32 dims, not 64"),
        ({"latent": 192}, "mosaic", "a latent has 192 dims, no multiple of 128 up to 512"),
        ({"latent": 640}, "mosaic", "a latent has 640 dims, no multiple of 128 up to 512"),
        ({"page_size": 128}, "mosaic", "page_size is 128"),
        ({"workspace": HEAD_BLOCK - 1}, "mosaic", "no part of 2 heads of a row of 1 pages"),
        ({"nope": 192, "value": 256, "num_heads": 3}, "mosaic", "no part of 3 heads"),
    ],
)
def test_declined_prefill_gives_its_reason_and_runs_the_reference(changed, kernels, reason):
    case = dataclasses.replace(SMALL, **changed)
    before = dict(api.prefill.counts)
    jax.eval_shape(case.prefill(kernels), *case.structs)
    with pytest.raises(NotImplementedError, match=reason):
        raise NotImplementedError(api.prefill.declined["mosaic"])
    assert api.prefill.counts["reference"] == before.get("reference", 0) + 1
    assert api.prefill.counts["mosaic"] == before.get("mosaic", 0)


def test_other_dtypes_programs_without_chunks_and_pools_past_32_bits_are_declined():
    q, k_up, v_up, pool, *rest = SMALL.structs
    settings = SMALL.prefill("mosaic").keywords
    mosaic = functools.partial(prefill.prefill, **settings)
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    with pytest.raises(NotImplementedError, match="queries are float32 and pages bfloat16"):
        jax.eval_shape(mosaic, wide, k_up, v_up, pool, *rest)
    huge = jax.ShapeDtypeStruct((2**25, *pool.shape[1:]), pool.dtype)
    with pytest.raises(NotImplementedError, match="a pool of 33554432 pages"):
        jax.eval_shape(mosaic, q, k_up, v_up, huge, *rest)
    none = functools.partial(prefill.prefill, **(settings | {"max_chunk_rows": 0}))
    with pytest.raises(NotImplementedError, match="no row may be a chunk"):
        jax.eval_shape(none, *SMALL.structs)
