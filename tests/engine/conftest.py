"""A tiny engine shared by the modules of this folder: its start takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core import Core
from tests.engine import loop
from tests.families import tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama checkpoint of three layers and 131 ids."""
    return tiny.write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_core(tiny_llama: Path) -> Iterator[Core]:
    """Overlap lane, mixed steps, both samplers and the score head; pages of 4 tokens."""
    core = loop.start(tiny_llama, page_size=4, max_model_len=96)
    yield core
    core.close()


@pytest.fixture(scope="session")
def qwen3_moe_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    """The same with a mixture of experts."""
    folder = tiny.write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))
    core = loop.start(folder, page_size=4, max_model_len=96)
    yield core
    core.close()
