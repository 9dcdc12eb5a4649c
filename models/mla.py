"""Multi-head latent attention: one latent and one rotary key per token stand for all heads' KV."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.mla import api
from models import layers
from models.attention import with_decode_rows
from models.batch import Batch
from models.cache import write_latents
from models.checkpoint import Leaf, Part
from models.layers import Dense, PerHead, Rotation, Tap, identity

PREFILL_TILE_TOKENS = 512
"""Queries of a chunk's tile in plain JAX, at least, where the chunk has them.

Every tile expands all latents before it. With DeepSeek-V2's sizes that costs as much as attending
410 queries (512 * 256 / 320): tiles of 64 would spend seven eighths of their time on it.
"""


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Sizes of one latent attention, names as in checkpoint files; the same in every layer."""

    q_lora_rank: int | None
    """Size of the queries' own latent; None: they are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Of a query or key, the part that is not rotated."""
    qk_rope_head_dim: int
    """Of a query, the rotated part; of keys there is one for all heads."""
    v_head_dim: int
    latent_norm_eps: float
    """Of the norms of both latents, whatever the other norms have."""
    scale: float
    """Multiplies the scores: qk_head_dim^-0.5, times what rope scaling asks for."""
    has_interleaved_rope: bool = True
    """The checkpoint rotates neighbours (0, 1), (2, 3); its rows are sorted into halves on load."""

    @property
    def qk_head_dim(self) -> int:
        """Of one query or expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def entry_dim(self) -> int:
        """What the cache keeps of one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class Names:
    """Checkpoint names of one layer's tensors, `{i}` standing for the layer."""

    q: str = "model.layers.{i}.self_attn.q_proj.weight"
    """Without a latent of the queries."""
    q_a: str = "model.layers.{i}.self_attn.q_a_proj.weight"
    q_a_norm: str = "model.layers.{i}.self_attn.q_a_layernorm.weight"
    q_b: str = "model.layers.{i}.self_attn.q_b_proj.weight"
    kv_a: str = "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"
    kv_a_norm: str = "model.layers.{i}.self_attn.kv_a_layernorm.weight"
    kv_b: str = "model.layers.{i}.self_attn.kv_b_proj.weight"
    o: str = "model.layers.{i}.self_attn.o_proj.weight"


def leaves(
    config: MlaConfig, hidden_size: int, num_heads: int, names: Names, i: int
) -> dict[str, Leaf]:
    """Weights of layer i's attention and the checkpoint tensors that fill them.

    `qkv_a` [D, q_lora + L + R] makes both latents and the rotary key in one product. The
    checkpoint's kv_b is stored once, as the halves `k_up` [N, nope, L] and `v_up` [N, V, L]:
    chunks expand latents by both, which copies neither when L comes last.
    """
    c, d, n = config, hidden_size, num_heads
    heads_out = n * c.v_head_dim
    q_name, q_in = (names.q, d) if c.q_lora_rank is None else (names.q_b, c.q_lora_rank)
    q_part = Part(q_name.format(i=i), (n * c.qk_head_dim, q_in), (), _arrange_q(c, n))
    return {
        "qkv_a": _qkv_a_leaf(c, d, names, i),
        "q": Leaf(
            shape=(q_in, n, c.qk_head_dim),
            parts=(q_part,),
            partition=(None, "tensor", None),
            node=Dense,
            fan_in=q_in,
        ),
        "k_up": _up_leaf(c, n, names, i, is_key=True),
        "v_up": _up_leaf(c, n, names, i, is_key=False),
        "o": Leaf(
            shape=(heads_out, d),
            parts=(Part(names.o.format(i=i), (d, heads_out), (), np.transpose),),
            partition=("tensor", None),
            node=Dense,
            fan_in=heads_out,
        ),
    }


def _qkv_a_leaf(c: MlaConfig, hidden_size: int, names: Names, i: int) -> Leaf:
    q_rank = c.q_lora_rank or 0

    def arrange_kv(stored: np.ndarray) -> np.ndarray:
        return _halved(c, stored, axis=0).T

    size = q_rank + c.entry_dim
    kv = Part(
        names.kv_a.format(i=i),
        (c.entry_dim, hidden_size),
        (slice(None), slice(q_rank, size)),
        arrange_kv,
    )
    q = Part(
        names.q_a.format(i=i), (q_rank, hidden_size), (slice(None), slice(q_rank)), np.transpose
    )
    return Leaf(
        shape=(hidden_size, size),
        parts=(q, kv) if q_rank else (kv,),
        partition=(None, None),
        node=Dense,
        fan_in=hidden_size,
    )


def _up_leaf(c: MlaConfig, num_heads: int, names: Names, i: int, *, is_key: bool) -> Leaf:
    """One half of kv_b, whose rows are per head those of the key, then those of the value."""
    rows = c.qk_nope_head_dim + c.v_head_dim
    stored_shape = (num_heads * rows, c.kv_lora_rank)

    def arrange(stored: np.ndarray) -> np.ndarray:
        heads = stored.reshape(num_heads, rows, c.kv_lora_rank)
        nope = c.qk_nope_head_dim
        return heads[:, :nope] if is_key else heads[:, nope:]

    return Leaf(
        shape=(num_heads, c.qk_nope_head_dim if is_key else c.v_head_dim, c.kv_lora_rank),
        parts=(Part(names.kv_b.format(i=i), stored_shape, (), arrange),),
        partition=("tensor", None, None),
        node=PerHead if is_key else functools.partial(PerHead, output_major=True),
        fan_in=c.kv_lora_rank,
    )


