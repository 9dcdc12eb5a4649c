"""DeepSeek-V2 and -Lite: latent attention, softmax router with groups, shared experts, YaRN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import decoder, decoder_config, decoder_weights
from models.checkpoint import Leaf
from models.decoder_config import DecoderConfig, parse_rope, rope_scaling, size
from models.layers import yarn_mscale
from models.mla import MlaConfig
from models.moe import MoeConfig
from models.registry import Registration

LATENT_NORM_EPS = 1e-6
"""Of the latents' norms in the published code and in transformers, whatever rms_norm_eps says."""

_REFUSED: Mapping[str, str] = {
    "attention_bias": "its projections have no biases",
    "mlp_bias": "its MLPs have no biases",
    "norm_topk_prob": "the published code never divides the weights by their sum, others do; the "
    "published files say false",
}


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the sizes of the latents, the router's rules, and which layers have experts.

    Raises:
      ValueError: a field is missing or asks for what DeepSeek-V2 does not have.
    """
    refuse(config, _REFUSED, "DeepSeek-V2")
    require(config, "scoring_func", "softmax")
    require(config, "moe_layer_freq", 1)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"topk_method is {method!r}; DeepSeek-V2 has greedy and group_limited_greedy"
        )
    has_groups = method == "group_limited_greedy"
    moe = MoeConfig(
        num_experts=size(config, "n_routed_experts"),
        top_k=size(config, "num_experts_per_tok"),
        intermediate_size=size(config, "moe_intermediate_size"),
        scoring="softmax",
        renormalize=False,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=size(config, "n_group") if has_groups else 1,
        top_groups=size(config, "topk_group") if has_groups else 1,
        shared_intermediate_size=shared_intermediate_size(config),
        router_dtype="float32",
    )
    return parse_latent_decoder(config, moe, dense_layers(config))


def parse_latent_decoder(
    config: Mapping[str, Any], moe: MoeConfig, dense: int, **switches: Any
) -> DecoderConfig:
    """A decoder with latent attention whose layers from `dense` on have experts.

    Raises:
      ValueError: a field is missing, of the wrong type, or asks for what the decoder does not do.
    """
    num_heads = size(config, "num_attention_heads")
    if (num_kv_heads := size(config, "num_key_value_heads", num_heads)) != num_heads:
        raise ValueError(
            f"num_key_value_heads is {num_kv_heads} but num_attention_heads {num_heads}; in latent "
            "attention every head has keys and values of its own"
        )
    nope, rope_dim = size(config, "qk_nope_head_dim"), size(config, "qk_rope_head_dim")
    rope = parse_rope(config, rope_dim, size(config, "max_position_embeddings"), scalings=("yarn",))
    mscale = 1.0
    if rope.kind == "yarn" and (all_dim := rope_scaling(config).get("mscale_all_dim")):
        mscale = yarn_mscale(rope.factor, float(all_dim))
    mla = MlaConfig(
        q_lora_rank=None if config.get("q_lora_rank") is None else size(config, "q_lora_rank"),
        kv_lora_rank=size(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=size(config, "v_head_dim"),
        latent_norm_eps=LATENT_NORM_EPS,
        scale=(nope + rope_dim) ** -0.5 * mscale**2,
        has_interleaved_rope=bool(config.get("rope_interleave", True)),
    )
    return decoder_config.parse_config(
        config,
        head_dim=nope + rope_dim,
        rope=rope,
        mla=mla,
        moe=moe,
        moe_layers=tuple(range(dense, size(config, "num_hidden_layers"))),
        **switches,
    )


def refuse(config: Mapping[str, Any], refused: Mapping[str, str], family: str) -> None:
    """Raises for a field that is set although the family does without.

    Raises:
      ValueError: with the field, its value and the reason.
    """
    for name, reason in refused.items():
        if config.get(name):
            raise ValueError(f"{name} is {config[name]!r} but {family} is served without: {reason}")


def require(config: Mapping[str, Any], name: str, value: Any) -> None:
    """Raises for a field that stands in the file with another value than the only one served.

    Raises:
      ValueError: with the field and both values.
    """
    if config.get(name, value) != value:
        raise ValueError(f"{name} is {config[name]!r}; {value!r} is the only one that is served")


def shared_intermediate_size(config: Mapping[str, Any]) -> int | None:
    """Width of the one MLP that stands for all shared experts; None without any."""
    if not config.get("n_shared_experts"):
        return None
    return size(config, "n_shared_experts") * size(config, "moe_intermediate_size")


def dense_layers(config: Mapping[str, Any]) -> int:
    """The leading layers that have an MLP instead of experts.

    Raises:
      ValueError: it is no number of layers.
    """
    count = config.get("first_k_dense_replace", 0)
    if type(count) is not int or count < 0:
        raise ValueError(f"first_k_dense_replace is {count!r}; it must be a number of layers")
    return count


def leaves(config: DecoderConfig) -> Mapping[str, Leaf]:
    """Hugging Face names."""
    return decoder_weights.leaves(config, decoder_weights.Names())


def ignores(config: DecoderConfig, name: str) -> bool:
    """See `decoder_weights.ignores`."""
    return decoder_weights.ignores(config, name, decoder_weights.Names())


EXAMPLE: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""A small config of either family with latent attention, its architecture name aside."""

REGISTRATION = Registration(
    architecture="DeepseekV2ForCausalLM",
    parse_config=parse_config,
    leaves=leaves,
    forward=decoder.forward,
    logits=decoder.logits,
    cache_spec=decoder.cache_spec,
    example=EXAMPLE,
    ignores=ignores,
    device_token_ids=True,
    first_layers=decoder_config.first_layers,
)
