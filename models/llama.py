"""Llama: the plain dense decoder, with optional biases and llama3 rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, decoder_weights
from models.checkpoint import Leaf
from models.registry import Registration


def parse_config(config: Mapping[str, Any]) -> decoder_config.DecoderConfig:
    """`attention_bias` covers q, k, v and o; `mlp_bias` the three MLP matrices."""
    has_bias = bool(config.get("attention_bias", False))
    return decoder_config.parse_config(
        config,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def leaves(config: decoder_config.DecoderConfig) -> Mapping[str, Leaf]:
    """Hugging Face names."""
    return decoder_weights.leaves(config, decoder_weights.Names())


def ignores(config: decoder_config.DecoderConfig, name: str) -> bool:
    """See `decoder_weights.ignores`."""
    return decoder_weights.ignores(config, name, decoder_weights.Names())


REGISTRATION = Registration(
    architecture="LlamaForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example=decoder_config.EXAMPLE,
    ignores=ignores,
    device_token_ids=True,
)
