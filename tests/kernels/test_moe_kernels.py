"""Kernels of the mixture of experts: their values, interpreted, what they take and decline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.moe import api, permuted, products, reference, unpermuted
from tests.kernels import interpretation, moe_cases
from tests.kernels.moe_cases import (
    CHOICES,
    GUARDED,
    KEPT,
    ODD,
    SERVED,
    TABLES,
    VALUES,
    Case,
    Choice,
)

SHARED_BYTES = 232448  # of one block, barriers included. NVIDIA H200.


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs of every case by name."""
    return interpretation.run("interpreted_moe", tmp_path_factory.mktemp("interpreted"))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """Tiles that are not full, and their products."""
    return interpretation.run("interpreted_moe_tails", tmp_path_factory.mktemp("ragged"))


def error(found, expected):
    """The largest of a token's length."""
    length = np.linalg.norm(expected, axis=1)
    apart = np.linalg.norm(found - expected, axis=1)
    assert not apart[length == 0].any()
    return (apart / np.where(length == 0, 1, length)).max()


# --- values ---


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_experts_give_the_values_of_the_reference(interpreted, case):
    expected = moe_cases.expected(moe_cases.inputs(case))
    assert interpreted[str(case)].shape == expected.shape
    # Hidden values, outputs and their sum are rounded to 8 bits, the kernels' and the reference's.
    assert error(interpreted[str(case)], expected) < 2**-7


@pytest.mark.parametrize("case", [case for case in VALUES if case.padding], ids=str)
def test_padding_is_zero(interpreted, case):
    assert not interpreted[str(case)][-case.padding :].any()


@pytest.mark.parametrize("case", GUARDED, ids=str)
def test_nothing_chosen_gives_zeros(interpreted, case):
    assert not interpreted[f"{case} padding"].any()


@pytest.mark.parametrize("case", GUARDED, ids=str)
@pytest.mark.parametrize("neighbours", ["other", "nonfinite"])
def test_token_keeps_its_bits_whatever_its_neighbours_are(interpreted, case, neighbours):
    clean, found = interpreted[str(case)], interpreted[f"{case} {neighbours}"]
    assert clean[KEPT].any()
    assert found[KEPT].tolist() == clean[KEPT].tolist()
    num_real = case.num_tokens - case.padding
    assert not found[num_real:].any()
    is_rest = (np.arange(len(clean)) != KEPT) & (np.arange(len(clean)) < num_real)
    if neighbours == "nonfinite":
        assert np.isnan(found[is_rest]).any(axis=1).all()
    else:
        assert (found != clean)[is_rest].any(axis=1).all()


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_choice_is_that_of_the_reference(interpreted, case):
    ids, weights = reference.route(*moe_cases.choice_inputs(case), **case.static)
    assert interpreted[f"{case} ids"].tolist() == ids.tolist()
    found = interpreted[f"{case} weights"]
    np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-30, equal_nan=True)
    assert np.isnan(found).any(axis=1).tolist() == [i == 2 for i in range(case.num_tokens)]
    assert ids[-1].tolist() == [case.num_experts] * case.top_k and not found[-1].any()


