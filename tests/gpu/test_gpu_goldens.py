"""Goldens of every family in float32 with true float32 products, and SmolLM2's in bfloat16."""

from __future__ import annotations

import jax
import pytest

from models.batch import Tiling
from tests.families import tiny
from tests.models import forward_adapter, golden

BOUND = golden.LEAST_MISTAKE
"""Of float32: every mistake that tests/models/test_parity.py lists moves a golden by more.

The gate on a CPU is half of it. A GPU's own exp, rsqrt and sums are as exact, but other ones.
"""
BFLOAT16 = {"top": 0.2, "last": 0.2}
"""Of bfloat16, in standard deviations of the logits; the plain forms on a CPU reach 0.14."""
OTHER_IDS = 0.1
"""Share of the positions whose likeliest id may be another one in bfloat16."""


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return golden.loader(tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_family_equals_its_golden(name, tiny_model, say):
    found = golden.errors(name, *tiny_model(name), page_size=16)
    say(f"{name}: {max(found.values()):.1e} at most, in {len(found)} lengths")
    assert len(found) == 10
    assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("name", golden.BORDER_NAMES)
def test_decode_rows_of_a_family_equal_its_golden(name, tiny_model, say):
    found = golden.errors(name, *tiny_model(name), (17, 65), page_size=16, num_decoded=6)
    say(f"{name}: {max(found.values()):.1e} at most")
    assert max(found.values()) <= BOUND, found


def test_smollm2_on_real_text_equals_its_golden(smollm2_gguf, say):
    loaded = golden.smollm2(smollm2_gguf)
    for text in range(golden.NUM_TEXTS):
        found = golden.text_error(text, *loaded)
        say(f"text {text}: {found}")
        assert found.num_other_ids == 0
        assert found.top <= BOUND and found.last <= BOUND, found


def test_smollm2_in_bfloat16_is_near_its_golden_with_and_without_kernels(
    smollm2_gguf, has_kernels, say
):
    loaded = golden.smollm2(smollm2_gguf, "bfloat16")
    kernels = Tiling(kernels="mosaic") if has_kernels else forward_adapter.PLAIN
    for text in range(golden.NUM_TEXTS):
        plain = golden.text_error(text, *loaded, dtype="bfloat16")
        ours = golden.text_error(text, *loaded, dtype="bfloat16", tiling=kernels)
        say(f"text {text}: plain {plain}\n        kernels {ours}")
        for found in (plain, ours):
            assert found.num_other_ids <= OTHER_IDS * found.num_positions
            assert found.top <= BFLOAT16["top"] and found.last <= BFLOAT16["last"]
