"""The decoder's parameters: where each checkpoint tensor lands, and how small vectors lie."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from models import mla, mlp, moe
from models.checkpoint import Leaf, Part
from models.decoder_config import DecoderConfig
from models.layers import Dense, Rows


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
    if c.mla is not None:
        parts = mla.vector_parts(c.mla, mla.Names())
        shapes |= {name: (size,) for name, (size, _) in parts.items()}
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
    moe: moe.Names = dataclasses.field(default_factory=moe.Names)
    mla: mla.Names = dataclasses.field(default_factory=mla.Names)


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
    return {
        **_attention_leaves(c, names, i),
        **_mlp_leaves(c, names, i),
        "vectors": _vectors_leaf(c, names, i),
    }


def _attention_leaves(c: DecoderConfig, names: Names, i: int) -> dict[str, Leaf]:
    d, heads = c.hidden_size, c.num_heads * c.head_dim
    if c.mla is not None:
        return mla.leaves(c.mla, d, c.num_heads, names.mla, i)
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
            parts=(Part(f"{names.o.format(i=i)}.weight", (d, heads), (), np.transpose),),
            partition=("tensor", None),
            node=Dense,
            fan_in=heads,
        ),
    }


def _mlp_leaves(c: DecoderConfig, names: Names, i: int) -> dict[str, Leaf]:
    if c.moe is not None and i in c.moe_layers:
        return moe.leaves(c.moe, c.hidden_size, names.moe, i)
    gate, up, down = (f"{name.format(i=i)}.weight" for name in (names.gate, names.up, names.down))
    return mlp.leaves(c.hidden_size, c.intermediate_size, gate, up, down)


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
    latent_norms = {} if c.mla is None else mla.vector_parts(c.mla, names.mla)
    name = {
        **{one: tensor for one, (_, tensor) in latent_norms.items()},
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