# --- tables ---


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_chosen_experts_are_those_that_some_token_counts_in_rising_order(interpreted, case):
    num_tokens, padding = case
    ids, weights = (np.asarray(x) for x in moe_cases.table_inputs(num_tokens, padding))
    of_tokens, chosen, upto = (
        interpreted[f"{case} {what}"] for what in ("of tokens", "chosen", "upto")
    )
    counted = ids[: num_tokens - padding][weights[: num_tokens - padding] != 0]
    expected = np.unique(counted)
    assert chosen[: upto[-1]].tolist() == expected.tolist()
    assert np.diff(upto, prepend=0).nonzero()[0].tolist() == expected.tolist()
    assert ((chosen >= 0) & (chosen < len(chosen))).all()
    dense = np.zeros((of_tokens.shape[1], moe_cases.TABLE_EXPERTS + 1), np.float32)
    np.put_along_axis(dense[:num_tokens], ids, weights, axis=1)
    np.testing.assert_array_equal(of_tokens[: moe_cases.TABLE_EXPERTS].T, dense[:, :-1])
    assert not of_tokens[moe_cases.TABLE_EXPERTS :].any()


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_rows_are_grouped_by_expert_in_tiles_of_one(interpreted, case):
    ids = np.asarray(moe_cases.table_inputs(*case)[0])
    is_real = ids < moe_cases.TABLE_EXPERTS
    names = ("tiles", "tiles upto", "held", "rows")
    tiles, upto, held, rows = (interpreted[f"{case} {what}"] for what in names)
    assert (rows[~is_real] == -1).all()
    in_tile = np.bincount(rows[is_real] // moe_cases.TILE, minlength=upto[-1])
    assert held[: upto[-1]].tolist() == in_tile.tolist()
    counts = np.bincount(ids[is_real], minlength=len(upto))
    assert upto.tolist() == np.cumsum(-(-counts // moe_cases.TILE)).tolist()
    assert upto[-1] <= len(tiles)
    assert ((tiles >= 0) & (tiles < moe_cases.TABLE_EXPERTS)).all()
    # Tokens of an expert follow one another from its first tile on.
    for expert in np.unique(ids[is_real]):
        first = (upto[expert - 1] if expert else 0) * moe_cases.TILE
        token, choice = np.nonzero(ids == expert)
        assert rows[token, choice].tolist() == list(range(first, first + len(token)))
        assert (tiles[rows[token, choice] // moe_cases.TILE] == expert).all()


def test_blocks_past_those_of_one_matrix_are_placed_after_them(interpreted):
    counts = np.asarray(moe_cases.block_counts())[: moe_cases.PLACED_BLOCKS].astype(int)
    names = ("tiles", "upto", "held", "bases")
    tiles, upto, held, bases = (interpreted[f"placed {what}"] for what in names)
    num_tiles = -(-counts.sum(axis=0) // moe_cases.TILE)
    assert upto.tolist() == np.cumsum(num_tiles).tolist()
    assert tiles[: upto[-1]].tolist() == np.repeat(np.arange(64), num_tiles).tolist()
    last = np.flatnonzero(np.diff(tiles[: upto[-1]], append=-1))
    expected = np.full(upto[-1], moe_cases.TILE)
    expected[last] -= (num_tiles * moe_cases.TILE - counts.sum(axis=0))[num_tiles > 0]
    assert held[: upto[-1]].tolist() == expected.tolist()
    first = (np.cumsum(num_tiles) - num_tiles) * moe_cases.TILE
    expected = first + np.cumsum(counts, axis=0) - counts
    assert bases[: moe_cases.PLACED_BLOCKS].tolist() == expected.tolist()


# --- tiles ---


def ragged_rows():
    """Of tiles that are not full, the rows that hold tokens and those that are multiplied."""
    row, is_held, is_multiplied = np.arange(moe_cases.WIDE), [], []
    for _, held in moe_cases.ragged_tiles():
        is_held.append(row < held)
        is_multiplied.append(row < -(-held // 32) * 32)
    return np.concatenate(is_held), np.concatenate(is_multiplied)


def test_tiles_of_ragged_experts_hold_their_tokens(ragged):
    experts, held = ragged["experts"], ragged["held"]
    tiles = moe_cases.ragged_tiles()
    assert list(zip(experts.tolist(), held.tolist(), strict=True))[: len(tiles)] == tiles
    is_held, _ = ragged_rows()
    assert sorted(ragged["rows"].ravel()) == np.flatnonzero(is_held).tolist()


@pytest.mark.parametrize("what", ["hidden", "outputs"])
def test_narrow_tile_gives_the_bits_of_a_whole_one_and_no_more(ragged, what):
    is_held, is_multiplied = ragged_rows()
    narrow, whole = (ragged[f"{what} of {tail}"][: len(is_held)] for tail in (32, moe_cases.WIDE))
    assert np.isfinite(whole).all()
    assert (narrow == whole)[is_held].all()
    # The interpreter's memory is full of NaN until it is written.
    assert np.isnan(narrow[~is_multiplied]).all()


def test_ragged_tiles_give_the_values_of_the_reference(ragged):
    _, x, gate_up, down = moe_cases.ragged_inputs()
    ids = np.repeat([expert for expert, _ in moe_cases.ragged_tiles()], moe_cases.WIDE)[:, None]
    arrays = x[: len(ids)], jnp.asarray(ids), jnp.ones(ids.shape), gate_up, down
    is_held, _ = ragged_rows()
    found = ragged["outputs of 32"][: len(ids)]
    assert error(found[is_held], moe_cases.expected(arrays)[is_held]) < 2**-7


@pytest.mark.parametrize(("columns", "widths"), [(64, (64,)), (128, (32, 64, 96, 128))])
def test_only_wide_tiles_have_tails(columns, widths):
    assert permuted._tile(columns, permuted._tails(columns)[0], 256).widths == widths


@pytest.mark.parametrize("columns", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("consumers", [1, 2])
def test_ring_and_results_fit_in_a_block(columns, consumers):
    tile = products.Tile(columns, consumers)
    step = 2 * 64 * (tile.block_rows + columns)
    result = 2 * 64 * columns * consumers
    assert tile.stages * step + result + 16 * tile.stages < SHARED_BYTES
    assert tile.stages >= 4


@pytest.mark.parametrize(("width", "columns"), [(768, 8), (768, 64), (1408, 8), (1536, 128)])
def test_splits_leave_no_multiprocessor_much_more_to_read_than_others(width, columns):
    tile, splits = unpermuted._down_tile(columns, 2048, width)
    steps = width // 64
    blocks = 2048 // tile.block_rows * splits
    assert 2048 % tile.block_rows == 0
    assert 80 <= blocks <= products.MULTIPROCESSORS
    assert splits * -(-steps // splits) - steps <= 2


@pytest.mark.parametrize(
    ("num_tokens", "columns"), [(1, 8), (8, 8), (9, 16), (33, 64), (64, 64), (128, 128)]
)
def test_tokens_are_filled_up_to_a_power_of_two(num_tokens, columns):
    assert unpermuted._columns(num_tokens) == columns


# --- coverage ---


def lowered(call, structs):
    return jax.jit(call).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("size", "num_tokens"), SERVED, ids=lambda x: getattr(x, "name", x))
def test_kernels_take_and_lower_the_served_sizes(size, num_tokens):
    before = dict(api.experts.counts)
    case = size.case(num_tokens)
    text = lowered(functools.partial(api.experts, kernels="mosaic"), case.structs)
    assert api.experts.counts[case.form] == before.get(case.form, 0) + 1
    assert api.experts.counts["reference"] == before.get("reference", 0)
    # A warpgroup cannot share out a token of the odd size evenly: its outputs are left to XLA.
    num_permuted = 5 if size is ODD else 6
    assert text.count("mosaic_gpu_v2") == {"unpermuted": 3, "permuted": num_permuted}[case.form]
    assert not any(word in text for word in ("stablehlo.scatter", "stablehlo.sort"))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(8192, 32), (6, 64), (1, 128), (256, 128), (3, 256)]
)
def test_kernel_takes_and_lowers_every_choice(num_tokens, num_experts):
    before = api.route.counts["mosaic"]
    case = Choice(num_tokens, num_experts, 8, "sigmoid", has_bias=True)
    call = functools.partial(api.route, **case.static, kernels="mosaic")
    assert lowered(call, case.structs).count("mosaic_gpu_v2") == 1
    assert api.route.counts["mosaic"] == before + 1


DECLINED = [
    (Case("unpermuted", 3), "plain", "kernels are 'plain'"),
    (Case("unpermuted", 3, hidden_size=96), "mosaic", "hidden_size is 96, not a multiple of 64"),
    (Case("unpermuted", 3, width=32), "mosaic", "intermediate_size is 32, not a multiple of 64"),
]


@pytest.mark.parametrize(("case", "kernels", "reason"), DECLINED)
def test_declined_experts_give_their_reason_and_run_the_reference(case, kernels, reason):
    before = api.experts.counts["reference"]
    arrays = moe_cases.inputs(case)
    out = api.experts(*arrays, kernels=kernels)
    assert reason in api.experts.declined["unpermuted"]
    assert reason in api.experts.declined["permuted"]
    assert api.experts.counts["reference"] == before + 1
    assert out[0].astype(jnp.float32).tolist() == moe_cases.expected(arrays).tolist()


def test_other_dtypes_are_declined():
    structs = list(Case("unpermuted", 3).structs)
    structs[4] = jax.ShapeDtypeStruct(structs[4].shape, jnp.float32)
    for form in moe_cases.FORMS.values():
        with pytest.raises(NotImplementedError, match="are bfloat16, bfloat16 and float32"):
            jax.eval_shape(functools.partial(form, kernels="mosaic"), *structs)


def test_many_tokens_are_not_served_unpermuted():
    structs = Case("unpermuted", unpermuted.MAX_TOKENS + 1).structs
    with pytest.raises(NotImplementedError, match=f"{unpermuted.MAX_TOKENS + 1} tokens, at most"):
        jax.eval_shape(functools.partial(unpermuted.experts, kernels="mosaic"), *structs)


@pytest.mark.parametrize(
    ("case", "other", "reason"),
    [
        (Choice(4, 64, 4), {"kernels": "plain"}, "kernels are 'plain'"),
        (Choice(4, 48, 4), {}, "experts are 48, not one of"),
        (Choice(4, 64, 17), {}, "top_k is 17, at most 16"),
        (Choice(4, 64, 4), {"num_groups": 8, "top_groups": 4}, "some groups of experts"),
    ],
)
def test_declined_choice_gives_its_reason_and_runs_the_reference(case, other, reason):
    before = api.route.counts["reference"]
    api.route(*moe_cases.choice_inputs(case), **case.static | {"kernels": "mosaic"} | other)
    assert reason in api.route.declined["mosaic"]
    assert api.route.counts["reference"] == before + 1


@pytest.mark.parametrize(
    ("dtype", "other", "reason"),
    [
        ("bfloat16", {}, "logits are bfloat16"),
        ("float32", {"scoring": "tanh"}, "scoring is 'tanh'"),
    ],
)
def test_choice_of_other_scores_is_declined(dtype, other, reason):
    case = Choice(4, 64, 4)
    logits, _, is_real = case.structs
    structs = jax.ShapeDtypeStruct(logits.shape, jnp.dtype(dtype)), None, is_real
    call = functools.partial(moe_cases.route.route, **case.static | other, kernels="mosaic")
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(call, *structs)
