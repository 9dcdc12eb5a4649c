"""The mixture of experts' reference: whom a token goes to, how rows are grouped, what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.execution import jaxprs
from kernels.moe import api, reference

MiB = 2**20


# --- an independent account in numpy ---


def chosen(logits, bias, *, top_k, scoring, renormalize, scale, num_groups=1, top_groups=1):
    """Ids and weights of one token, by sorting in float64."""
    x = logits.astype(np.float64)
    softmax = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    scores = softmax if scoring == "softmax" else 1 / (1 + np.exp(-x))
    choice = scores if bias is None else scores + bias
    groups = np.sort(choice.reshape(num_groups, -1), axis=1)
    worth = groups[:, -1] if scoring == "softmax" else groups[:, -2:].sum(axis=1)
    kept = set(np.argsort(-worth, kind="stable")[:top_groups])
    size = len(x) // num_groups
    ids = [i for i in np.argsort(-choice, kind="stable") if i // size in kept][:top_k]
    weights = scores[ids]
    if renormalize:
        weights = weights / weights.sum()
    return ids, weights * scale


def mixed(x, expert_ids, weights, gate_up, down):
    """[T, D] in float64, one expert of one token at a time."""
    num_experts, _, size = down.shape
    block = reference.row_block(size)
    out = np.zeros(x.shape)
    for token, ids in enumerate(expert_ids):
        for choice, expert in enumerate(ids):
            if expert == num_experts:
                continue
            rows = gate_up[expert].astype(np.float64) @ x[token]
            gate = np.concatenate([rows[i : i + block] for i in range(0, 2 * size, 2 * block)])
            up = np.concatenate([rows[i : i + block] for i in range(block, 2 * size, 2 * block)])
            hidden = gate / (1 + np.exp(-gate)) * up
            out[token] += weights[token, choice] * (down[expert].astype(np.float64) @ hidden)
    return out


RULES = {
    "softmax": {"scoring": "softmax", "renormalize": True, "scale": 1.0},
    "softmax, not renormalized": {"scoring": "softmax", "renormalize": False, "scale": 16.0},
    "softmax, groups": {
        **{"scoring": "softmax", "renormalize": False, "scale": 16.0},
        **{"num_groups": 4, "top_groups": 2},
    },
    "sigmoid": {"scoring": "sigmoid", "renormalize": True, "scale": 1.8},
    "sigmoid, groups": {
        **{"scoring": "sigmoid", "renormalize": True, "scale": 1.8},
        **{"num_groups": 4, "top_groups": 2},
    },
}


def routed(logits, bias=None, is_real=None, **rule):
    is_real = np.ones(len(logits), bool) if is_real is None else is_real
    route = jax.jit(functools.partial(reference.route, **rule))
    return tuple(map(np.asarray, route(logits, bias, is_real)))


# --- routing ---


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_tokens_go_to_the_experts_that_a_sort_would_choose(rule, has_bias):
    rng = np.random.default_rng(3)
    logits = 2 * rng.standard_normal((50, 12), np.float32)
    bias = rng.uniform(-0.25, 0.25, 12).astype(np.float32) if has_bias else None
    ids, weights = routed(logits, bias, top_k=3, **rule)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    for token in range(50):
        expected_ids, expected = chosen(logits[token], bias, top_k=3, **rule)
        assert ids[token].tolist() == expected_ids
        np.testing.assert_allclose(weights[token], expected, rtol=2e-6)


def test_bias_decides_the_choice_and_leaves_the_weights():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([0.0, 0.0, 0.0, 5.0], np.float32)
    rule = {"scoring": "sigmoid", "renormalize": False, "scale": 1.0}
    ids, weights = routed(logits, bias, top_k=2, **rule)
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([[1.0, -2.0]])), rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lowest_id(scoring):
    logits = np.array([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]], np.float32)
    rule = {"scoring": scoring, "renormalize": True, "scale": 1.0}
    assert routed(logits, top_k=5, **rule)[0].tolist() == [[1, 2, 4, 5, 0]]
    groups = {"num_groups": 3, "top_groups": 1}
    assert routed(logits, top_k=2, **rule, **groups)[0].tolist() == [
        [1, 0] if scoring == "softmax" else [4, 5]
    ]
    assert routed(logits * 0, top_k=2, **rule, **groups)[0].tolist() == [[0, 1]]


def test_padding_goes_to_no_expert_and_leaves_the_others_as_they_are():
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((9, 7), np.float32)
    is_real = np.array([1, 1, 0, 1, 0, 1, 1, 0, 0], bool)
    ids, weights = routed(logits, None, is_real, top_k=3, **RULES["softmax"])
    assert (ids[~is_real] == 7).all() and (weights[~is_real] == 0).all()
    assert (ids[is_real] < 7).all()
    logits[~is_real] = np.nan
    again = routed(logits, None, is_real, top_k=3, **RULES["softmax"])
    assert again[0].tobytes() == ids.tobytes() and again[1].tobytes() == weights.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_scores_that_are_no_numbers_give_valid_ids_and_mark_their_token_alone(rule, bad):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((6, 12), np.float32)
    clean = routed(logits, top_k=3, **rule)
    logits[1, 4] = bad
    logits[2] = np.nan
    logits[4] = bad
    ids, weights = routed(logits, top_k=3, **rule)
    assert all(len({*row}) == 3 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())
    assert np.isnan(weights[2]).all()
    # A sigmoid takes an infinity to 0 or 1, which are scores like others; a softmax only one
    # infinity below all else.
    is_marked = np.isnan(weights).any(axis=1)
    is_score = rule["scoring"] == "sigmoid" and np.isinf(bad)
    assert is_marked[4] == (not is_score)
    assert is_marked[1] == (not is_score and bad != -np.inf)
    for token in (0, 3, 5):
        assert (ids[token] == clean[0][token]).all() and (weights[token] == clean[1][token]).all()


def test_scoring_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="scoring is 'tanh'; known: softmax, sigmoid"):
        routed(np.zeros((2, 4), np.float32), top_k=1, scoring="tanh", renormalize=True, scale=1.0)


# --- rows by expert ---


def random_ids(rng, num_tokens, num_experts, top_k, padding=0.2):
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)])
    ids[rng.random(num_tokens) < padding] = num_experts
    return ids.astype(np.int32)


def skewed_ids(num_tokens, num_experts, top_k):
    """Every token goes to expert 0, and to the last ones."""
    ids = np.arange(top_k)[None] + np.zeros((num_tokens, 1))
    ids[:, 1:] = num_experts - np.arange(1, top_k)
    return ids.astype(np.int32)


IDS = {
    "two tokens": random_ids(np.random.default_rng(0), 2, 7, 3, padding=0),
    "more experts than choices": random_ids(np.random.default_rng(1), 3, 60, 4),
    "many tokens": random_ids(np.random.default_rng(2), 150, 5, 2),
    "skewed": skewed_ids(70, 9, 3),
    "padding alone": np.full((4, 3), 6, np.int32),
}


tile_table = jax.jit(reference.tile_table, static_argnums=(1, 2))


@pytest.mark.parametrize("tile_rows", [8, 16])
@pytest.mark.parametrize("name", IDS)
def test_every_choice_has_a_row_in_a_tile_of_its_expert(name, tile_rows):
    ids = IDS[name]
    num_experts = {"more experts than choices": 60, "two tokens": 7, "skewed": 9}.get(
        name, int(ids.max())
    )
    tiles = jax.tree.map(np.asarray, tile_table(ids, num_experts, tile_rows))
    is_counted = ids < num_experts
    rows = tiles.rows[is_counted]
    assert sorted(rows.tolist()) == list(range(is_counted.sum()))
    assert (tiles.rows[~is_counted] == ids.size + tile_rows).all()
    tokens = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    assert (tiles.tokens[rows] == tokens[is_counted]).all()
    # The last tile that covers a row is of the row's expert: later tiles write over earlier ones.
    owner = np.full(ids.size + tile_rows, -1)
    for expert, start in zip(tiles.experts, tiles.starts, strict=True):
        if expert < num_experts:
            owner[start : start + tile_rows] = expert
    assert (owner[rows] == ids[is_counted]).all()
    assert (np.diff(tiles.experts) >= 0).all()
    counts = np.bincount(ids[is_counted], minlength=num_experts)
    used = (tiles.experts < num_experts).sum()
    assert used == (-(-counts // tile_rows)).sum() <= len(tiles.experts)


def test_tiles_hold_about_the_mean_rows_of_an_expert():
    found = [reference._tile_rows(num_tokens * 8, 128) for num_tokens in (1, 128, 256, 600, 8192)]
    assert found == [8, 8, 16, 64, 64]


@pytest.mark.parametrize(("size", "block"), [(768, 64), (1408, 64), (40, 8), (24, 8), (7, 1)])
def test_rows_of_gate_and_up_take_turns_in_the_largest_power_of_two(size, block):
    assert reference.row_block(size) == block


# --- experts ---


def experts_inputs(ids, num_experts, hidden_size, size, dtype=np.float32):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((len(ids), hidden_size), np.float32).astype(dtype)
    gate_up = rng.standard_normal((num_experts, 2 * size, hidden_size), np.float32)
    down = rng.standard_normal((num_experts, hidden_size, size), np.float32)
    weights = rng.random(ids.shape, np.float32)
    return (
        jnp.asarray(x),
        ids,
        weights,
        jnp.asarray((gate_up / hidden_size**0.5).astype(dtype)),
        jnp.asarray((down / size**0.5).astype(dtype)),
    )


SHAPES = {
    "two tokens": (2, 7, 3, 32, 24),
    "blocks of 64": (20, 6, 2, 40, 128),
    "blocks of 8": (40, 7, 3, 80, 40),
    "many tokens": (300, 12, 4, 16, 64),
    "one expert": (9, 1, 1, 16, 8),
}


@jax.jit
def experts(*arrays):
    (only,) = reference.experts(*arrays)
    return only


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_are_the_weighted_sums_of_the_chosen_experts(shape):
    num_tokens, num_experts, top_k, hidden_size, size = shape
    ids = random_ids(np.random.default_rng(6), num_tokens, num_experts, top_k)
    inputs = experts_inputs(ids, num_experts, hidden_size, size)
    found = np.asarray(experts(*inputs))
    np.testing.assert_allclose(found, mixed(*map(np.asarray, inputs)), atol=2e-6)
    assert (found[ids[:, 0] == num_experts] == 0).all()


def test_skewed_choices_are_computed_like_any_others():
    inputs = experts_inputs(skewed_ids(70, 9, 3), 9, 24, 16)
    np.testing.assert_allclose(
        np.asarray(experts(*inputs)), mixed(*map(np.asarray, inputs)), atol=3e-6
    )


def test_bfloat16_rounds_between_the_products_alone():
    ids = random_ids(np.random.default_rng(8), 30, 6, 2)
    inputs = experts_inputs(ids, 6, 64, 32, jnp.bfloat16)
    found = experts(*inputs)
    assert found.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else x for x in inputs]
    expected = mixed(*map(np.asarray, wide))
    # Half a step of the result, and the rounded products before the sum over 32 of them.
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2**-8, atol=0.02)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_depends_on_nothing_but_itself_bit_for_bit(dtype):
    ids = random_ids(np.random.default_rng(9), 45, 7, 3)
    x, ids, weights, *stacked = experts_inputs(ids, 7, 48, 40, dtype)
    alone = np.asarray(experts(x, ids, weights, *stacked))
    order = np.random.default_rng(10).permutation(45)
    moved = np.asarray(experts(x[order], ids[order], weights[order], *stacked))
    assert moved.tobytes() == alone[order].tobytes()
    # Other neighbours: all tokens but one in three are replaced, by padding among others.
    kept = np.arange(45) % 3 == 0
    others = random_ids(np.random.default_rng(11), 45, 7, 3, padding=0.5)
    mixed_ids = np.where(kept[:, None], ids, others)
    neighbours = jnp.where(kept[:, None], x, x[::-1] * 3)
    again = np.asarray(experts(neighbours, mixed_ids, weights, *stacked))
    assert again[kept].tobytes() == alone[kept].tobytes()
    assert again[~kept].tobytes() != alone[~kept].tobytes()


def test_what_is_no_number_stays_with_the_tokens_that_meet_it():
    ids = random_ids(np.random.default_rng(12), 40, 7, 3)
    ids[5] = 7  # padding
    x, ids, weights, gate_up, down = experts_inputs(ids, 7, 24, 16)
    clean = np.asarray(experts(x, ids, weights, gate_up, down))
    poisoned = x.at[jnp.array([3, 5])].set(jnp.nan)
    found = np.asarray(experts(poisoned, ids, weights, gate_up.at[4].set(jnp.nan), down))
    meets = (ids == 4).any(axis=1)
    meets[3] = True
    assert 0 < meets.sum() < 30 and not meets[5]
    assert np.isnan(found[meets]).all()
    assert found[~meets].tobytes() == clean[~meets].tobytes()


# --- structure ---


def shapes_of(num_tokens, dtype=jnp.bfloat16):
    """One layer of Qwen3-30B-A3B."""
    return (
        jax.ShapeDtypeStruct((num_tokens, 2048), dtype),
        jax.ShapeDtypeStruct((num_tokens, 128), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.bool_),
        jax.ShapeDtypeStruct((128, 2 * 768, 2048), dtype),
        jax.ShapeDtypeStruct((128, 2048, 768), dtype),
    )


def whole(x, logits, is_real, gate_up, down):
    ids, weights = api.route(logits, None, is_real, top_k=8, **RULES["softmax"])
    return api.experts(x, ids, weights, gate_up, down)[0]


@pytest.mark.parametrize("num_tokens", [16, 2048])
def test_temporaries_stay_below_256_mib_at_published_sizes(num_tokens):
    compiled = jax.jit(whole).lower(*shapes_of(num_tokens)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * MiB


def test_nothing_is_sorted_nor_held_as_an_integer_table():
    jaxpr = jax.make_jaxpr(whole)(*shapes_of(64))
    primitives = {e.primitive.name for inner in jaxprs.walk(jaxpr) for e in jaxprs.body(inner).eqns}
    assert "dot_general" in primitives and "scan" in primitives
    assert not {name for name in primitives if "sort" in name or "top_k" in name}
    assert not {name for name in primitives if "ragged" in name}
    assert not jaxprs.integer_constants(jaxpr)


def test_the_ops_are_counted_and_fall_to_the_reference():
    before = api.route.counts["reference"], api.experts.counts["reference"]
    jax.eval_shape(whole, *shapes_of(4))
    after = api.route.counts["reference"], api.experts.counts["reference"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
