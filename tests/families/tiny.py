"""Tiny checkpoints of every tested family: weights made from names alone, so that none is stored.

Reads numpy and safetensors only: the golden script runs it beside torch, the tests beside jax.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent
NAMES = (
    "llama",
    "llama_tied_bias",
    "llama_host_embed",
    "mistral",
    "mistral_swa",
    "internlm2",
    "qwen3",
    "qwen3_tied",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "glm4_moe_lite",
    "glm4_moe_lite_groups",
)
# An eps of 1e-5 or 1e-6 hides behind float32 rounding; these copies show a wrong one.
EPS = 1e-3
EPS_SUFFIX = "_eps"
EPS_NAMES = tuple(name + EPS_SUFFIX for name in NAMES)


def config(name: str) -> dict[str, Any]:
    """config.json of a tiny model; `NAME_eps` is NAME with rms_norm_eps 1e-3."""
    data = json.loads((FOLDER / f"{_base(name)}.json").read_text())
    return data | {"rms_norm_eps": EPS} if name.endswith(EPS_SUFFIX) else data


def tensors(name: str) -> dict[str, np.ndarray]:
    """Every tensor in float32 by its published name; the same on every machine."""
    made = {}
    for line in (FOLDER / f"{_base(name)}.tensors.txt").read_text().splitlines():
        if not line.startswith("#"):
            tensor, shape, _ = line.replace(", ", ",").split()
            made[tensor] = _make(f"{_base(name)}/{tensor}", tuple(json.loads(shape)))
    return made


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Tells whether two places made the same weights."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        state.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return state.hexdigest()


def write_checkpoint(
    name: str,
    directory: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Writes config.json and the weights, in one file or in shards with their index.

    `overrides` replaces fields of config.json; the weights stay those of `name`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = config(name) | dict(overrides or {})
    (directory / "config.json").write_text(json.dumps(data, indent=1))
    arrays = tensors(name)
    if shards == 1:
        save_file(arrays, directory / "model.safetensors")
        return directory
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        some = list(arrays)[i::shards]
        save_file({tensor: arrays[tensor] for tensor in some}, directory / file)
        index |= dict.fromkeys(some, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def random_ids(name: str, length: int) -> np.ndarray:
    """i32[length]: a prompt without 0 and without ids that end a sequence."""
    data = config(name)
    eos = data["eos_token_id"]
    barred = {0, *(eos if isinstance(eos, list) else [eos])}
    allowed = np.array([i for i in range(data["vocab_size"]) if i not in barred], np.int32)
    picks = _generator(f"{_base(name)}/prompt/{length}").integers(len(allowed), size=length)
    return allowed[picks]


def _base(name: str) -> str:
    return name.removesuffix(EPS_SUFFIX)


def _generator(label: str) -> np.random.Generator:
    key = hashlib.blake2b(label.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _make(label: str, shape: tuple[int, ...]) -> np.ndarray:
    # The spreads of the families' notes: with a library's own initialisation (norms of 1,
    # weights of 0.02) most mistakes leave the logits as they are.
    generator = _generator(label)
    if label.endswith(".bias"):
        return np.float32(0.1) * generator.standard_normal(shape, np.float32)
    if label.endswith(".e_score_correction_bias"):
        return np.float32(0.5) * generator.random(shape, np.float32) - np.float32(0.25)
    if len(shape) == 1:
        return np.float32(0.6) + np.float32(0.8) * generator.random(shape, np.float32)
    is_embedding = label.endswith(("embed_tokens.weight", "tok_embeddings.weight"))
    is_router = label.endswith(".mlp.gate.weight")
    scale = np.float32(0.7 if is_embedding else (1.5 if is_router else 1.0) * shape[1] ** -0.5)
    return scale * generator.standard_normal(shape, np.float32)
