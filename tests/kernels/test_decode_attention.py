"""Decode attention: the kernel's values, interpreted, what it takes and what it declines."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.execution.runner import device_profile
from kernels.attention import api, decode
from kernels.tuning import FORMULA, Choice
from models import attention
from models.batch import Batch, Tiling
from tests.kernels import decode_cases, interpretation
from tests.kernels.decode_cases import GUARDED, POISONED_ROW, TIMES, VALUES, Case, Times

# Weights and output are rounded to bfloat16, each by 2^-9 at most and about a third of it on
# average.
TOLERANCE = 3e-3


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted", tmp_path_factory.mktemp("interpreted"))


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernel_gives_the_values_of_the_reference(interpreted, case):
    found = interpreted[str(case)]
    expected = decode_cases.exact(case, decode_cases.inputs(case))
    assert found.shape == expected.shape
    assert decode_cases.row_errors(found, expected).max() < TOLERANCE


@pytest.mark.parametrize("case", [case for case in VALUES if 0 in case.kv_lens], ids=str)
def test_row_without_keys_is_zero(interpreted, case):
    found = interpreted[str(case)]
    for row, length in enumerate(case.kv_lens):
        assert (length == 0) == (not found[row].any())


def test_what_no_row_names_changes_no_bit(interpreted):
    assert np.array_equal(interpreted["bystanders"], interpreted["clean"])


def test_nan_in_a_query_reaches_its_own_row_and_no_other(interpreted):
    found, clean = interpreted["nan"], interpreted["clean"]
    is_poisoned = np.arange(len(GUARDED.kv_lens)) == POISONED_ROW
    assert np.isnan(found[is_poisoned]).all()
    assert np.array_equal(found[~is_poisoned], clean[~is_poisoned])


@pytest.mark.parametrize("case", TIMES, ids=str)
def test_splits_that_are_merged_in_the_product_give_the_values_of_those_merged_before(
    interpreted, case
):
    together, apart = (interpreted[f"{case} {way}"] for way in ("together", "apart"))
    # A step of fewer inputs adds up in another order.
    np.testing.assert_allclose(together, apart, rtol=0, atol=1e-6)
    assert together.shape[1:] == (1, case.outputs) and together.all()
    assert interpreted["times"].tolist() == [len(TIMES)] * 3


@pytest.mark.parametrize("case", TIMES, ids=str)
@pytest.mark.parametrize("form", ["registers", "prefetched"])
def test_merged_splits_that_are_multiplied_otherwise_give_the_same_bits(interpreted, case, form):
    found = interpreted[f"{case} {form}"]
    np.testing.assert_array_equal(found, interpreted[f"{case} together"])


def test_every_interpreted_call_ran_the_kernel(interpreted):
    assert interpreted["mosaic calls"] == interpreted["calls"] == len(VALUES) + 3


def test_cases_run_split_rows_and_whole_ones():
    splits = set()
    for case in VALUES:
        blocks = len(case.kv_lens) * case.num_kv_heads
        tiles = -(-case.width * case.page_size // 64)
        splits.add(tiles > 1 and blocks < (case.min_blocks or decode._MIN_BLOCKS))
    assert splits == {True, False}


# --- coverage ---


def lowered(case: Case) -> str:
    return (
        jax.jit(case.decode("mosaic"))
        .trace(*case.structs)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


FEW, MANY = (512,) * 3, (512,) * 130
COVERED = [
    *(
        Case(
            (FEW, MANY)[group % 2],
            group=group,
            head_dim=(64, 128, 256)[group % 3],
            page_size=(64, 16)[group // 2 % 2],
        )
        for group in range(1, 17)
    ),
    *(
        Case(lens, head_dim=head_dim, page_size=page_size)
        for lens in (FEW, MANY)
        for head_dim in (64, 128, 256)
        for page_size in (16, 64)
    ),
    *(
        Case(
            (MANY, FEW)[queries % 2],
            queries=queries,
            group=(1, 4, 5, 16)[queries % 4],
            head_dim=(128, 256, 64)[queries % 3],
            page_size=(16, 64)[queries // 2 % 2],
            window=(None, 100)[queries // 4 % 2],
        )
        for queries in range(2, 9)
    ),
    Case(MANY, group=16, head_dim=256),
    Case(FEW, group=16, head_dim=256),
    Case(FEW, page_size=8),
    Case(FEW, page_size=32, window=100),
    Case((8,), group=1, num_kv_heads=1),
]


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_kernel_takes_and_lowers(case):
    before = dict(api.decode.counts)
    text = lowered(case)
    assert api.decode.counts["mosaic"] == before.get("mosaic", 0) + 1
    assert api.decode.counts["reference"] == before.get("reference", 0)
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("queries", "others"), [(1, 0), (2, 2)])
def test_nothing_moves_single_queries_around_the_kernel(queries, others):
    text = lowered(Case(MANY, queries=queries, group=5))
    assert text.count("stablehlo.transpose") == others
    assert ("stablehlo.pad" in text) == (queries > 1)


DECLINED = [
    (Case((5,), head_dim=96), "mosaic", "head_dim is 96"),
    (Case((5,), group=17), "mosaic", "17 queries share a kv head"),
    (Case((5,), page_size=128), "mosaic", "page_size is 128"),
    (Case((9,), queries=9), "mosaic", "a row has 9 queries"),
    (Case((5,)), "plain", "kernels are 'plain'"),
]


@pytest.mark.parametrize(("case", "kernels", "reason"), DECLINED)
def test_declined_call_gives_its_reason_and_runs_the_reference(case, kernels, reason):
    before = dict(api.decode.counts)
    out = case.decode(kernels)(*decode_cases.inputs(case))
    assert reason in api.decode.declined["mosaic"]
    assert api.decode.counts["reference"] == before.get("reference", 0) + 1
    assert api.decode.counts["mosaic"] == before.get("mosaic", 0)
    assert bool(jnp.isfinite(out).all())


@pytest.mark.parametrize(
    ("attention", "outputs", "reason"),
    [
        (Case((130,)), 64, "kernels are 'plain'"),
        (Case((130, 9)), 64, "2 rows of 1 queries, not one query"),
        (Case((130,), queries=2), 64, "1 rows of 2 queries, not one query"),
        (Case((60,)), 64, "the row is not split"),
        (Case((130,), group=3), 64, "3 queries share a kv head, not a multiple of 4"),
        (Case((130,), num_kv_heads=1), 64, None),
        (Case((130,)), 96, "weight is 1024 x 96, not multiples"),
        (Case((130,), group=8, num_kv_heads=2), 64, None),
        (Case((130,), group=4, num_kv_heads=3), 64, None),
        (Case((130,), group=12, num_kv_heads=3), 64, "36 heads in 4 splits, not 4 or a multiple"),
    ],
    ids=str,
)
def test_a_product_that_is_not_covered_is_made_apart(attention, outputs, reason):
    case = Times(attention, outputs)
    kernels = "plain" if reason and "plain" in reason else "mosaic"
    call = case.call(kernels, decode.times)
    if reason is None:
        assert jax.eval_shape(call, *case.structs).shape[1:] == (1, outputs)
        return
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(call, *case.structs)
    before = api.decode_times.counts["apart"]
    jax.eval_shape(case.call(kernels), *case.structs)
    assert api.decode_times.counts["apart"] == before + 1


def test_weights_are_prefetched_by_choice_alone():
    case = Times(Case((1000,), num_kv_heads=8), outputs=4096)

    def traced(choice: Choice) -> str:
        call = dataclasses.replace(case, choice=choice).call("mosaic")
        return str(jax.make_jaxpr(call)(*case.structs))

    formula = traced(FORMULA)
    assert "async_prefetch" not in formula
    assert formula == traced(Choice.of("mosaic", depth=128))
    for choice in decode_cases.PREFETCHED:
        assert traced(choice).count("async_prefetch") == 1


def test_other_dtypes_and_pools_past_32_bits_are_declined():
    case = Case((5,))
    q, pool, *rest = case.structs
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    mosaic = jax.tree_util.Partial(decode.decode, **case.decode("mosaic").keywords)
    with pytest.raises(NotImplementedError, match="queries are float32 and pages bfloat16"):
        jax.eval_shape(mosaic, wide, pool, *rest)
    huge = jax.ShapeDtypeStruct((2**23, *pool.shape[1:]), pool.dtype)
    with pytest.raises(NotImplementedError, match="a pool of 8388608 pages"):
        jax.eval_shape(mosaic, q, huge, *rest)


@pytest.mark.parametrize(
    ("rows", "pages", "splits"),
    [
        (256, 16, 1),
        (64, 16, 1),
        (16, 16, 1),
        (8, 16, 2),
        (1, 128, 16),
        (1, 16, 8),
        (1, 3, 2),
        (1, 1, 1),
    ],
)
def test_rows_are_split_until_the_device_is_busy(rows, pages, splits):
    plan = decode._Plan(
        rows=rows,
        queries=1,
        num_kv_heads=8,
        group=4,
        head_dim=128,
        page_size=64,
        width=pages,
        scale=1.0,
        window=None,
    )
    assert plan.splits == splits


# --- a mixed step ---


def mixed(kernels: str, dtype: str = "float32", num_decode: int = 2):
    """A step of two decode rows and a chunk of three tokens, and everything it reads."""
    rng = np.random.default_rng(0)
    rows, head_dim, kv_heads = 3, 64, 2
    q, keys, values = (
        jnp.asarray(rng.standard_normal((5, heads, head_dim)), dtype)
        for heads in (3 * kv_heads, kv_heads, kv_heads)
    )
    pool = jnp.asarray(rng.standard_normal((rows + 1, kv_heads, 2, 16, head_dim)), dtype)
    batch = Batch(
        positions=jnp.array([4, 9, 0, 1, 2], jnp.int32),
        rows=jnp.array([0, 1, 2, 2, 2], jnp.int32),
        is_real=jnp.ones((5,), jnp.bool_),
        kv_lens=jnp.array([5, 10, 3], jnp.int32),
        cu_q_lens=jnp.array([0, 1, 2, 5], jnp.int32),
        num_decode=jnp.int32(num_decode),
        page_tables=(),
        is_decode=False,
        max_chunk_rows=3,
        tiling=Tiling(kernels=kernels),
    )
    table = jnp.array([[1], [2], [3]], jnp.int32)
    return (q, keys, values, pool, batch, table)


@jax.jit
def attended(*arguments):
    queries, is_bad = attention.written(*arguments, scale=0.125, window=None)
    return queries.attended(), queries.pool, is_bad


@pytest.mark.parametrize("num_decode", [0, 2])
def test_mixed_step_gives_the_same_bits_with_and_without_the_branch(num_decode):
    plain, kernels = (attended(*mixed(name, num_decode=num_decode)) for name in ("plain", "mosaic"))
    assert api.decode.declined["mosaic"].startswith("queries are float32")
    for one, other in zip(plain, kernels, strict=True):
        assert np.array_equal(one, other)


def test_mixed_step_runs_both_kernels_and_branches_in_the_plain_form_alone():
    def branches(kernels: str) -> int:
        traced = attended.trace(*mixed(kernels, "bfloat16"))
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.case")

    ops = (api.decode, api.prefill)
    before = [op.counts["mosaic"] for op in ops]
    assert branches("plain") > branches("mosaic") == 0
    assert [op.counts["mosaic"] for op in ops] == [count + 1 for count in before]


# --- who gets the kernels ---


@pytest.mark.parametrize(
    ("capability", "kernels"), [("9.0", "mosaic"), ("8.0", "plain"), ("10.0", "plain")]
)
def test_kernels_are_for_hopper_alone(capability, kernels):
    card = types.SimpleNamespace(
        platform="gpu",
        device_kind="some card",
        compute_capability=capability,
        memory_stats=lambda: {"bytes_limit": 2**37},
    )
    assert device_profile(card, EngineConfig(model="toy")).tiling.kernels == kernels
