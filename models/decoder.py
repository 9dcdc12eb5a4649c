"""The decoder behind Llama, Mistral, InternLM2, Qwen3 and Qwen3-MoE: caches, layers, logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.qkv.reference import turned
from kernels.tuning import TUNING, Table
from models import attention, layers, mla, mlp, moe
from models.batch import Batch
from models.cache import Cache, CacheGroup, CacheSpec, LatentGroup
from models.decoder_config import DecoderConfig
from models.decoder_weights import layer_vectors, vector_layout
from models.layers import Rotation, Tap, identity
from models.stream import Stream


def cache_spec(config: DecoderConfig, page_size: int, dtype: str) -> CacheSpec:
    """One group for all layers."""
    if config.mla is not None:
        latents = LatentGroup(
            layers=tuple(range(config.num_layers)),
            entry_dim=config.mla.entry_dim,
            page_size=page_size,
            dtype=dtype,
        )
        return CacheSpec(groups=(latents,))
    return CacheSpec(
        groups=(
            CacheGroup(
                kind="kv" if config.sliding_window is None else "window",
                layers=tuple(range(config.num_layers)),
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=page_size,
                dtype=dtype,
                window=config.sliding_window,
            ),
        )
    )


def forward(
    config: DecoderConfig,
    params: Mapping[str, Any],
    cache: Cache,
    token_ids: jax.Array,
    batch: Batch,
    *,
    tap: Tap = identity,
) -> tuple[jax.Array, Cache]:
    """Embeds i32[T] ids and runs every layer over the paged cache -> normed hidden [T, D].

    Embeddings that the batch carries stand in for those of the ids, which are not read then.
    """
    embedded = batch.embeddings
    if embedded is None:
        embedded = layers.embed(params["embed"], token_ids)
    hidden = tap("embed", embedded)
    turn = layers.rotation(config.rope, batch.positions)
    is_nonfinite = cache.is_nonfinite
    pools = []
    update = None
    for i in range(config.num_layers):
        hidden, update, pool, is_bad = _layer(
            config,
            i in config.moe_layers,
            params["layers"][str(i)],
            hidden,
            update,
            cache.pools[0][i],
            turn,
            batch,
            None if tap is identity else functools.partial(_tap_layer, tap, i),
        )
        pools.append(pool)
        is_nonfinite = jnp.logical_or(is_nonfinite, is_bad)
    _, normed = _stream(config, hidden, update, params["norm"], 0, batch).normed()
    return tap("norm", normed), Cache(pools=(tuple(pools),), is_nonfinite=is_nonfinite)


def _tap_layer(tap: Tap, layer: int, name: str, x: jax.Array) -> jax.Array:
    return tap(f"layers.{layer}.{name}", x)


def _layer(
    config: DecoderConfig,
    is_moe: bool,
    weights: Mapping[str, Any],
    hidden: jax.Array,
    update: jax.Array | None,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    tap: Tap | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """One layer: an inner jit, so that layers of a kind trace once; a tapped one, in line.

    The residual stream is what was added up and what the last MLP adds, which the next norm does:
    one kernel for both. A tap sees sums, so there nothing is left to add.
    """
    if tap is None:
        table = TUNING.in_force()
        return _traced_layer(table, config, is_moe, weights, hidden, update, pool, turn, batch)
    return _layer_body(config, is_moe, weights, hidden, update, pool, turn, batch, tap)


def _layer_body(
    config: DecoderConfig,
    is_moe: bool,
    weights: Mapping[str, Any],
    hidden: jax.Array,
    update: jax.Array | None,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    tap: Tap = identity,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    flat = weights["vectors"]
    vectors, places = layer_vectors(config, flat), vector_layout(config)
    with jax.named_scope("attention"):
        stream = _stream(config, hidden, update, flat, places["input_norm"][0], batch)
        hidden, update, pool, is_bad = _attention(
            config, weights, vectors, stream, pool, turn, batch, tap
        )
        if tap is not identity:
            hidden, update = tap("attention", hidden + layers.summed(update, hidden.dtype)), None
    with jax.named_scope("mlp"):
        stream = _stream(config, hidden, update, flat, places["post_norm"][0], batch)
        hidden, update = _mlp(config, is_moe, weights, vectors, stream, batch, tap)
        if tap is not identity:
            hidden, update = tap("mlp", hidden + layers.summed(update, hidden.dtype)), None
    return hidden, update, pool, is_bad


def _stream(
    config: DecoderConfig,
    hidden: jax.Array,
    update: jax.Array | None,
    vectors: jax.Array,
    scale_at: int,
    batch: Batch,
) -> Stream:
    kernels = batch.tiling.kernels
    return Stream(hidden, update, vectors, scale_at, config.rms_norm_eps, kernels)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _traced_layer(table: Table, config: DecoderConfig, is_moe: bool, *arrays: Any) -> Any:
    """Kernels inside look their choices up in the table in force: it tells traces apart."""
    del table
    return _layer_body(config, is_moe, *arrays)


def _attention(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    vectors: Mapping[str, jax.Array],
    stream: Stream,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    tap: Tap,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sum [T, D] of the stream, parts [S, T, D] of the update, the pool, what was not finite."""
    if config.mla is not None:
        hidden, x = stream.normed()
        table = batch.page_tables[0]
        found = mla.attention(config.mla, weights, vectors, x, pool, turn, batch, table, tap=tap)
        return hidden, *found
    hidden, _, qkv = stream.times(weights["qkv"], "product")  # [T, K, G + 2, H]
    if "qkv_bias" in vectors:
        qkv = qkv + vectors["qkv_bias"][None]
    table, eps = batch.page_tables[0], config.rms_norm_eps
    look = {"scale": config.head_dim**-0.5, "window": config.sliding_window}
    if tap is identity:
        # A kernel reads the scales where they lie: a slice of its own would cost another kernel.
        scales_at, _ = vector_layout(config).get("qk_norm", (0, ()))
        flat = weights["vectors"] if config.qk_norm else None
        queries, is_bad = attention.prepared(
            qkv,
            turn,
            flat,
            pool,
            batch,
            table,
            scales_at=scales_at,
            eps=eps,
            **look,
        )
    else:
        # What a tap sees or changes lies between the steps of the operation above.
        q, keys, values = turned(qkv, turn.cos, turn.sin, vectors.get("qk_norm"), eps)
        queries, is_bad = attention.written(
            tap("q", q), tap("k", keys), tap("v", values), pool, batch, table, **look
        )
    if "o_bias" not in vectors:
        return hidden, queries.times(weights["o"]), queries.pool, is_bad
    out = queries.attended().reshape(hidden.shape[0], -1)
    out = layers.linear(out, weights["o"], kernels=stream.kernels) + vectors["o_bias"][None]
    return hidden, out[None], queries.pool, is_bad


def _mlp(
    config: DecoderConfig,
    is_moe: bool,
    weights: Mapping[str, Any],
    vectors: Mapping[str, jax.Array],
    stream: Stream,
    batch: Batch,
    tap: Tap,
) -> tuple[jax.Array, jax.Array]:
    """Sum [T, D] of the stream and parts [S, T, D] of the update."""
    if is_moe:
        assert config.moe is not None
        return moe.mlp(config.moe, weights, stream, batch, tap=tap)
    return mlp.normed_and_gated(
        stream,
        weights["gate_up"],
        weights["down"],
        gate_up_bias=vectors.get("gate_up_bias"),
        down_bias=vectors.get("down_bias"),
    )


def logits(config: DecoderConfig, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
    """hidden [R, D] -> f32[R, V]; tied models read the embedding table."""
    table = params["embed"] if config.tie_word_embeddings else params["head"]
    return layers.linear(hidden, table, out_dtype=jnp.dtype(jnp.float32))
