"""Settings as JSON data and back, for another process of the same code: nothing in it is run."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from engine.execution import remembered


def text_of(value: Any) -> str:
    """The JSON text of numbers, strings, tuples, tables, shapes and dataclasses of this code.

    Raises:
      TypeError: something else is in it, or would not come back as it was.
    """
    text = json.dumps(_plain(value))
    if value_of(text) != value:
        raise TypeError(f"{value!r} does not come back from JSON as it was")
    return text


def value_of(text: str) -> Any:
    """What `text_of` was given."""
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_plain(item) for item in value]
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"shape": value.shape, "dtype": value.dtype.name}
    if isinstance(value, Mapping):
        return {"items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    kind = type(value)
    if dataclasses.is_dataclass(value) and _is_ours(kind.__module__):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: _plain(getattr(value, name)) for name in names}
        return {"class": [kind.__module__, kind.__qualname__], "fields": fields}
    raise TypeError(f"{value!r} is no plain data")


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_value(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "items" in data:
        return {_value(key): _value(item) for key, item in data["items"]}
    if "shape" in data:
        return jax.ShapeDtypeStruct(tuple(data["shape"]), np.dtype(data["dtype"]))
    module, name = data["class"]
    if not _is_ours(module):
        raise TypeError(f"{module}.{name} is no class of this code")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(f"{module}.{name} is no dataclass")
    return kind(**{field: _value(item) for field, item in data["fields"].items()})


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in remembered.PACKAGES
