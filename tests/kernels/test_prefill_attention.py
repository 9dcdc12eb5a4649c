"""Prefill attention: the kernel's values, interpreted, what it takes and what it declines."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import query_tiles
from kernels.attention import api, prefill
from tests.kernels import chunks, interpretation, prefill_cases
from tests.kernels.prefill_cases import CUT, CUT_AT, EMPTY, GUARDED, VALUES, Case

# Weights and output are rounded to bfloat16, each by 2^-9 at most and about a third of it on
# average.
TOLERANCE = 3e-3


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_prefill", tmp_path_factory.mktemp("interpreted"))


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernel_gives_the_values_of_the_reference(interpreted, case):
    found = interpreted[str(case)]
    expected = prefill_cases.exact(case, prefill_cases.inputs(case))
    assert found.shape == expected.shape
    assert chunks.token_errors(found, expected).max() < TOLERANCE


@pytest.mark.parametrize("case", (*VALUES, EMPTY), ids=str)
def test_tokens_of_no_chunk_are_zero_and_no_others_are(interpreted, case):
    found = interpreted[str(case)]
    assert np.array_equal(found.any(axis=(1, 2)), case.is_chunk_token)


def test_what_no_chunk_names_changes_no_bit(interpreted):
    assert np.array_equal(interpreted["bystanders"], interpreted["clean"])


def test_nan_in_a_query_reaches_its_own_token_and_no_other(interpreted):
    found, clean = interpreted["nan"], interpreted["clean"]
    is_poisoned = np.arange(GUARDED.num_tokens) == chunks.POISONED_TOKEN
    assert GUARDED.is_chunk_token[chunks.POISONED_TOKEN]
    assert np.isnan(found[is_poisoned]).all()
    assert np.array_equal(found[~is_poisoned], clean[~is_poisoned])


def test_where_a_chunk_is_cut_changes_nothing(interpreted):
    first, last = interpreted["first part"][:CUT_AT], interpreted["last part"]
    parts = np.concatenate([first, last[: CUT.num_tokens - CUT_AT]])
    # Bit for bit on the device; a CPU without AVX-512 sums a product's last rows in another order.
    np.testing.assert_allclose(parts, interpreted["whole"], rtol=2.0**-7, atol=2.0**-10)
    assert parts.any(axis=(1, 2)).all()


def test_every_interpreted_call_ran_the_kernel(interpreted):
    assert interpreted["mosaic calls"] == interpreted["calls"] == len(VALUES) + 3


# --- the work list ---


def plan_of(case: Case, **changes) -> prefill._Plan:
    rows, width = case.structs[2].shape
    sizes = dict(
        num_tokens=-(-case.num_tokens // 8) * 8,
        rows=rows,
        max_chunk_rows=len(case.chunks) + case.spare_chunk_rows,
        num_kv_heads=case.num_kv_heads,
        group=case.group,
        head_dim=case.head_dim,
        page_size=case.page_size,
        width=width,
        scale=1.0,
        window=case.window,
    )
    return prefill._Plan(**(sizes | changes))


# Every chunk of the last one starts and ends beside a multiple of 8.
FULL = Case(((58, 0),) * 7, (1,) * 7, group=2, padding=58, spare_chunk_rows=0)
LISTS = [*VALUES, GUARDED, EMPTY, FULL]


@pytest.mark.parametrize("case", LISTS, ids=str)
def test_tiles_cover_each_token_once_and_none_mixes_rows(case):
    plan = plan_of(case)
    tiles, num_used = prefill._work_list(*prefill_cases.inputs(case)[3:], plan)
    used = np.asarray(tiles)[: int(num_used[0])]
    covered = np.zeros(plan.num_tokens, int)
    starts = np.cumsum([0, *case.query_lens])
    for row, slab, begin, end, position, num_keys in used.tolist():
        assert 0 <= begin < end <= plan.tile_tokens
        tokens = 8 * slab + np.arange(begin, end)
        covered[tokens] += 1
        owners = np.searchsorted(starts[1:], tokens, side="right")
        if num_keys:
            assert set(owners) == {row}
            cached = case.kv_lens[row] - case.query_lens[row]
            assert position + begin == cached + tokens[0] - starts[row]
            assert num_keys == position + end
        else:
            assert not case.is_chunk_token[tokens[tokens < case.num_tokens]].any()
    assert (covered == 1).all()
    assert len(used) <= len(tiles) == plan.num_tiles


def test_tiles_with_most_keys_come_first():
    case = VALUES[0]
    tiles, num_used = prefill._work_list(*prefill_cases.inputs(case)[3:], plan_of(case))
    keys = np.asarray(tiles)[: int(num_used[0]), 5]
    assert (np.diff(keys) <= 0).all()
    assert keys[0] == 266
    assert keys[-1] == 0


@pytest.mark.parametrize("num_units", [0, 1, 5, 6, 9, 11, 12, 17])
def test_blocks_share_out_every_unit(num_units):
    plan = plan_of(VALUES[0])
    seen = []
    for block in range(plan.num_blocks):
        share = query_tiles.share(jnp.int32(num_units), jnp.int32(block), plan.num_blocks)
        seen += [int(share.unit_at(jnp.int32(i))) for i in range(int(share.count))]
    assert sorted(seen) == list(range(num_units))


# --- coverage ---


def lowered(case: Case) -> str:
    traced = jax.jit(case.prefill("mosaic")).trace(*case.structs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


MANY = ((300, 700), (100, 0), (33, 64))
COVERED = [
    *(
        Case(
            MANY,
            (9,) * (group % 3),
            group=group,
            head_dim=(64, 128, 256)[group % 3],
            page_size=(64, 16)[group // 2 % 2],
            window=(None, 100)[group // 4 % 2],
            padding=(3 - group) % 8,
        )
        for group in range(1, 17)
    ),
    Case(MANY, group=4),
    Case(MANY, group=8, page_size=16),
    Case(MANY, group=1, head_dim=64),
    Case(MANY, group=2, head_dim=256, page_size=16),
    Case(MANY, page_size=32),
    Case(((1, 0),), group=1),
]


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_kernel_takes_and_lowers(case):
    before = dict(api.prefill.counts)
    text = lowered(case)
    assert api.prefill.counts["mosaic"] == before.get("mosaic", 0) + 1
    assert api.prefill.counts["reference"] == before.get("reference", 0)
    assert text.count("mosaic_gpu_v2") == 1


def test_only_queries_of_uneven_number_are_moved_around_the_kernel():
    def moved(case: Case) -> set[str]:
        moves = r"stablehlo\.(pad|transpose|gather|scatter|slice) .*bf16"
        return set(re.findall(moves, lowered(case)))

    assert moved(Case(((64, 9), (60, 0)), (3,) * 4, group=5)) == set()
    assert moved(Case(((64, 9), (60, 0)), (3,) * 5, group=5)) == {"pad", "slice"}


DECLINED = [
    (Case(((5, 4),), head_dim=96), "mosaic", "head_dim is 96"),
    (Case(((5, 4),), group=17), "mosaic", "17 queries share a kv head"),
    (Case(((5, 4),), page_size=128), "mosaic", "page_size is 128"),
    (Case(((5, 4),)), "plain", "kernels are 'plain'"),
]


@pytest.mark.parametrize(("case", "kernels", "reason"), DECLINED)
def test_declined_call_gives_its_reason_and_runs_the_reference(case, kernels, reason):
    before = dict(api.prefill.counts)
    out = case.prefill(kernels)(*prefill_cases.inputs(case))
    assert reason in api.prefill.declined["mosaic"]
    assert api.prefill.counts["reference"] == before.get("reference", 0) + 1
    assert api.prefill.counts["mosaic"] == before.get("mosaic", 0)
    assert bool(jnp.isfinite(out).all())


def test_other_dtypes_and_pools_past_32_bits_are_declined():
    case = Case(((5, 4),))
    q, pool, *rest = case.structs
    mosaic = jax.tree_util.Partial(prefill.prefill, kernels="mosaic", **case.static)
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    with pytest.raises(NotImplementedError, match="queries are float32 and pages bfloat16"):
        jax.eval_shape(mosaic, wide, pool, *rest)
    huge = jax.ShapeDtypeStruct((2**24, *pool.shape[1:]), pool.dtype)
    with pytest.raises(NotImplementedError, match="a pool of 16777216 pages"):
        jax.eval_shape(mosaic, q, huge, *rest)
