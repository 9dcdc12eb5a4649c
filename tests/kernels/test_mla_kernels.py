"""Latent decode attention: the kernel's values, interpreted, what it takes and what it declines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.mla import api, decode
from tests.kernels import interpretation, mla_decode_cases
from tests.kernels.mla_decode_cases import Case

# Weights and output are rounded to bfloat16, each by 2^-9 at most and about a third of it on
# average.
TOLERANCE = 3e-3


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_mla", tmp_path_factory.mktemp("interpreted"))


# --- values ---


@pytest.mark.parametrize("case", mla_decode_cases.VALUES, ids=str)
def test_decode_kernel_gives_the_values_of_the_reference(interpreted, case):
    found = interpreted[str(case)]
    expected = mla_decode_cases.exact(case, mla_decode_cases.inputs(case))
    assert found.shape == expected.shape
    assert mla_decode_cases.row_errors(found, expected).max() < TOLERANCE
    for row, length in enumerate(case.kv_lens):
        assert (length == 0) == (not found[row].any())


def test_what_no_row_names_changes_no_bit(interpreted):
    assert np.array_equal(interpreted["bystanders"], interpreted["clean"])


def test_nan_in_a_query_reaches_its_own_row_and_no_other(interpreted):
    found, clean = interpreted["nan"], interpreted["clean"]
    is_poisoned = np.arange(len(clean)) == mla_decode_cases.POISONED_ROW
    assert clean[is_poisoned].any()
    assert np.isnan(found[is_poisoned]).all()
    assert np.array_equal(found[~is_poisoned], clean[~is_poisoned])


def test_every_interpreted_call_ran_the_kernel(interpreted):
    # The guarded case is traced once and called three times.
    traced = len(mla_decode_cases.VALUES) + 1
    assert interpreted["mosaic calls"] == interpreted["calls"] == traced


def test_cases_run_split_rows_and_whole_ones(monkeypatch):
    splits = set()
    for case in mla_decode_cases.VALUES:
        count = case.multiprocessors or 132
        monkeypatch.setattr(decode, "_MULTIPROCESSORS", count)
        pages = -(-case.width * case.page_size // 64)
        splits.add(plan(len(case.kv_lens), pages, case.num_heads).splits > 1)
    assert splits == {True, False}


# --- coverage ---


def lowered(call, structs) -> str:
    return jax.jit(call).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


FEW, MANY = (512,) * 3, (512,) * 130
COVERED = [
    *(
        Case(lens, num_heads=num_heads, page_size=page_size)
        for lens, page_size in ((FEW, 16), (MANY, 64))
        for num_heads in (1, 12, 16, 20, 28, 128)
    ),
    *(
        Case(FEW, num_heads=num_heads, queries=queries)
        for num_heads, queries in ((16, 2), (20, 3), (16, 8), (5, 4))
    ),
    Case(FEW, page_size=8),
    Case(MANY, latent=256, page_size=32),
    Case(FEW, latent=128, num_heads=20),
]


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_decode_kernel_takes_and_lowers(case):
    before = dict(api.decode.counts)
    text = lowered(case.decode("mosaic"), case.structs)
    assert api.decode.counts["mosaic"] == before.get("mosaic", 0) + 1
    assert api.decode.counts["reference"] == before.get("reference", 0)
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("num_heads", "pads"), [(16, 0), (20, 0), (28, 2), (40, 2)])
def test_nothing_moves_the_heads_of_a_model_around_the_kernel(num_heads, pads):
    text = lowered(Case(MANY, num_heads=num_heads).decode("mosaic"), Case(MANY, num_heads).structs)
    assert "stablehlo.transpose" not in text
    assert text.count("stablehlo.pad") == pads


DECLINED = [
    (Case((5,), latent=320), "mosaic", "a latent has 320 dims"),
    (Case((5,), rope=32), "mosaic", "a rotary key has 32 dims, not 64"),
    (Case((5,), page_size=128), "mosaic", "page_size is 128"),
    (Case((9,), queries=9), "mosaic", "a row has 9 queries"),
    (Case((5,)), "plain", "kernels are 'plain'"),
]


@pytest.mark.parametrize(("case", "kernels", "reason"), DECLINED)
def test_declined_decode_gives_its_reason_and_runs_the_reference(case, kernels, reason):
    before = dict(api.decode.counts)
    out = case.decode(kernels)(*mla_decode_cases.inputs(case))
    assert reason in api.decode.declined["mosaic"]
    assert api.decode.counts["reference"] == before.get("reference", 0) + 1
    assert api.decode.counts["mosaic"] == before.get("mosaic", 0)
    assert bool(jnp.isfinite(out).all())


def test_other_dtypes_and_pools_past_32_bits_are_declined():
    case = Case((5,))
    q_latent, q_rope, pool, *rest = case.structs
    wide = jax.ShapeDtypeStruct(q_latent.shape, jnp.float32)
    mosaic = functools.partial(decode.decode, **case.decode("mosaic").keywords)
    with pytest.raises(NotImplementedError, match="queries are float32 and pages bfloat16"):
        jax.eval_shape(mosaic, wide, q_rope, pool, *rest)
    huge = jax.ShapeDtypeStruct((2**25, *pool.shape[1:]), pool.dtype)
    with pytest.raises(NotImplementedError, match="a pool of 33554432 pages"):
        jax.eval_shape(mosaic, q_latent, q_rope, huge, *rest)


def plan(rows: int, pages: int, num_heads: int = 16):
    return decode._Plan(
        rows=rows,
        queries=1,
        num_heads=num_heads,
        latent=512,
        page_size=64,
        width=pages,
        scale=1.0,
    )


@pytest.mark.parametrize(
    ("rows", "pages", "splits"),
    [(256, 8, 1), (132, 64, 1), (64, 64, 2), (8, 16, 16), (1, 128, 32), (1, 4, 4), (1, 1, 1)],
)
def test_rows_are_split_until_the_device_is_busy(rows, pages, splits):
    assert plan(rows, pages).splits == splits


@pytest.mark.parametrize(
    ("num_heads", "cuts", "columns", "stride"),
    [(16, 1, 16, 16), (20, 1, 24, 20), (28, 1, 32, 32), (40, 2, 24, 24), (128, 4, 32, 32)],
)
def test_heads_fill_few_columns(num_heads, cuts, columns, stride):
    found = plan(4, 4, num_heads)
    assert (found.cuts, found.columns, found.stride) == (cuts, columns, stride)
