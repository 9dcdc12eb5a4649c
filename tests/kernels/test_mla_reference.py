"""Attention over latents in plain JAX against a dense softmax over expanded keys and values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.mla import api, reference

HEADS, NOPE, ROPE, LATENT, VALUE, PAGE = 3, 6, 4, 8, 10, 4
SCALE = 0.4
STATIC = ("scale", "block_pages", "block_bytes")
decode = jax.jit(reference.decode, static_argnames=STATIC)
prefill = jax.jit(reference.prefill, static_argnames=(*STATIC, "tile_tokens", "max_chunk_rows"))
# Float32 sums over at most 20 keys against float64; absorbed ones add up in another order.
close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=5e-6)


class Scene:
    """Rows of some length whose last tokens are queries; pages are shuffled, unused ones trash."""

    def __init__(self, lengths: list[int], query_lens: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        self.lengths, self.query_lens = np.array(lengths), np.array(query_lens)
        counts = -(-self.lengths // PAGE)
        pages = 1 + rng.permutation(counts.sum())
        self.table = np.zeros((len(lengths), 5), np.int32)
        for row, (start, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
            self.table[row, :count] = pages[start : start + count]
        self.pool = normal(counts.sum() + 1, PAGE, LATENT + ROPE)
        self.k_up, self.v_up = normal(HEADS, NOPE, LATENT), normal(HEADS, VALUE, LATENT)
        self.q = normal(self.query_lens.sum(), HEADS, NOPE + ROPE)
        self.positions = np.concatenate(
            [np.arange(n - q, n) for n, q in zip(lengths, query_lens, strict=True)]
        ).astype(np.int32)

    @property
    def rows(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.query_lens)

    def dense(self) -> np.ndarray:
        """Each query alone, in float64: [T, N, V]."""
        out = np.zeros((len(self.q), HEADS, VALUE))
        for token, (row, position) in enumerate(zip(self.rows, self.positions, strict=True)):
            entries = self.pool[self.table[row]].reshape(-1, LATENT + ROPE)[: position + 1]
            latents, rope = np.split(entries.astype(np.float64), [LATENT], axis=1)
            for head in range(HEADS):
                keys = np.concatenate([latents @ self.k_up[head].T, rope], axis=1)
                scores = keys @ self.q[token, head] * SCALE
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ (latents @ self.v_up[head].T) / weights.sum()
        return out

    def decode(self, block_pages: int = 16, block_bytes: int = 2**20) -> np.ndarray:
        """Rows of one query length, absorbed: [R, Q, N, L]."""
        q = self.q.reshape(len(self.lengths), -1, HEADS, NOPE + ROPE)
        q_latent = np.einsum("RQNH,NHL->RQNL", q[..., :NOPE], self.k_up)
        out = decode(
            q_latent,
            q[..., NOPE:],
            self.pool,
            self.table,
            self.positions.reshape(q.shape[:2]),
            self.lengths.astype(np.int32),
            scale=SCALE,
            block_pages=block_pages,
            block_bytes=block_bytes,
        )
        return np.asarray(out)

    def valued(self, block_pages: int = 16) -> np.ndarray:
        """The same times v_up: [T, N, V]."""
        out = self.decode(block_pages).reshape(-1, HEADS, LATENT)
        return np.einsum("TNL,NVL->TNV", out, self.v_up)

    def prefill(self, num_decode: int = 0, padding: int = 3, **tiling: int) -> np.ndarray:
        """Padded by some tokens and one row."""
        defaults = {"block_pages": 16, "block_bytes": 2**20, "tile_tokens": 8}
        out = prefill(
            np.pad(self.q, ((0, padding), (0, 0), (0, 0))),
            self.k_up,
            self.v_up,
            self.pool,
            np.pad(self.table, ((0, 1), (0, 0))),
            np.pad(self.positions, (0, padding)),
            np.pad(self.lengths, (0, 1)).astype(np.int32),
            np.cumsum([0, *self.query_lens, 0]).astype(np.int32),
            np.int32(num_decode),
            scale=SCALE,
            max_chunk_rows=len(self.lengths),
            **(defaults | tiling),
        )
        return np.asarray(out)


@pytest.mark.parametrize("block_pages", [1, 2, 16])
def test_absorbed_decode_matches_dense_softmax_for_ragged_rows(block_pages):
    scene = Scene([1, 4, 5, 11, 20], [1] * 5)
    close(scene.valued(block_pages), scene.dense())


def test_absorbed_decode_of_several_queries_is_causal_among_them():
    scene = Scene([3, 9, 17], [3] * 3)
    close(scene.valued(block_pages=2), scene.dense())


@pytest.mark.parametrize(
    "tiling",
    [
        {"block_pages": 16, "tile_tokens": 64},
        {"block_pages": 1, "tile_tokens": 4},
        {"block_pages": 2, "tile_tokens": 3},
    ],
    ids=str,
)
def test_prefill_matches_dense_softmax_for_chunks_after_a_cached_prefix(tiling):
    scene = Scene([1, 6, 9, 20], [1, 6, 2, 7])
    out = scene.prefill(**tiling)
    close(out[:16], scene.dense())
    assert not out[16:].any()


def test_absorbed_and_expanded_agree_on_the_same_queries():
    scene = Scene([4, 9, 20], [4] * 3)
    close(scene.valued(), scene.prefill()[:12])


def test_prefill_leaves_decode_rows_at_zero():
    scene = Scene([8, 9, 20], [1, 1, 7])
    out = scene.prefill(num_decode=2)
    assert not out[:2].any()
    close(out[2:9], scene.dense()[2:])


def test_padding_row_of_a_decode_step_is_zero():
    scene = Scene([5, 9], [1, 1])
    scene.lengths[0] = 0
    out = scene.decode(block_pages=1)
    assert not out[0].any() and out[1].any()


def test_block_bytes_bound_the_pages_that_are_gathered():
    scene = Scene([1, 7, 20], [1] * 3)
    page_bytes = 3 * scene.pool[0].nbytes
    np.testing.assert_array_equal(
        scene.decode(block_bytes=2 * page_bytes), scene.decode(block_pages=2)
    )
    np.testing.assert_array_equal(scene.decode(block_bytes=1), scene.decode(block_pages=1))


def test_block_bytes_bound_the_pages_that_are_expanded():
    scene = Scene([1, 6, 9, 20], [1, 6, 2, 7])
    # Keys and values, and a score and a weight of each of 8 queries, all float32.
    page_bytes = PAGE * HEADS * 4 * (NOPE + ROPE + VALUE + 2 * 8)
    two = scene.prefill(block_pages=2)
    assert (two != scene.prefill(block_pages=1)).any()
    np.testing.assert_array_equal(scene.prefill(block_bytes=2 * page_bytes), two)
    np.testing.assert_array_equal(
        scene.prefill(block_bytes=2 * page_bytes - 1), scene.prefill(block_pages=1)
    )


def test_every_decode_row_equals_its_solo_run():
    scene = Scene([1, 4, 5, 11, 20], [1] * 5)
    together = scene.decode(block_pages=2)
    for row in range(5):
        solo = Scene([1, 4, 5, 11, 20], [1] * 5)
        solo.lengths = solo.lengths * (np.arange(5) == row)
        np.testing.assert_array_equal(solo.decode(block_pages=2)[row], together[row])


def test_every_chunk_equals_its_solo_run():
    scene = Scene([1, 6, 9, 20], [1, 6, 2, 7])
    together = scene.prefill(block_pages=2)
    starts = np.cumsum([0, 1, 6, 2, 7])
    for row in range(4):
        solo = Scene([1, 6, 9, 20], [1, 6, 2, 7])
        here = slice(starts[row], starts[row + 1])
        solo.q, solo.positions = solo.q[here], solo.positions[here]
        solo.table, solo.lengths = solo.table[[row]], solo.lengths[[row]]
        solo.query_lens = solo.query_lens[[row]]
        out = solo.prefill(block_pages=2, padding=19 - len(solo.q))
        np.testing.assert_array_equal(out[: len(solo.q)], together[here])


def test_where_a_prompt_is_cut_into_chunks_changes_no_bit():
    whole = Scene([20], [20])
    together = whole.prefill(block_pages=2)
    for start, end in ((0, 7), (7, 8), (8, 20)):
        part = Scene([20], [20])
        part.q, part.positions = part.q[start:end], part.positions[start:end]
        part.lengths, part.query_lens = np.array([end]), np.array([end - start])
        out = part.prefill(block_pages=2, padding=23 - (end - start))
        np.testing.assert_array_equal(out[: end - start], together[start:end])


def test_entry_that_is_nan_stays_visible_in_the_rows_that_see_it():
    scene = Scene([6, 9], [1, 1])
    scene.pool[scene.table[0, 0]] = np.nan
    for out in (scene.decode(block_pages=1), scene.prefill(block_pages=1)[:2]):
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_store_keeps_the_pool_finite_and_tells_which_tokens_were_not():
    pool = jnp.full((3, PAGE, 4), 7.0)
    entries = np.arange(12, dtype=np.float32).reshape(3, 4)
    entries[1, 2], entries[2, 0] = np.nan, np.inf
    pages, offsets = np.array([2, 2, 1], np.int32), np.array([0, 3, 1], np.int32)
    after, is_bad = reference.store(pool, jnp.asarray(entries), pages, offsets)
    assert is_bad.tolist() == [False, True, True]
    assert after[2, 0].tolist() == [0, 1, 2, 3]
    assert after[2, 3].tolist() == [4, 5, 0, 7]
    assert after[1, 1].tolist() == [0, 9, 10, 11]
    assert int((after != 7).any(axis=-1).sum()) == 3


def test_api_counts_the_implementation_that_ran():
    scene = Scene([4, 9], [1, 1])
    before = api.decode.counts["reference"]
    q = jnp.zeros((2, 1, HEADS, LATENT)), jnp.zeros((2, 1, HEADS, ROPE))
    rest = (scene.pool, scene.table, scene.positions[:, None], scene.lengths.astype(np.int32))
    how = {"scale": SCALE, "block_pages": 2, "block_bytes": 2**20, "kernels": "plain"}
    jax.eval_shape(functools.partial(api.decode, **how), *q, *rest)
    assert api.decode.counts["reference"] == before + 1


def temporary_bytes(function, *shapes: tuple[tuple[int, ...], str], **static: object) -> int:
    abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    lowered = jax.jit(functools.partial(function, **static)).lower(*abstract)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_temporaries_at_the_sizes_of_deepseek_v2_lite_stay_near_block_bytes():
    """2,048 tokens over 8,192 of context; float32, since a CPU widens bfloat16 operands."""
    tokens, num_heads, rows, context, page = 2048, 16, 17, 8192, 64
    width, block_bytes = context // page, 2**28
    used = temporary_bytes(
        reference.prefill,
        ((tokens, num_heads, 192), "float32"),
        ((num_heads, 128, 512), "float32"),
        ((num_heads, 128, 512), "float32"),
        ((width + 1, page, 576), "float32"),
        ((rows, width), "int32"),
        ((tokens,), "int32"),
        ((rows,), "int32"),
        ((rows + 1,), "int32"),
        ((), "int32"),
        scale=0.1,
        block_pages=128,
        block_bytes=block_bytes,
        tile_tokens=512,
        max_chunk_rows=16,
    )
    # The output itself is 16 MiB; scores and weights of one block are most of the rest.
    assert block_bytes / 4 < used < 2 * block_bytes
