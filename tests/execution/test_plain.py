"""Settings cross to another process of the same code as JSON; nothing else is taken for them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from engine.execution import plain
from models import registry
from models.batch import Tiling
from tests.execution import toys


@pytest.mark.parametrize("architecture", registry.architectures())
def test_config_of_every_registration_comes_back(architecture):
    registration = registry.get(architecture)
    config = registration.parse_config(registration.example)
    assert plain.value_of(plain.text_of(config)) == config


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"a": (1, 2.5, None, True, "x"), "b": ()}, id="numbers"),
        pytest.param(Tiling(kernels="mosaic"), id="tiling"),
        pytest.param(toys.mixed_key(), id="key"),
        pytest.param(((jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),),), id="shapes"),
    ],
)
def test_settings_come_back_as_they_were(value):
    assert plain.value_of(plain.text_of(value)) == value


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Of a module that another process need not have."""

    size: int = 1


@pytest.mark.parametrize("value", [len, [1], Elsewhere(), {"a": Elsewhere}], ids=str)
def test_what_is_no_plain_data_is_refused(value):
    with pytest.raises(TypeError, match="is no plain data"):
        plain.text_of(value)


def test_what_would_come_back_changed_is_refused():
    with pytest.raises(TypeError, match="does not come back from JSON as it was"):
        plain.text_of(float("nan"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (("subprocess", "Popen"), "subprocess.Popen is no class of this code"),
        (("models.registry", "get"), "models.registry.get is no dataclass"),
        (("models.checkpoint", "SafetensorsSource"), "SafetensorsSource is no dataclass"),
    ],
)
def test_text_names_no_other_code(name, message):
    with pytest.raises(TypeError, match=message):
        plain.value_of(json.dumps({"class": name, "fields": {}}))
