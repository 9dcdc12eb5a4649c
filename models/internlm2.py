"""InternLM2: the dense decoder with q, k and v interleaved per kv head in one checkpoint tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, decoder_weights
from models.checkpoint import Leaf
from models.registry import Registration

_NAMES = decoder_weights.Names(
    input_norm="model.layers.{i}.attention_norm.weight",
    post_norm="model.layers.{i}.ffn_norm.weight",
    o="model.layers.{i}.attention.wo",
    gate="model.layers.{i}.feed_forward.w1",
    up="model.layers.{i}.feed_forward.w3",
    down="model.layers.{i}.feed_forward.w2",
    embed="model.tok_embeddings.weight",
    head="output.weight",
    fused_qkv="model.layers.{i}.attention.wqkv",
)


def parse_config(config: Mapping[str, Any]) -> decoder_config.DecoderConfig:
    """`bias` covers wqkv and wo. Dynamic rope scales nothing inside max_position_embeddings."""
    has_bias = bool(config.get("bias", False))
    return decoder_config.parse_config(config, qkv_bias=has_bias, output_bias=has_bias)


def leaves(config: decoder_config.DecoderConfig) -> Mapping[str, Leaf]:
    """InternLM2's own names; rows of wqkv are [kv head][q heads, k, v][head_dim]."""
    return decoder_weights.leaves(config, _NAMES)


def ignores(config: decoder_config.DecoderConfig, name: str) -> bool:
    """See `decoder_weights.ignores`."""
    return decoder_weights.ignores(config, name, _NAMES)


REGISTRATION = Registration(
    architecture="InternLM2ForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example=decoder_config.EXAMPLE,
    ignores=ignores,
    device_token_ids=True,
)
