"""Mistral: the dense decoder with an optional sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder
from models.checkpoint import Leaf
from models.registry import Registration


def parse_config(config: Mapping[str, Any]) -> decoder.DecoderConfig:
    """A query sees itself and the `sliding_window` - 1 positions before it; null: all."""
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window is {window!r}, it must be a positive integer or null")
    return decoder.parse_config(config, sliding_window=window)


def leaves(config: decoder.DecoderConfig) -> Mapping[str, Leaf]:
    """Hugging Face names."""
    return decoder.leaves(config, decoder.Names())


def ignores(config: decoder.DecoderConfig, name: str) -> bool:
    """See `decoder.ignores`."""
    return decoder.ignores(config, name, decoder.Names())


REGISTRATION = Registration(
    architecture="MistralForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example={**decoder.EXAMPLE, "sliding_window": 24},
    ignores=ignores,
    device_token_ids=True,
)
