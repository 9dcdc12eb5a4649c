"""Qwen3 dense: q and k are normalised per head before the rotation; the window fields are inert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, decoder_weights
from models.checkpoint import Leaf
from models.registry import Registration


def parse_config(config: Mapping[str, Any], **switches: Any) -> decoder_config.DecoderConfig:
    """Refuses `use_sliding_window`, which no published Qwen3 sets; `switches` are a relative's."""
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; Qwen3 is served with full attention only")
    return decoder_config.parse_config(
        config,
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=bool(config.get("attention_bias", False)),
        qk_norm=True,
        **switches,
    )


def leaves(config: decoder_config.DecoderConfig) -> Mapping[str, Leaf]:
    """Hugging Face names."""
    return decoder_weights.leaves(config, decoder_weights.Names())


def ignores(config: decoder_config.DecoderConfig, name: str) -> bool:
    """See `decoder_weights.ignores`."""
    return decoder_weights.ignores(config, name, decoder_weights.Names())


REGISTRATION = Registration(
    architecture="Qwen3ForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example=decoder_config.EXAMPLE,
    ignores=ignores,
    device_token_ids=True,
)
