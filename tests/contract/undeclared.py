"""Registrations that no model family has: one undeclared, one that runs a single row a step."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest

from models import llama, registry
from models.registry import Registration

UNDECLARED = dataclasses.replace(
    llama.REGISTRATION, architecture="UndeclaredForCausalLM", device_token_ids=False
)
SINGLE = dataclasses.replace(llama.REGISTRATION, architecture="SingleForCausalLM", max_rows=1)


def register(registration: Registration, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the registry know the name until the test ends."""
    module = ModuleType(f"tests.contract.{registration.architecture}")
    module.__dict__["REGISTRATION"] = registration
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        registry, "_FAMILIES", {**registry._FAMILIES, registration.architecture: module.__name__}
    )
