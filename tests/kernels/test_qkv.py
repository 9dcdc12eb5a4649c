"""The preparation of q, k and v: the kernel's values, interpreted, what it takes and declines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.qkv import api, prepare
from models import attention, layers
from models.batch import Batch, Tiling
from models.cache import write_kv
from tests.kernels import interpretation, qkv_cases
from tests.kernels.qkv_cases import GUARDED, POISONED, VALUES, Case

NAMES = ("q", "pool", "is_bad")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_qkv", tmp_path_factory.mktemp("interpreted"))


def without_trash(name, x):
    return x[1:] if name == "pool" else x


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernel_gives_the_values_of_the_reference(interpreted, case):
    expected = qkv_cases.expected(case, qkv_cases.inputs(case))
    for name, truth in zip(NAMES, expected, strict=True):
        found = interpreted[f"{case} {name}"]
        assert found.shape == truth.shape
        apart = without_trash(name, interpretation.steps_between(found, truth))
        # Sums run in another order, and a product may be rounded with the sum it goes into.
        assert apart.max() <= 1
        assert np.mean(apart > 0) < 1e-3


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_kernel_writes_nothing_but_its_tokens_places(interpreted, case):
    *_, pool, pages, offsets = qkv_cases.inputs(case)
    before = np.asarray(pool.astype(jnp.float32))
    is_written = np.zeros((case.num_pages, case.page_size), bool)
    is_written[pages, offsets] = True
    is_same = (interpreted[f"{case} pool"] == before).all(axis=(1, 2, 4))
    assert is_same[~is_written].all()
    assert not is_same[is_written].any()


def test_value_that_is_not_finite_is_zero_in_the_pool_and_flags_its_token_alone(interpreted):
    found, clean = (
        {name: interpreted[f"{run} {name}"] for name in NAMES} for run in ("poisoned", "clean")
    )
    tokens = [token for token, _ in POISONED]
    assert np.flatnonzero(found["is_bad"]).tolist() == tokens
    assert not clean["is_bad"].any()
    assert np.isfinite(found["pool"]).all()
    assert np.array_equal(found["q"], clean["q"])
    *_, pages, offsets = qkv_cases.inputs(GUARDED)
    is_poisoned = np.zeros(found["pool"].shape[:1] + found["pool"].shape[3:4], bool)
    is_poisoned[pages[np.array(tokens)], offsets[np.array(tokens)]] = True
    is_same = (found["pool"] == clean["pool"]).all(axis=(1, 2, 4))
    assert np.array_equal(is_same, ~is_poisoned)


def test_poisoned_call_gives_the_values_of_the_reference(interpreted):
    expected = qkv_cases.expected(GUARDED, qkv_cases.poisoned(qkv_cases.inputs(GUARDED)))
    for name, truth in zip(NAMES, expected, strict=True):
        assert interpretation.steps_between(interpreted[f"poisoned {name}"], truth).max() <= 1


def test_every_interpreted_call_ran_the_kernel(interpreted):
    assert interpreted["mosaic calls"] == interpreted["calls"] == len(VALUES) + 2


# --- blocks ---


def plan_of(num_tokens, head_dim=128, num_kv_heads=8):
    return prepare._Plan(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=4,
        head_dim=head_dim,
        scales_at=0,
        eps=1e-6,
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6, 64, 100, 256, 1000, 2048, 8191, 8192])
def test_blocks_share_the_tokens_out_without_a_rest(num_tokens, head_dim):
    plan = plan_of(num_tokens, head_dim)
    assert num_tokens % plan.tokens == 0
    assert plan.tokens <= plan.rows


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "tokens", "rows"),
    [
        (1, 128, 1, 4),
        (64, 128, 4, 4),
        (256, 128, 4, 4),
        (2048, 128, 4, 4),
        (2048, 256, 4, 4),
        (6, 64, 2, 8),
        (256, 64, 8, 8),
        (2047, 128, 1, 4),
    ],
)
def test_blocks_compute_the_fewest_rows_they_can(num_tokens, head_dim, tokens, rows):
    plan = plan_of(num_tokens, head_dim)
    assert (plan.tokens, plan.rows) == (tokens, rows)


# --- coverage ---

COVERED = [
    *(
        Case(
            (1, 64, 256)[group % 3],
            group=group,
            head_dim=(64, 128, 256)[group // 3 % 3],
            page_size=(8, 16, 32, 64)[group % 4],
            has_norm=group % 5 > 1,
        )
        for group in range(1, 17)
    ),
    *(
        Case(tokens, num_kv_heads=8, head_dim=head_dim, has_norm=(tokens + head_dim) % 3 > 0)
        for tokens in (1, 3, 256, 2048, 8192)
        for head_dim in (64, 128, 256)
    ),
]


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_kernel_takes_lowers_and_hands_the_pool_back_in_place(case):
    before = dict(api.prepare.counts)
    traced = jax.jit(case.prepare("mosaic"), donate_argnums=4).trace(*case.structs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert api.prepare.counts["mosaic"] == before.get("mosaic", 0) + 1
    assert api.prepare.counts["reference"] == before.get("reference", 0)
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output = 1") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 1
    assert not any(word in text for word in ("stablehlo.scatter", "stablehlo.transpose"))


DECLINED = [
    (Case(5, head_dim=96), "mosaic", "head_dim is 96"),
    (Case(5, group=17), "mosaic", "17 queries share a kv head"),
    (Case(5, page_size=128), "mosaic", "page_size is 128"),
    (Case(5, scales_at=4), "mosaic", "scales start at 4, not a multiple of 8"),
    (Case(5), "plain", "kernels are 'plain'"),
]


@pytest.mark.parametrize(("case", "kernels", "reason"), DECLINED)
def test_declined_call_gives_its_reason_and_runs_the_reference(case, kernels, reason):
    before = dict(api.prepare.counts)
    q, _, is_bad = case.prepare(kernels)(*qkv_cases.inputs(case))
    assert reason in api.prepare.declined["mosaic"]
    assert api.prepare.counts["reference"] == before.get("reference", 0) + 1
    assert api.prepare.counts["mosaic"] == before.get("mosaic", 0)
    assert bool(jnp.isfinite(q).all()) and not is_bad.any()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (0, "qkv is float32 and pages bfloat16"),
        (4, "qkv is bfloat16 and pages float32"),
        (3, "scales are float32"),
    ],
)
def test_other_dtypes_are_declined(place, reason):
    structs = list(Case(5).structs)
    structs[place] = jax.ShapeDtypeStruct(structs[place].shape, jnp.float32)
    kernel = functools.partial(prepare.prepare, **Case(5).static, kernels="mosaic")
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(kernel, *structs)


# --- a step ---


def step(kernels: str, dtype: str = "bfloat16"):
    """Two decode rows and one of padding: what `attention.prepared` takes."""
    rng = np.random.default_rng(0)
    rows, head_dim, kv_heads, group, page_size = 3, 64, 2, 3, 16
    qkv = jnp.asarray(rng.standard_normal((rows, kv_heads, group + 2, head_dim)), dtype)
    pool = jnp.asarray(rng.standard_normal((4, kv_heads, 2, page_size, head_dim)), dtype)
    batch = Batch(
        positions=jnp.array([4, 17, 0], jnp.int32),
        rows=jnp.array([0, 1, 0], jnp.int32),
        is_real=jnp.array([True, True, False]),
        kv_lens=jnp.array([5, 18, 0], jnp.int32),
        cu_q_lens=jnp.array([0, 1, 2, 2], jnp.int32),
        num_decode=jnp.int32(2),
        page_tables=(),
        is_decode=True,
        max_chunk_rows=0,
        tiling=Tiling(kernels=kernels),
    )
    rope = layers.RopeConfig(theta=1e4, head_dim=head_dim)
    vectors = jnp.asarray(rng.uniform(0.5, 2, 8 + (group + 1) * head_dim), dtype)
    table = jnp.array([[1, 0], [2, 3], [0, 0]], jnp.int32)
    return qkv, layers.rotation(rope, batch.positions), vectors, pool, batch, table


def projected(arguments):
    queries, is_bad = attention.prepared(
        *arguments, scales_at=8, eps=1e-6, scale=0.125, window=None
    )
    return queries.attended(), queries.pool, is_bad


def test_projection_gives_the_bits_of_the_steps_it_is_made_of():
    qkv, turn, vectors, pool, batch, table = step("plain", "float32")
    qkv = qkv.at[2].set(jnp.nan)  # padding
    out, after, is_bad = projected((qkv, turn, vectors, pool, batch, table))
    qk = layers.rms_norm(qkv[:, :, :-1], vectors[8:].reshape(4, 64), 1e-6)
    qk = layers.rotate(qk, turn)
    keys, values = qk[:, :, -1], qkv[:, :, -1]
    expected, expected_bad = attention.written(
        qk[:, :, :-1].reshape(3, 6, 64), keys, values, pool, batch, table, scale=0.125, window=None
    )
    assert np.array_equal(out, expected.attended())
    assert np.array_equal(after, expected.pool)
    assert np.array_equal(is_bad, expected_bad)
    stored, _ = write_kv(pool, keys, values, batch, table)
    assert np.array_equal(after, stored)
    assert after[3, 0, 1, 1].tolist() == values[1, 0].tolist()
    assert not is_bad.any()


def test_step_with_kernels_prepares_and_attends_by_two_of_them():
    before = api.prepare.counts["mosaic"]
    traced = jax.jit(projected).trace(step("mosaic"))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert api.prepare.counts["mosaic"] == before + 1
    assert text.count("mosaic_gpu_v2") == 2