def _arrange_q(c: MlaConfig, num_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    def arrange(stored: np.ndarray) -> np.ndarray:
        heads = stored.reshape(num_heads, c.qk_head_dim, stored.shape[1])
        return np.moveaxis(_halved(c, heads, axis=1), -1, 0)

    return arrange


def _halved(c: MlaConfig, stored: np.ndarray, axis: int) -> np.ndarray:
    """The last qk_rope_head_dim rows along an axis in the order that `layers.rotate` turns.

    Scores are the same in any order that queries and keys share.
    """
    if not c.has_interleaved_rope:
        return stored
    size, rope = stored.shape[axis], c.qk_rope_head_dim
    pairs = np.arange(size - rope, size).reshape(-1, 2)
    order = np.concatenate([np.arange(size - rope), pairs[:, 0], pairs[:, 1]])
    return np.take(stored, order, axis=axis)


def vector_parts(config: MlaConfig, names: Names) -> Mapping[str, tuple[int, str]]:
    """The norms' scales by name: their size and the checkpoint tensor, `{i}` for the layer."""
    parts = {"kv_a_norm": (config.kv_lora_rank, names.kv_a_norm)}
    if config.q_lora_rank is not None:
        parts["q_a_norm"] = (config.q_lora_rank, names.q_a_norm)
    return parts


def attention(
    config: MlaConfig,
    weights: Mapping[str, Any],
    vectors: Mapping[str, jax.Array],
    x: jax.Array,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    page_table: jax.Array,
    *,
    tap: Tap = identity,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends each new token to its request's latents, this step's included.

    A tap sees and may change `q` [T, N, nope + R], rotated, and `latent` [T, L + R], which goes
    into the cache.

    Args:
      config: sizes.
      weights: of the layer, see `leaves`.
      vectors: scales of the layer's norms, see `vector_parts`.
      x: [T, D], normed.
      pool: [P, page_size, L + R].
      turn: of the step's positions, for R dimensions.
      batch: lengths and rows of the step.
      page_table: i32[B, W] of the layer's group.
      tap: static observer.

    Returns:
      Parts [S, T, D] of the output, the pool with this step's tokens, and bool[T] where an entry
      was not finite.
    """
    c, kernels = config, batch.tiling.kernels
    q_a, latent, k_rope = jnp.split(
        layers.linear(x, weights["qkv_a"], kernels=kernels),
        [c.q_lora_rank or 0, (c.q_lora_rank or 0) + c.kv_lora_rank],
        axis=-1,
    )
    if c.q_lora_rank is not None:
        x = layers.rms_norm(q_a, vectors["q_a_norm"], c.latent_norm_eps)
    q = layers.linear(x, weights["q"], kernels=kernels)  # [T, N, nope + R]
    q_nope, q_rope = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    q = tap("q", jnp.concatenate([q_nope, layers.rotate(q_rope, turn)], axis=-1))
    latent = layers.rms_norm(latent, vectors["kv_a_norm"], c.latent_norm_eps)
    entries = tap("latent", jnp.concatenate([latent, layers.rotate(k_rope, turn)], axis=-1))
    pool, is_bad = write_latents(pool, entries, batch, page_table)
    # The flags are wanted at the step's end alone. Without the barrier they are made there, and
    # every layer's projection stays in memory until then: 17 MB of DeepSeek-V2-Lite, 27 times.
    q, is_bad = jax.lax.optimization_barrier((q, is_bad))
    out = attend(c, weights["k_up"], weights["v_up"], q, pool, batch, page_table)
    return weights["o"].parts(out.reshape(out.shape[0], -1), kernels), pool, is_bad


def attend(
    config: MlaConfig,
    k_up: PerHead,
    v_up: PerHead,
    q: jax.Array,
    pool: jax.Array,
    batch: Batch,
    page_table: jax.Array,
) -> jax.Array:
    """q [T, N, nope + R] against pages that hold this step's entries -> [T, N, V], 0 for padding.

    Decode rows stay in latents, chunks expand them.
    """
    num_tokens, num_heads, _ = q.shape
    tiling = batch.tiling
    look = {
        "scale": config.scale,
        "block_pages": tiling.block_pages,
        "block_bytes": tiling.block_bytes,
        "kernels": tiling.kernels,
    }

    def attend_rows(num_rows: int, query_len: int, kv_lens: jax.Array) -> jax.Array:
        """The leading rows, all of one length: [num_rows * query_len, N, V]."""
        count = num_rows * query_len
        q_nope, q_rope = jnp.split(q[:count], [config.qk_nope_head_dim], axis=-1)
        rows = (num_rows, query_len, num_heads)
        out = api.decode(
            layers.linear(q_nope, k_up).reshape(*rows, -1),
            q_rope.reshape(*rows, -1),
            pool,
            page_table[:num_rows],
            batch.positions[:count].reshape(num_rows, query_len),
            kv_lens,
            **look,
        )
        return layers.linear(out.reshape(count, num_heads, -1), v_up)

    if batch.is_decode:
        num_rows = batch.kv_lens.shape[0]
        assert num_rows * batch.query_len == num_tokens
        return attend_rows(num_rows, batch.query_len, batch.kv_lens)
    out = api.prefill(
        q,
        k_up.kernel,
        v_up.kernel,
        pool,
        page_table,
        batch.positions,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.num_decode,
        tile_tokens=max(tiling.tile_tokens, PREFILL_TILE_TOKENS),
        max_chunk_rows=batch.max_chunk_rows,
        **look,
    )

    def decode_rows(num_rows: int, kv_lens: jax.Array) -> jax.Array:
        return attend_rows(num_rows, 1, kv_lens)

    return with_decode_rows(out, batch, decode_rows, has_branch=True)
