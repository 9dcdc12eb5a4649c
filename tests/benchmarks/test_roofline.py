"""The roofline bound gives the figures that the project's targets were set from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import offline
from benchmarks.roofline import Ceilings, Costs, bound_seconds
from engine.serving.commands.bench import Shape
from models import registry

FOLDER = Path(__file__).parents[2] / "benchmarks"


def costs_of(config: str, **changes: object) -> Costs:
    described = json.loads((FOLDER / "configs" / config).read_text())
    return Costs.of(registry.of_config(described | changes))


# Hand-computed when the targets were set, rounded to three digits.
@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        ("1x32+256", "ms_per_output_step", 3.31),
        ("32x128+256", "output_tokens_per_second", 8330),
        ("256x128+256", "output_tokens_per_second", 28000),
        ("64x1024+256", "output_tokens_per_second", 6280),
        ("512x512+256", "total_tokens_per_second", 40400),
        ("16x4096+1", "total_tokens_per_second", 53200),
    ],
)
def test_bound_of_qwen3_8b_on_an_h200(shape, name, expected):
    ceilings = Ceilings.of("NVIDIA H200")
    assert ceilings is not None
    parsed = Shape.parse(shape)
    seconds = bound_seconds(costs_of("qwen3_8b.json"), ceilings, parsed, max_rows=256)
    assert offline.rates(parsed, seconds)[name] == pytest.approx(expected, rel=2e-3)


def test_tied_embeddings_are_read_once_as_the_vocabulary_matrix():
    tied = costs_of("qwen3_8b.json", tie_word_embeddings=True)
    assert tied == costs_of("qwen3_8b.json")


def test_a_device_that_nobody_measured_has_no_ceilings():
    assert Ceilings.of("cpu") is None
