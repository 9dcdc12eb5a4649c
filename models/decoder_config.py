"""Config of the decoder behind the families: sizes, switches, what config.json must say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.layers import RopeConfig, yarn_mscale
from models.mla import MlaConfig
from models.moe import MoeConfig


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one decoder, names as in checkpoint files."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of a dense layer's MLP."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """With `mla`, whose heads all read one latent, as many as num_heads."""
    head_dim: int
    """Of a query and a key."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    moe: MoeConfig | None = None
    """The mixture of experts in place of the MLP of `moe_layers`."""
    moe_layers: tuple[int, ...] = ()
    mla: MlaConfig | None = None
    """Latent attention in place of that over keys and values."""
    num_mtp_layers: int = 0
    """Layers of the checkpoint behind the last that predict further tokens; they are not run."""

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads


EXAMPLE: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""A small config of any dense family, its architecture name aside."""


def parse_config(
    config: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    rope: RopeConfig | None = None,
    **switches: Any,
) -> DecoderConfig:
    """Reads the fields that all families share.

    Args:
      config: config.json as data.
      head_dim: of a query and a key; None: as the file says, else hidden_size / heads.
      rope: None: as the file says, over whole heads.
      switches: further fields of DecoderConfig, a family's own.

    Raises:
      ValueError: a field is missing, of the wrong type, or asks for what the decoder does not do.
    """
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}; this decoder has silu only")
    num_heads = size(config, "num_attention_heads")
    num_kv_heads = size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    hidden_size = size(config, "hidden_size")
    head_dim = head_dim or size(config, "head_dim", hidden_size // num_heads)
    max_positions = size(config, "max_position_embeddings")
    return DecoderConfig(
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size(config, "intermediate_size"),
        num_layers=size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope or parse_rope(config, head_dim, max_positions),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **switches,
    )


def size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field of config.json that is a positive integer.

    Raises:
      ValueError: it is absent and has no default, or is something else.
    """
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name} is {value!r}, it must be a positive integer")
    return value


def parse_rope(
    config: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    scalings: tuple[str, ...] = ("linear", "llama3"),
) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling` (`type` or `rope_type`), or newer `rope_parameters`.

    Args:
      config: config.json as data.
      head_dim: dimensions that are rotated.
      max_positions: what stands in for an absent original length.
      scalings: kinds that the family does, beside `default` and `dynamic`.

    Raises:
      ValueError: for a scaling kind this decoder does not do.
    """
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind in ("default", "dynamic"):
        # Dynamic scaling changes only lengths past max_position_embeddings, which are refused.
        return RopeConfig(theta=theta, head_dim=head_dim)
    if kind not in scalings:
        known = ", ".join(("default", "dynamic", *scalings))
        raise ValueError(f"rope scaling {kind!r} is not supported; known: {known}")
    if "factor" not in scaling:
        raise ValueError(f"rope scaling {kind!r} has no 'factor'; add it to config.json")
    rope = RopeConfig(
        theta=theta,
        head_dim=head_dim,
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_length=int(scaling.get("original_max_position_embeddings", max_positions)),
    )
    return _with_yarn(rope, scaling) if kind == "yarn" else rope


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of rope scaling under either of their names; empty where there is none."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _with_yarn(rope: RopeConfig, scaling: Mapping[str, Any]) -> RopeConfig:
    if not scaling.get("truncate", True):
        raise ValueError("rope scaling has truncate false; yarn rounds its range outwards here")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    amplitude = scaling.get("attention_factor")
    if amplitude is None and mscale and mscale_all_dim:
        amplitude = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, mscale_all_dim)
    elif amplitude is None:
        amplitude = yarn_mscale(rope.factor, 1.0)
    return dataclasses.replace(
        rope,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        amplitude=float(amplitude),
    )


def first_layers(config: DecoderConfig, depth: int) -> DecoderConfig:
    """The same decoder with `depth` layers, of those it has, one of each kind among them.

    They are its first ones; where these are all of one kind, the last of them is of the other.
    """
    kept = {i for i in config.moe_layers if i < depth}
    if config.moe_layers and not kept:
        kept = {depth - 1}
    elif len(kept) == depth > 1 and len(config.moe_layers) < config.num_layers:
        kept.remove(depth - 1)
    return dataclasses.replace(config, num_layers=depth, moe_layers=tuple(sorted(kept)))
