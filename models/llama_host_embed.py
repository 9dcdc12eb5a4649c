"""Llama with its embedding table in host memory: each step gets the rows it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from models import decoder, decoder_config, decoder_weights, llama
from models.checkpoint import Leaf
from models.registry import HostTables, Params, Registration


def leaves(config: decoder_config.DecoderConfig) -> Mapping[str, Leaf]:
    """Llama's without the table. A tied head is a matrix of its own here, read from the table."""
    names = decoder_weights.Names()
    if config.tie_word_embeddings:
        names = dataclasses.replace(names, head=names.embed)
    return {
        path: leaf
        for path, leaf in decoder_weights.leaves(_untied(config), names).items()
        if path != "embed"
    }


def host_leaves(config: decoder_config.DecoderConfig) -> Mapping[str, Leaf]:
    """The embedding table."""
    return {"embed": llama.leaves(config)["embed"]}


def host_embed(
    config: decoder_config.DecoderConfig, tables: HostTables, token_ids: np.ndarray
) -> np.ndarray:
    """Rows [T, D] of the table, copied out of it."""
    del config
    return tables["embed"][token_ids]


def logits(config: decoder_config.DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """hidden [R, D] -> f32[R, V], by the head on the device."""
    return decoder.logits(_untied(config), params, hidden)


def _untied(config: decoder_config.DecoderConfig) -> decoder_config.DecoderConfig:
    return dataclasses.replace(config, tie_word_embeddings=False)


REGISTRATION = Registration(
    architecture="LlamaHostEmbedForCausalLM",
    parse_config=llama.parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=logits,
    cache_spec=decoder.cache_spec,
    example=decoder_config.EXAMPLE,
    ignores=llama.ignores,
    host_leaves=host_leaves,
    host_embed=host_embed,
)
