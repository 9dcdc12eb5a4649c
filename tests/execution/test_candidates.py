"""Which calls of a model are tuned, what is kept of what was measured, and how it is timed."""

import dataclasses
import json
import math
import pathlib

import jax
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.execution import candidates, runner, timing
from engine.execution.candidates import HELD_OUT, TUNED, Job, Measured
from engine.execution.settings import Settings
from kernels import tuning
from kernels.tuning import FORMULA, Table
from models import registry
from models.batch import Tiling

CONFIGS = pathlib.Path(__file__).parents[2] / "benchmarks" / "configs"
PRODUCT = Job("linear.product", {"tokens": 8, "inputs": 256, "outputs": 4096})


def jobs_of(name, *rungs, ops=tuple(TUNED)):
    config = EngineConfig(model=name, row_rungs=rungs, max_rows=rungs[-1])
    profile = runner.device_profile(jax.devices()[0], config)
    tiling = Tiling(kernels="mosaic")
    profile = dataclasses.replace(profile, dtype="bfloat16", page_size=64, tiling=tiling)
    model = registry.of_config(json.loads((CONFIGS / f"{name}.json").read_text()))
    return candidates.jobs_of(model, Settings.of(config, model, profile), ops)


def measured(*seconds, job=PRODUCT):
    return Measured(job, seconds, 1e-6)


# Which calls.


def test_dense_model_asks_for_its_weights_and_its_pages():
    """Of one row they are asked for together with its norms and its attention."""
    found = jobs_of("qwen3_8b", 1, 16)
    sizes = {"queries": 1, "num_kv_heads": 8, "group": 4, "head_dim": 128, "page_size": 64}
    pages = sizes | {"pages": 128, "window": 0}
    assert {(job.op, tuple(job.shape.values())) for job in found} == {
        ("attention.decode", (16, *pages.values())),
        ("attention.decode_times", (1, *pages.values(), 4096)),
        ("linear.product", (8, 4096, 6144)),
        ("linear.product", (16, 4096, 6144)),
        ("linear.parts", (4096, 4096)),
        ("linear.parts", (12288, 4096)),
        ("linear.gated", (4096, 24576)),
        ("linear.normed", (1, 1, 4096, 6144)),
        ("linear.normed", (1, 2, 4096, 24576)),
    }


def test_experts_are_tuned_and_a_router_is_not():
    found = jobs_of("qwen3_30b_a3b", 256, ops=("moe.experts", "linear.parts"))
    assert [(job.op, tuple(job.shape.values())) for job in found] == [
        ("linear.parts", (4096, 2048)),
        ("moe.experts", (256, 128, 8, 2048, 768)),
    ]


def test_latent_model_is_tuned_too():
    (found,) = jobs_of("deepseek_v2_lite", 4, ops=("mla.decode",))
    assert found.shape == {
        "rows": 4, "queries": 1, "num_heads": 16, "latent": 512, "page_size": 64, "pages": 128
    }  # fmt: skip


def test_six_shapes_are_held_out_and_nothing_is_kept_for_them():
    assert len(HELD_OUT) == 6
    kept = [tuning.read(file) for file in tuning.FOLDER.glob("*.json")]
    assert kept
    for op, shape in HELD_OUT:
        job = Job(op, shape)
        assert tuple(shape) == tuning.OPS[op].shape
        assert len(job.candidates) > 1 and job.layer_bytes > 2**20
        programs = timing.programs_of(job)
        assert timing._traced(job, programs, job.candidates[0]), "the kernel declines"
        for table in kept:
            assert (op, shape) not in [(one.op, one.shape) for one in table.entries]


# What is kept.


@pytest.mark.parametrize(
    ("seconds", "best", "loss"),
    [
        ((1.0, 0.5), 1, 1.0),
        ((1.0, 0.96), 1, 0.0417),
        ((1.0, 0.98), 0, 0.0204),
        ((1.0, 2.0), 0, 0.0),
        ((1.0, math.inf), 0, 0.0),
    ],
)
def test_formula_stays_unless_another_choice_gains_enough(seconds, best, loss):
    found = measured(*seconds)
    assert found.best == PRODUCT.candidates[best]
    assert found.loss == pytest.approx(loss, abs=1e-4)


def test_choice_that_pays_is_kept_and_goes_when_it_pays_no_more():
    table = measured(3e-6, 2e-6).kept_in(Table("a device"), "then")
    (entry,) = table.entries
    assert (entry.choice, entry.us, entry.formula_us) == (PRODUCT.candidates[1], 2.0, 3.0)
    assert (
        table.choice("linear.product", PRODUCT.shape, lambda _: PRODUCT.candidates)
        == (PRODUCT.candidates[1])
    )
    assert measured(2e-6, 2e-6).kept_in(table, "later").entries == ()


