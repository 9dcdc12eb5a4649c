"""Treadle's face: names resolve when they are first used, so that importing it imports no jax."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig as EngineConfig
    from engine.request import SamplingParams as SamplingParams
    from engine.request import StructuredOutput as StructuredOutput
    from engine.serving.llm import LLM as LLM
    from engine.serving.llm import AsyncLLM as AsyncLLM
    from engine.serving.outputs import CompletionOutput as CompletionOutput
    from engine.serving.outputs import RequestOutput as RequestOutput
    from engine.serving.outputs import ScoreOutput as ScoreOutput

_PLACES = {
    "LLM": "engine.serving.llm",
    "AsyncLLM": "engine.serving.llm",
    "SamplingParams": "engine.request",
    "StructuredOutput": "engine.request",
    "EngineConfig": "engine.config",
    "RequestOutput": "engine.serving.outputs",
    "CompletionOutput": "engine.serving.outputs",
    "ScoreOutput": "engine.serving.outputs",
}

__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(_PLACES)
