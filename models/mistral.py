"""Mistral: the dense decoder with an optional sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, decoder_weights
from models.checkpoint import Leaf
from models.registry import Registration


def parse_config(config: Mapping[str, Any]) -> decoder_config.DecoderConfig:
    """A query sees itself and the `sliding_window` - 1 positions before it; null: all."""
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window is {window!r}, it must be a positive integer or null")
    return decoder_config.parse_config(config, sliding_window=window)


def leaves(config: decoder_config.DecoderConfig) -> Mapping[str, Leaf]:
    """Hugging Face names."""
    return decoder_weights.leaves(config, decoder_weights.Names())


def ignores(config: decoder_config.DecoderConfig, name: str) -> bool:
    """See `decoder_weights.ignores`."""
    return decoder_weights.ignores(config, name, decoder_weights.Names())


REGISTRATION = Registration(
    architecture="MistralForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example={**decoder_config.EXAMPLE, "sliding_window": 24},
    ignores=ignores,
    device_token_ids=True,
)
