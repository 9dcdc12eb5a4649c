"""Qwen3 with a mixture of experts: softmax router, layers that stay dense, no shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, qwen3
from models.decoder_config import DecoderConfig, size
from models.moe import MoeConfig
from models.registry import Registration

_REFUSED: Mapping[str, str] = {
    "shared_expert_intermediate_size": "its layers have no shared expert",
    "qkv_bias": "its projections have biases by 'attention_bias' alone",
}
"""Fields of relatives that ask for what this architecture does not have."""


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the router's fields, and which layers have an MLP instead of experts.

    Raises:
      ValueError: a field is missing or asks for what Qwen3-MoE does not have.
    """
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise ValueError(
                f"{name} is {config[name]!r} but Qwen3-MoE is served without: {reason}"
            )
    if not config.get("use_qk_norm", True):
        raise ValueError("use_qk_norm is false; Qwen3-MoE normalises queries and keys")
    moe = MoeConfig(
        num_experts=size(config, "num_experts"),
        top_k=size(config, "num_experts_per_tok"),
        intermediate_size=size(config, "moe_intermediate_size"),
        scoring="softmax",
        renormalize=bool(config.get("norm_topk_prob", False)),
    )
    return qwen3.parse_config(config, moe=moe, moe_layers=_moe_layers(config))


def _moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every decoder_sparse_step-th layer but those of mlp_only_layers."""
    num_layers = size(config, "num_hidden_layers")
    step = size(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r}; it must be a list of layer numbers")
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)


REGISTRATION = Registration(
    architecture="Qwen3MoeForCausalLM",
    parse_config=parse_config,
    leaves=qwen3.leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example={
        **decoder_config.EXAMPLE,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    ignores=qwen3.ignores,
    device_token_ids=True,
    first_layers=decoder_config.first_layers,
)