# How it is timed.


def test_samples_of_the_candidates_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 0.0)
    asked = []
    calls = [lambda name=name: asked.append(name) or np.zeros(1) for name in "ab"]
    samples = timing._samples([calls[0], None, calls[1]])
    assert [len(one) for one in samples] == [timing._SAMPLES, 0, timing._SAMPLES]
    assert "".join(asked).endswith("aaabbb" * timing._SAMPLES)


@dataclasses.dataclass
class Chain:
    """Stands for a program of two layers."""

    num_layers: int = 2
    x: str = "x"

    def arrays(self):
        return (np.float32(2),)


def test_candidate_that_is_wrong_or_not_compiled_counts_as_endless(monkeypatch):
    monkeypatch.setattr(
        timing, "_samples", lambda calls: [call and [4.0, 6.0, 9.0] for call in calls]
    )
    right, near, wrong = (lambda x: x), (lambda x: x * 1.001), (lambda x: x * 1.1)
    nothing = lambda x: x * np.nan  # noqa: E731
    ready = [[right], [near], [wrong], [None], [nothing], []]
    assert timing._timed([Chain()], ready) == [3.0, 3.0, *[math.inf] * 4]
    with pytest.raises(RuntimeError, match="formula's choice was not compiled"):
        timing._timed([Chain()], [[None], [right]])
    both = [[right, right], [near, wrong], [right, near]]
    assert timing._timed([Chain(), Chain()], both) == [6.0, math.inf, 6.0]


def test_every_candidate_is_traced_with_its_own_settings():
    (program,) = timing.programs_of(PRODUCT)
    assert program.num_layers == 36
    texts = []
    for choice in PRODUCT.candidates:
        (traced,) = timing._traced(PRODUCT, [program], choice)
        texts.append(str(traced.jaxpr))
    assert len(set(texts)) == 2


ONE_TOKEN = (
    Job("linear.normed", {"tokens": 1, "halves": 1, "inputs": 256, "outputs": 4096}),
    Job("linear.normed", {"tokens": 1, "halves": 2, "inputs": 256, "outputs": 256}),
    Job(
        "attention.decode_times",
        {**HELD_OUT[0][1], "rows": 1, "group": 4, "head_dim": 128, "outputs": 4096},
    ),
)


@pytest.mark.parametrize("job", ONE_TOKEN, ids=lambda job: job.op)
def test_one_token_is_timed_with_what_makes_it(job):
    assert tuple(job.shape) == tuning.OPS[job.op].shape
    programs = timing.programs_of(job)
    forms = [choice.form for choice in job.candidates]
    assert forms[:4] == ["mosaic"] * 2 + ["registers"] * 2
    traced = [timing._traced(job, programs, choice) for choice in job.candidates]
    assert len({str(one.jaxpr) for (one,) in traced}) == len(job.candidates)
    assert job.layer_bytes > 2 * programs[0].layer[-1].size - 1


def test_every_call_of_a_chain_is_made():
    """XLA leaves out a call whose result nobody reads."""
    x, weight = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 64), (64, 64)))
    call = lambda x, layer, *, choice: x @ layer[0]  # noqa: E731
    program = timing._Program(call, x, (weight,), (), num_layers=3)
    text = timing._compiled(program.traced(FORMULA)).as_text()
    assert text.count(" dot(") == 3
    assert len(jax.tree.leaves(program.traced(FORMULA).out_info)) == 3


def test_job_that_the_kernel_declines_is_not_measured():
    job = Job("linear.product", {"tokens": 8, "inputs": 256, "outputs": 1024})
    assert timing._traced(job, timing.programs_of(job), job.candidates[0]) is None


def test_weight_that_serves_any_number_of_tokens_is_timed_with_few_and_many():
    job = Job("linear.parts", {"inputs": 1024, "outputs": 1024})
    assert [program.x.shape for program in timing.programs_of(job)] == [(8, 1024), (64, 1024)]


def test_rows_of_an_attention_job_own_their_pages():
    shape = dict(HELD_OUT[0][1])
    (program,) = timing.programs_of(Job("attention.decode", shape))
    table, positions, lens = program.shared
    owned = table[table > 0]
    assert lens.tolist() == [512, 1024, 1536, 2048] and positions[:, 0].tolist() == [
        511,
        1023,
        1535,
        2047,
    ]
    assert sorted(owned) == list(range(1, 1 + sum(lens // 64)))
    assert program.layer[0].shape == (len(owned) + 1, 2, 2, 64, 64)


def test_machine_without_kernels_says_where_to_go():
    with pytest.raises(RuntimeError, match=r"is cpu, which runs none.*machine with a Hopper GPU"):
        timing.DeviceBench()
