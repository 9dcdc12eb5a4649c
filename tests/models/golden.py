"""The golden logits of tests/goldens, and how far a forward is from them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models import checkpoint, gguf, registry
from models.batch import Tiling
from tests.families import tiny
from tests.models import forward_adapter

GOLDENS = Path(__file__).parents[1] / "goldens"
# The gate of the families' notes for attention models, in standard deviations of the logits.
GATE = 5e-5
# A mistake moves a golden by more than this: one that rounding could hide or show is not held.
LEAST_MISTAKE = 2 * GATE
ALL_NAMES = (*tiny.NAMES, *tiny.EPS_NAMES)
# The other GLM has the same attention; what its router does, no border moves.
BORDER_NAMES = tuple(name for name in tiny.NAMES if name != "glm4_moe_lite_groups")
NUM_TEXTS = 3


@functools.cache
def read(name: str) -> Mapping[str, np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


Loaded = tuple[registry.Model, Mapping[str, Any]]
"""A model and its parameters."""


def loader(new_folder: Callable[[str], Path]) -> Callable[..., Loaded]:
    """Loads a tiny model by name, each once; with wrong leaves, every time."""

    @functools.cache
    def folder(name: str) -> Path:
        return tiny.write_checkpoint(name, new_folder(name), shards=2)

    def load(name: str, edit_leaves: Callable[..., Any] | None = None) -> Loaded:
        model = registry.of_config(checkpoint.read_json_config(folder(name))[0])
        leaves = None if edit_leaves is None else edit_leaves(model)
        source = checkpoint.open_source(folder(name))
        return model, forward_adapter.load_params(model, source, leaves)

    unedited = functools.cache(load)
    return lambda name, leaves=None: load(name, leaves) if leaves else unedited(name)


def errors(
    name: str,
    model: registry.Model,
    params: Mapping[str, Any],
    lengths: Iterable[int] | None = None,
    **how: Any,
) -> dict[int, float]:
    """Largest error by prompt length, in standard deviations of the golden logits."""
    stored = read(name)
    found = {}
    for length in stored["lengths"] if lengths is None else lengths:
        logits = forward_adapter.full_logits(model, params, stored[f"ids_{length}"], **how)
        kept = logits[stored[f"positions_{length}"]]
        found[int(length)] = float(np.abs(kept - stored[f"logits_{length}"]).max() / stored["std"])
    return found


def smollm2(path: Path, dtype: str = "float32") -> Loaded:
    """SmolLM2-135M-Instruct from its GGUF file."""
    model = registry.of_config(gguf.config_from_gguf(path))
    source = checkpoint.open_source(path)
    return model, forward_adapter.load_params(model, source, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class TextError:
    """How far a forward over real text is from its golden, in standard deviations of the logits."""

    num_positions: int
    num_other_ids: int
    """Positions whose likeliest id is another one."""
    top: float
    """Of the likeliest ids of every position, at most."""
    last: float
    """Of the last position's logits, at most."""


def text_error(
    text: int,
    model: registry.Model,
    params: Mapping[str, Any],
    dtype: str = "float32",
    tiling: Tiling = forward_adapter.PLAIN,
) -> TextError:
    """SmolLM2 over one of the golden texts, in chunks."""
    stored = read("smollm2")
    ids, top_ids = stored[f"ids_{text}"], stored[f"top_ids_{text}"]
    logits = forward_adapter.full_logits(
        model, params, ids, page_size=16, chunk=48, dtype=dtype, tiling=tiling
    )
    top = np.take_along_axis(logits, top_ids, axis=-1) - stored[f"top_logits_{text}"]
    last = logits[-1, :: int(stored["vocab_stride"])] - stored[f"last_logits_{text}"]
    return TextError(
        num_positions=len(ids),
        num_other_ids=int((logits.argmax(axis=-1) != top_ids[:, 0]).sum()),
        top=float(np.abs(top).max() / stored["std"]),
        last=float(np.abs(last).max() / stored["std"]),
    )
