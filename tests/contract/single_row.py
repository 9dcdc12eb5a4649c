"""A registration that no model family has: it runs a single row a step."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest

from models import llama, registry

SINGLE = dataclasses.replace(llama.REGISTRATION, architecture="SingleForCausalLM", max_rows=1)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the registry know the name until the test ends."""
    module = ModuleType(f"tests.contract.{SINGLE.architecture}")
    module.__dict__["REGISTRATION"] = SINGLE
    monkeypatch.setitem(sys.modules, module.__name__, module)
    families = {**registry._FAMILIES, SINGLE.architecture: module.__name__}
    monkeypatch.setattr(registry, "_FAMILIES", families)
