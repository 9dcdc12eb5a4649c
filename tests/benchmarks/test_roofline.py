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


def test_a_mixture_of_experts_is_bound_by_the_experts_that_its_tokens_hit():
    costs, ceilings = costs_of("qwen3_30b_a3b.json"), Ceilings.of("NVIDIA H200")
    assert ceilings is not None
    one = bound_seconds(costs, ceilings, Shape.parse("1x32+256"), max_rows=256)
    assert offline.rates(Shape.parse("1x32+256"), one)["ms_per_output_step"] == pytest.approx(
        1.3, abs=0.05
    )
    expert = 3 * 2048 * 768 * 2  # bytes of gate, up and down
    assert costs.expert_bytes == 48 * 128 * expert
    assert costs.read_bytes(1) - costs.weight_bytes == pytest.approx(48 * 8 * expert)
    # 51.6 of 128 experts are hit by 8 tokens, nearly all by 256.
    assert costs.read_bytes(8) - costs.weight_bytes == pytest.approx(48 * 51.6 * expert, rel=5e-3)
    assert costs.read_bytes(256) == pytest.approx(costs.weight_bytes + costs.expert_bytes, rel=1e-6)


def test_a_latent_cache_is_read_once_for_all_heads():
    costs = costs_of("deepseek_v2_lite.json")
    assert costs.kv_bytes == 27 * (512 + 64) * 2
    assert costs.attention_flops == 27 * 16 * (192 + 128)


def test_tied_embeddings_are_read_once_as_the_vocabulary_matrix():
    tied = costs_of("qwen3_8b.json", tie_word_embeddings=True)
    assert tied == costs_of("qwen3_8b.json")


def test_a_device_that_nobody_measured_has_no_ceilings():
    assert Ceilings.of("cpu") is None
