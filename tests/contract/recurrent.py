"""A registration of these tests: a decaying sum of embeddings, then attention with a window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import layers, registry
from models.attention import written
from models.batch import Batch
from models.cache import Cache, CacheGroup, CacheSpec, RecurrentGroup, read_states, write_states
from models.checkpoint import Leaf, Part
from models.layers import Dense, Rows, Tap, identity
from models.registry import Registration


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the toy."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    max_position_embeddings: int
    window: int
    decay: float


def parse_config(config: Mapping[str, Any]) -> Config:
    return Config(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        window=config["sliding_window"],
        decay=config["decay"],
    )


def leaves(config: Config) -> Mapping[str, Leaf]:
    vocab, size = config.vocab_size, config.hidden_size
    heads = config.num_heads * config.head_dim

    def rows(name: str) -> Leaf:
        part = Part(name, (vocab, size))
        return Leaf((vocab, size), (part,), (None, None), node=Rows, fan_in=size)

    def dense(name: str, inner: int, outer: int) -> Leaf:
        part = Part(name, (outer, inner), (), np.transpose)
        return Leaf((inner, outer), (part,), (None, None), node=Dense, fan_in=inner)

    return {
        "embed": rows("model.embed_tokens.weight"),
        "head": rows("lm_head.weight"),
        "sum": dense("model.sum.weight", size, size),
        "qkv": dense("model.attn.qkv.weight", size, 3 * heads),
        "out": dense("model.attn.out.weight", heads, size),
    }


def cache_spec(config: Config, page_size: int, dtype: str) -> CacheSpec:
    """The recurrent group first: its place among all groups is not its place among its kind."""
    states = RecurrentGroup(layers=(0,), state_shape=(config.hidden_size,), dtype="float32")
    pages = CacheGroup(
        kind="window",
        layers=(1,),
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        window=config.window,
    )
    return CacheSpec((states, pages))


def forward(
    config: Config,
    params: Mapping[str, Any],
    cache: Cache,
    token_ids: jax.Array,
    batch: Batch,
    *,
    tap: Tap = identity,
) -> tuple[jax.Array, Cache]:
    hidden = tap("embed", layers.embed(params["embed"], token_ids))
    sums, states, is_bad_state = decaying_sum(config, hidden, cache, batch)
    hidden = hidden + jnp.tanh(layers.linear(sums, params["sum"]))
    qkv = layers.linear(hidden, params["qkv"])
    q, keys, values = jnp.split(qkv.reshape(-1, 3 * config.num_heads, config.head_dim), 3, axis=1)
    queries, is_bad = written(
        q,
        keys,
        values,
        cache.pools[0][0],
        batch,
        batch.page_tables[0],
        scale=config.head_dim**-0.5,
        window=config.window,
    )
    mixed = queries.attended().reshape(hidden.shape[0], -1)
    hidden = hidden + layers.linear(mixed, params["out"])
    is_nonfinite = cache.is_nonfinite | is_bad_state | is_bad
    return tap("last", hidden), Cache(((queries.pool,),), is_nonfinite, ((states,),))


def decaying_sum(
    config: Config, embedded: jax.Array, cache: Cache, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """s[t] = decay s[t - 1] + x[t], token after token -> (f32[T, D], the pool, bool[T])."""
    (state_ids,) = batch.state_ids
    ((pool,),) = cache.states

    def one(states: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, row, is_real = token
        total = jnp.float32(config.decay) * states[row] + x
        return states.at[row].set(jnp.where(is_real, total, states[row])), total

    x = embedded.astype(jnp.float32)
    states = read_states(pool, batch, state_ids)
    states, sums = jax.lax.scan(one, states, (x, batch.rows, batch.is_real))
    pool, is_bad = write_states(pool, states, batch, state_ids)
    return sums.astype(embedded.dtype), pool, is_bad


def logits(config: Config, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
    del config
    return layers.linear(hidden, params["head"], out_dtype=jnp.dtype(jnp.float32))


REGISTRATION = Registration(
    architecture="ToyRecurrentForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=forward,
    logits=logits,
    cache_spec=cache_spec,
    example={
        "vocab_size": 131,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": 6,
        "decay": 0.75,
    },
    device_token_ids=True,
)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the registry know the toy until the patch is undone."""
    families = {**registry._FAMILIES, REGISTRATION.architecture: __name__}
    monkeypatch.setattr(registry, "_FAMILIES", families)
