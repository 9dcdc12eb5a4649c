"""The dense decoder behind Llama, Mistral, InternLM2 and Qwen3: config, weights, forward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.qkv.reference import turned
from models import layers
from models.attention import attend, attend_projected
from models.batch import Batch
from models.cache import Cache, CacheGroup, CacheSpec
from models.checkpoint import Leaf, Part
from models.layers import Dense, RopeConfig, Rotation, Rows, Tap, identity


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one dense decoder, names as in checkpoint files."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads


EXAMPLE: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""A small config of any dense family, its architecture name aside."""


def parse_config(config: Mapping[str, Any], **switches: Any) -> DecoderConfig:
    """Reads the fields that all dense families share; `switches` are a family's own.

    Raises:
      ValueError: a field is missing, of the wrong type, or asks for what the decoder does not do.
    """
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}; this decoder has silu only")
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    hidden_size = _size(config, "hidden_size")
    head_dim = _size(config, "head_dim", hidden_size // num_heads)
    max_positions = _size(config, "max_position_embeddings")
    return DecoderConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config, head_dim, max_positions),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **switches,
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name} is {value!r}, it must be a positive integer")
    return value


def parse_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling` (`type` or `rope_type`), or newer `rope_parameters`.

    Raises:
      ValueError: for a scaling kind this decoder does not do.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind in ("default", "dynamic"):
        # Dynamic scaling changes only lengths past max_position_embeddings, which are refused.
        return RopeConfig(theta=theta, head_dim=head_dim)
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"rope scaling {kind!r} is not supported; known: default, dynamic, linear, llama3"
        )
    if "factor" not in scaling:
        raise ValueError(f"rope scaling {kind!r} has no 'factor'; add it to config.json")
    return RopeConfig(
        theta=theta,
        head_dim=head_dim,
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_length=int(scaling.get("original_max_position_embeddings", max_positions)),
    )


@functools.cache
def vector_layout(config: DecoderConfig) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Where each small vector of a layer (norm scales, biases) lies: name -> (offset, shape).

    They share one array per layer, so that a program has few arguments. One array for all layers
    would be cut at other places in every layer, and no two layers could share a compiled kernel:
    twice the compile time (16 layers of Qwen3-8B for an H200: 8.4 against 17 s).
    """
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (c.hidden_size,),
        "post_norm": (c.hidden_size,),
    }
    if c.qk_norm:
        # One scale per head of a group, queries first: they are normalised together.
        shapes["qk_norm"] = (c.group + 1, c.head_dim)
    if c.qkv_bias:
        shapes["qkv_bias"] = (c.num_kv_heads, c.group + 2, c.head_dim)
    if c.output_bias:
        shapes["o_bias"] = (c.hidden_size,)
    if c.mlp_bias:
        shapes |= {"gate_up_bias": (2, c.intermediate_size), "down_bias": (c.hidden_size,)}
    offsets = itertools.accumulate((math.prod(x) for x in shapes.values()), initial=0)
    return {name: (o, shape) for (name, shape), o in zip(shapes.items(), offsets, strict=False)}


def layer_vectors(config: DecoderConfig, vectors: jax.Array) -> dict[str, jax.Array]:
    """Static views of one layer's small vectors, by name."""
    return {
        name: jax.lax.slice(vectors, (offset,), (offset + math.prod(shape),)).reshape(shape)
        for name, (offset, shape) in vector_layout(config).items()
    }


@dataclasses.dataclass(frozen=True)
class Names:
    """Checkpoint names of one layer's tensors, `{i}` standing for the layer."""

    input_norm: str = "model.layers.{i}.input_layernorm.weight"
    post_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    q: str = "model.layers.{i}.self_attn.q_proj"
    k: str = "model.layers.{i}.self_attn.k_proj"
    v: str = "model.layers.{i}.self_attn.v_proj"
    o: str = "model.layers.{i}.self_attn.o_proj"
    q_norm: str = "model.layers.{i}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{i}.self_attn.k_norm.weight"
    gate: str = "model.layers.{i}.mlp.gate_proj"
    up: str = "model.layers.{i}.mlp.up_proj"
    down: str = "model.layers.{i}.mlp.down_proj"
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    fused_qkv: str | None = None
    """One tensor with rows [kv head][its q heads, k, v][head_dim] instead of q, k and v."""


def leaves(config: DecoderConfig, names: Names) -> dict[str, Leaf]:
    """Every parameter of the decoder and the checkpoint tensors that fill it."""
    c = config
    result = {
        "embed": Leaf(
            shape=(c.vocab_size, c.hidden_size),
            parts=(Part(names.embed, (c.vocab_size, c.hidden_size), ()),),
            partition=("tensor", None),
            node=Rows,
            fan_in=c.hidden_size,
        ),
        "norm": Leaf(
            shape=(c.hidden_size,),
            parts=(Part(names.norm, (c.hidden_size,), ()),),
            partition=(None,),
        ),
    }
    if not c.tie_word_embeddings:
        result["head"] = Leaf(
            shape=(c.vocab_size, c.hidden_size),
            parts=(Part(names.head, (c.vocab_size, c.hidden_size), ()),),
            partition=("tensor", None),
            node=Rows,
            fan_in=c.hidden_size,
        )
    for i in range(c.num_layers):
        result |= {f"layers.{i}.{path}": leaf for path, leaf in _layer_leaves(c, names, i).items()}
    return result


def _layer_leaves(c: DecoderConfig, names: Names, i: int) -> dict[str, Leaf]:
    d, f, heads = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim

    def weight(name: str) -> str:
        return f"{name.format(i=i)}.weight"

    return {
        "qkv": Leaf(
            shape=(d, c.num_kv_heads, c.group + 2, c.head_dim),
            parts=_qkv_parts(c, names, i, "weight"),
            partition=(None, "tensor", None, None),
            node=Dense,
            fan_in=d,
        ),
        "o": Leaf(
            shape=(heads, d),
            parts=(Part(weight(names.o), (d, heads), (), np.transpose),),
            partition=("tensor", None),
            node=Dense,
            fan_in=heads,
        ),
        "gate_up": Leaf(
            shape=(d, 2, f),
            parts=tuple(
                Part(weight(name), (f, d), (slice(None), half), np.transpose)
                for half, name in enumerate((names.gate, names.up))
            ),
            partition=(None, None, "tensor"),
            node=Dense,
            fan_in=d,
        ),
        "down": Leaf(
            shape=(f, d),
            parts=(Part(weight(names.down), (d, f), (), np.transpose),),
            partition=("tensor", None),
            node=Dense,
            fan_in=f,
        ),
        "vectors": _vectors_leaf(c, names, i),
    }


def _qkv_parts(c: DecoderConfig, names: Names, i: int, kind: str) -> tuple[Part, ...]:
    """Parts of [D, K, G + 2, H] (kind `weight`) or of the bias [K, G + 2, H] (kind `bias`)."""
    rest = (c.hidden_size,) if kind == "weight" else ()
    lead = (slice(None),) * (len(rest) + 1)

    def arrange(x: np.ndarray, heads: int) -> np.ndarray:
        x = x.reshape(c.num_kv_heads, heads, c.head_dim, *rest)
        return np.moveaxis(x, -1, 0) if rest else x

    if names.fused_qkv is not None:
        rows = c.num_kv_heads * (c.group + 2) * c.head_dim
        fused = f"{names.fused_qkv.format(i=i)}.{kind}"
        return (Part(fused, (rows, *rest), (), functools.partial(arrange, heads=c.group + 2)),)
    places = (
        (names.q, c.group, slice(0, c.group)),
        (names.k, 1, c.group),
        (names.v, 1, c.group + 1),
    )
    return tuple(
        Part(
            f"{name.format(i=i)}.{kind}",
            (c.num_kv_heads * heads * c.head_dim, *rest),
            (*lead, place),
            _squeezed(functools.partial(arrange, heads=heads), isinstance(place, int), len(lead)),
        )
        for name, heads, place in places
    )


def _squeezed(arrange: Any, squeeze: bool, axis: int) -> Any:
    """Drops the head axis of a part that fills one index of it."""
    return (lambda x: arrange(x).squeeze(axis)) if squeeze else arrange


def _vectors_leaf(c: DecoderConfig, names: Names, i: int) -> Leaf:
    parts: list[Part] = []
    size = 0
    for name, (offset, shape) in vector_layout(c).items():
        parts += _vector_parts(c, names, i, name)
        size = offset + math.prod(shape)
    return Leaf(shape=(size,), parts=tuple(parts), partition=(None,))


def _vector_parts(c: DecoderConfig, names: Names, i: int, vector: str) -> list[Part]:
    offset, shape = vector_layout(c)[vector]
    if vector == "qkv_bias":
        return _flat_qkv_bias(c, names, i, offset)
    if vector == "qk_norm":
        h = c.head_dim
        return [
            Part(name.format(i=i), (h,), (slice(offset + head * h, offset + head * h + h),))
            for head, name in enumerate((names.q_norm,) * c.group + (names.k_norm,))
        ]
    if vector == "gate_up_bias":
        f = c.intermediate_size
        return [
            Part(
                f"{name.format(i=i)}.bias", (f,), (slice(offset + half * f, offset + half * f + f),)
            )
            for half, name in enumerate((names.gate, names.up))
        ]
    name = {
        "input_norm": names.input_norm,
        "post_norm": names.post_norm,
        "o_bias": names.o + ".bias",
        "down_bias": names.down + ".bias",
    }[vector]
    return [Part(name.format(i=i), shape, (slice(offset, offset + math.prod(shape)),))]


def _flat_qkv_bias(c: DecoderConfig, names: Names, i: int, offset: int) -> list[Part]:
    """Parts that lay q, k and v biases out as [K, G + 2, H] inside the flat array."""
    if names.fused_qkv is not None:
        rows = c.num_kv_heads * (c.group + 2) * c.head_dim
        return [
            Part(f"{names.fused_qkv.format(i=i)}.bias", (rows,), (slice(offset, offset + rows),))
        ]
    parts = []
    for name, first, heads in (
        (names.q, 0, c.group),
        (names.k, c.group, 1),
        (names.v, c.group + 1, 1),
    ):
        for k in range(c.num_kv_heads):
            start = offset + (k * (c.group + 2) + first) * c.head_dim
            rows = heads * c.head_dim
            parts.append(
                Part(
                    f"{name.format(i=i)}.bias",
                    (c.num_kv_heads * rows,),
                    (slice(start, start + rows),),
                    functools.partial(_rows_of, start=k * rows, count=rows),
                )
            )
    return parts


def _rows_of(x: np.ndarray, start: int, count: int) -> np.ndarray:
    return x[start : start + count]


def ignores(config: DecoderConfig, name: str, names: Names) -> bool:
    """Old rotary tables, and the stored copy of the embedding that some tied checkpoints carry."""
    is_tied_head = config.tie_word_embeddings and name == names.head
    return is_tied_head or name.endswith("rotary_emb.inv_freq")


def cache_spec(config: DecoderConfig, page_size: int, dtype: str) -> CacheSpec:
    """One group for all layers."""
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
    for i in range(config.num_layers):
        hidden, pool, is_bad = _layer(
            config,
            params["layers"][str(i)],
            hidden,
            cache.pools[0][i],
            turn,
            batch,
            None if tap is identity else functools.partial(_tap_layer, tap, i),
        )
        pools.append(pool)
        is_nonfinite = jnp.logical_or(is_nonfinite, is_bad)
    hidden = layers.rms_norm(hidden, params["norm"], config.rms_norm_eps)
    return tap("norm", hidden), Cache(pools=(tuple(pools),), is_nonfinite=is_nonfinite)


def _tap_layer(tap: Tap, layer: int, name: str, x: jax.Array) -> jax.Array:
    return tap(f"layers.{layer}.{name}", x)


def _layer(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    hidden: jax.Array,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    tap: Tap | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer: an inner jit, so that equal layers trace once; a tapped one is traced in line."""
    if tap is None:
        return _traced_layer(config, weights, hidden, pool, turn, batch)
    return _layer_body(config, weights, hidden, pool, turn, batch, tap)


def _layer_body(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    hidden: jax.Array,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    tap: Tap = identity,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    vectors = layer_vectors(config, weights["vectors"])
    with jax.named_scope("attention"):
        normed = layers.rms_norm(hidden, vectors["input_norm"], config.rms_norm_eps)
        mixed, pool, is_bad = _attention(config, weights, vectors, normed, pool, turn, batch, tap)
        hidden = tap("attention", hidden + mixed)
    with jax.named_scope("mlp"):
        normed = layers.rms_norm(hidden, vectors["post_norm"], config.rms_norm_eps)
        hidden = tap("mlp", hidden + _mlp(weights, vectors, normed))
    return hidden, pool, is_bad


_traced_layer = jax.jit(_layer_body, static_argnums=(0,))


def _attention(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    vectors: Mapping[str, jax.Array],
    x: jax.Array,
    pool: jax.Array,
    turn: Rotation,
    batch: Batch,
    tap: Tap,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_tokens = x.shape[0]
    qkv = layers.linear(x, weights["qkv"])  # [T, K, G + 2, H]
    if "qkv_bias" in vectors:
        qkv = qkv + vectors["qkv_bias"][None]
    table, eps = batch.page_tables[0], config.rms_norm_eps
    look = {"scale": config.head_dim**-0.5, "window": config.sliding_window}
    if tap is identity:
        # A kernel reads the scales where they lie: a slice of its own would cost another kernel.
        scales_at, _ = vector_layout(config).get("qk_norm", (0, ()))
        flat = weights["vectors"] if config.qk_norm else None
        out, pool, is_bad = attend_projected(
            qkv, turn, flat, pool, batch, table, scales_at=scales_at, eps=eps, **look
        )
    else:
        # What a tap sees or changes lies between the steps of the operation above.
        q, keys, values = turned(qkv, turn.cos, turn.sin, vectors.get("qk_norm"), eps)
        out, pool, is_bad = attend(
            tap("q", q), tap("k", keys), tap("v", values), pool, batch, table, **look
        )
    out = layers.linear(out.reshape(num_tokens, -1), weights["o"])
    if "o_bias" in vectors:
        out = out + vectors["o_bias"][None]
    return out, pool, is_bad


def _mlp(weights: Mapping[str, Any], vectors: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    gate_up = layers.linear(x, weights["gate_up"])  # [T, 2, F]
    if "gate_up_bias" in vectors:
        gate_up = gate_up + vectors["gate_up_bias"][None]
    out = layers.linear(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], weights["down"])
    if "down_bias" in vectors:
        out = out + vectors["down_bias"][None]
    return out


def logits(config: DecoderConfig, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
    """hidden [R, D] -> f32[R, V]; tied models read the embedding table."""
    table = params["embed"] if config.tie_word_embeddings else params["head"]
    return layers.linear(hidden, table, out_dtype=jnp.dtype(jnp.float32))
