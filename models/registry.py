"""Architecture names and what each stands for: config, weights, forward, caches, capabilities."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from models import block_fp8
from models.batch import Batch
from models.cache import Cache, CacheSpec
from models.checkpoint import Leaf
from models.layers import Tap, identity

Params = Mapping[str, Any]
"""Nested parameters: "layers.0.qkv" of the leaves stands at params["layers"]["0"]["qkv"]."""

HostTables = Mapping[str, np.ndarray]
"""Tables in host memory by path, mostly views of the mapped checkpoint in its own dtype."""


@dataclasses.dataclass(frozen=True)
class Registration:
    """One architecture name. Families that share code still register apart."""

    architecture: str
    parse_config: Callable[[Mapping[str, Any]], Any]
    """config.json as data -> a frozen config; ValueError names what is missing or unsupported."""
    leaves: Callable[[Any], Mapping[str, Leaf]]
    """Every parameter by dotted path, and how checkpoint tensors fill it."""
    forward: Callable[..., tuple[jax.Array, Cache]]
    """forward(config, params, cache, token_ids, batch, *, tap) -> (hidden [T, D], cache)."""
    logits: Callable[[Any, Params, jax.Array], jax.Array]
    """logits(config, params, hidden [R, D]) -> f32[R, V]."""
    cache_spec: Callable[[Any, int, str], CacheSpec]
    """cache_spec(config, page_size, dtype)."""
    example: Mapping[str, Any] = dataclasses.field(hash=False)
    """A small config.json of this architecture, for proofs without a checkpoint."""
    ignores: Callable[[Any, str], bool] = lambda config, name: False
    """ignores(config, name): True for checkpoint tensors that the model has no use for."""
    device_token_ids: bool = False
    """The forward reads its ids from the device array it is given. False: sync lane only."""
    host_leaves: Callable[[Any], Mapping[str, Leaf]] = lambda config: {}
    """host_leaves(config): tables that never reach the device, by path, for `host_embed` alone."""
    host_embed: Callable[[Any, HostTables, np.ndarray], np.ndarray] | None = None
    """host_embed(config, tables, i32[T] ids) -> embeddings [T, D] in an array of their own.

    The forward finds them in `batch.embeddings` and reads no ids. For embedding tables that the
    device has no room for.
    """
    max_rows: int | None = None
    """Most rows of one step this forward supports; None: any."""
    first_layers: Callable[[Any, int], Any] = lambda config, depth: dataclasses.replace(
        config, num_layers=depth
    )
    """first_layers(config, depth): the same with that many layers, one of each kind among them."""

    def __post_init__(self) -> None:
        if self.device_token_ids and self.host_embed is not None:
            raise ValueError(
                f"{self.architecture} declares both device_token_ids and host_embed; rows made on "
                "the host need every id there, so declare one of them"
            )

    def bind(self, config: Any) -> Model:
        """The registration with its parsed config."""
        return Model(registration=self, config=config)


@dataclasses.dataclass(frozen=True)
class Model:
    """Pure functions of one configured architecture; serving and study call the same ones."""

    registration: Registration
    config: Any

    def forward(
        self,
        params: Params,
        cache: Cache,
        token_ids: jax.Array,
        batch: Batch,
        *,
        tap: Tap = identity,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states [T, D] of i32[T] ids, and the cache with this step's tokens."""
        return self.registration.forward(self.config, params, cache, token_ids, batch, tap=tap)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden [R, D] -> f32[R, V]."""
        return self.registration.logits(self.config, params, hidden)

    def first_layers(self, num_layers: int) -> Model:
        """The same architecture and sizes with at most `num_layers` layers, one of each kind."""
        depth = min(num_layers, self.config.num_layers)
        return dataclasses.replace(self, config=self.registration.first_layers(self.config, depth))

    def leaves(self) -> Mapping[str, Leaf]:
        """Every parameter by dotted path."""
        return self.registration.leaves(self.config)

    def ignores(self, name: str) -> bool:
        """True for checkpoint tensors that have no use on the device."""
        is_table = any(
            part.name == name for leaf in self.host_leaves().values() for part in leaf.parts
        )
        return is_table or self.registration.ignores(self.config, name)

    def host_leaves(self) -> Mapping[str, Leaf]:
        """Every table that stays in host memory, by path."""
        return self.registration.host_leaves(self.config)

    def host_embed(self, tables: HostTables, token_ids: np.ndarray, dtype: Any) -> np.ndarray:
        """Embeddings [T, D] of i32[T] ids, made on the host in an array of their own."""
        assert self.registration.host_embed is not None
        rows = self.registration.host_embed(self.config, tables, token_ids)
        return rows.astype(dtype, copy=False)

    def cache_spec(self, page_size: int, dtype: str) -> CacheSpec:
        """The cache groups of this model."""
        return self.registration.cache_spec(self.config, page_size, dtype)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.config.vocab_size


_FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "models.llama",
    "LlamaHostEmbedForCausalLM": "models.llama_host_embed",
    "Qwen3ForCausalLM": "models.qwen3",
    "MistralForCausalLM": "models.mistral",
    "InternLM2ForCausalLM": "models.internlm2",
    "Qwen3MoeForCausalLM": "models.qwen3_moe",
    "DeepseekV2ForCausalLM": "models.deepseek_v2",
    "Glm4MoeLiteForCausalLM": "models.glm4_moe_lite",
}


def architectures() -> tuple[str, ...]:
    """Every registered architecture name."""
    return tuple(_FAMILIES)


def get(architecture: str) -> Registration:
    """The registration of an architecture name.

    Raises:
      ValueError: for an unknown name, with the known ones.
    """
    module = _FAMILIES.get(architecture)
    if module is None:
        raise ValueError(
            f"architecture {architecture!r} is not registered; known: {', '.join(_FAMILIES)}"
        )
    return importlib.import_module(module).REGISTRATION


def is_own(registration: Registration) -> bool:
    """Whether the name stands for exactly this in every process: its code is a part of ours."""
    module = _FAMILIES.get(registration.architecture, "")
    return module.startswith("models.") and get(registration.architecture) is registration


def of_config(config: Mapping[str, Any]) -> Model:
    """The model that a config.json describes.

    Raises:
      ValueError: no or unknown architecture, a field that is missing or unsupported, or weights
        quantised in a way that is not read.
    """
    names = config.get("architectures") or ()
    if not names:
        raise ValueError("config.json names no architecture; add the field 'architectures'")
    registration = get(names[0])
    block_fp8.check_config(config)
    return registration.bind(registration.parse_config(config))
