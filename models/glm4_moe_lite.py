"""GLM-4.7-Flash: latent attention with a latent for queries, sigmoid router with a correction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, decoder_weights, deepseek_v2
from models.decoder_config import DecoderConfig, size
from models.moe import MoeConfig
from models.registry import Registration

_REFUSED: Mapping[str, str] = {"attention_bias": "its projections have no biases"}

_MTP_TENSORS = (
    "embed_tokens.weight",
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
)
"""What a layer that predicts further tokens has besides an ordinary layer's tensors."""


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the sizes of the latents, the router's rules, and which layers have experts.

    The latents' norms have an eps of 1e-6 although rms_norm_eps is 1e-5. Implementations differ
    here and nobody has said which the model was trained with; transformers, whose logits the
    goldens are, has 1e-6, as DeepSeek's own code has for the same attention.

    Raises:
      ValueError: a field is missing or asks for what GLM-4.7-Flash does not have.
    """
    deepseek_v2.refuse(config, _REFUSED, "GLM-4.7-Flash")
    deepseek_v2.require(config, "scoring_func", "sigmoid")
    deepseek_v2.require(config, "topk_method", "noaux_tc")
    deepseek_v2.require(config, "partial_rotary_factor", 1.0)
    deepseek_v2.require(config, "moe_layer_freq", 1)
    moe = MoeConfig(
        num_experts=size(config, "n_routed_experts"),
        top_k=size(config, "num_experts_per_tok"),
        intermediate_size=size(config, "moe_intermediate_size"),
        scoring="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=size(config, "n_group", 1),
        top_groups=size(config, "topk_group", 1),
        has_bias=True,
        shared_intermediate_size=deepseek_v2.shared_intermediate_size(config),
        router_dtype="float32",
    )
    return deepseek_v2.parse_latent_decoder(
        config, moe, _dense_layers(config), num_mtp_layers=_num_mtp_layers(config)
    )


def _dense_layers(config: Mapping[str, Any]) -> int:
    """The leading dense layers by `first_k_dense_replace` or the list that newer files have."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return deepseek_v2.dense_layers(config)
    count = list(kinds).count("dense")
    expected = ["dense"] * count + ["sparse"] * (size(config, "num_hidden_layers") - count)
    if list(kinds) != expected:
        raise ValueError(
            f"mlp_layer_types is {kinds!r}; it must name every layer, 'dense' ones before 'sparse'"
        )
    return count


def _num_mtp_layers(config: Mapping[str, Any]) -> int:
    count = config.get("num_nextn_predict_layers") or 0
    if type(count) is not int or count < 0:
        raise ValueError(f"num_nextn_predict_layers is {count!r}; it must be a number of layers")
    return count


def ignores(config: DecoderConfig, name: str) -> bool:
    """The layers that predict further tokens, by their tensors' names; see `decoder_weights` too.

    They will serve speculation.
    """
    return name in _mtp_names(config) or deepseek_v2.ignores(config, name)


@functools.cache
def _mtp_names(config: DecoderConfig) -> frozenset[str]:
    """Every tensor of the layers behind the last: numbered on, with experts like those before."""
    last = config.num_layers + config.num_mtp_layers
    added = range(config.num_layers, last)
    deeper = dataclasses.replace(config, num_layers=last, moe_layers=(*config.moe_layers, *added))
    names = {f"model.layers.{i}.{tensor}" for i in added for tensor in _MTP_TENSORS}
    for path, leaf in decoder_weights.leaves(deeper, decoder_weights.Names()).items():
        if path.startswith(tuple(f"layers.{i}." for i in added)):
            names |= {part.name for part in leaf.parts}
    return frozenset(names)


REGISTRATION = Registration(
    architecture="Glm4MoeLiteForCausalLM",
    parse_config=parse_config,
    leaves=deepseek_v2.leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example={
        **deepseek_v2.EXAMPLE,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    ignores=ignores,
    device_token_ids=True,
    first_layers=decoder_config.first_layers,
)
