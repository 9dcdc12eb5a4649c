"""The plan of pools whose size the temporaries decide: probed on a few layers, checked on all."""

import dataclasses

import jax
import pytest

from engine.execution import plan, startup
from engine.execution.plan import PROBE_SLACK
from tests.execution import toys

MIB = 2**20


def profile_that_leaves_pools_to_the_plan(monkeypatch, memory_bytes: int) -> None:
    real = startup.device_profile

    def profile(device, config):
        return dataclasses.replace(real(device, config), pool_bytes=None, memory_bytes=memory_bytes)

    monkeypatch.setattr(startup, "device_profile", profile)


def start_deep_llama(num_layers: int):
    config = dataclasses.replace(
        toys.CONFIG, num_pages=None, memory_fraction=1.0, deterministic=True
    )
    model = toys.model_of(toys.LLAMA, num_hidden_layers=num_layers)
    return startup.start(config, model, None, lambda *_: None)


@pytest.fixture
def probed(monkeypatch, tmp_path):
    """(models probed or compiled in order, with their keys), where no start was before."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    seen = []
    real = startup.compile_programs

    def compile_programs(shapes, keys, *more):
        seen.append((shapes.model.config.num_layers, keys))
        return real(shapes, keys, *more)

    monkeypatch.setattr(startup, "compile_programs", compile_programs)
    yield seen
    jax.config.update("jax_compilation_cache_dir", before)


def test_probes_stand_for_a_deeper_model(monkeypatch, probed):
    profile_that_leaves_pools_to_the_plan(monkeypatch, PROBE_SLACK + 16 * MIB)
    runner = start_deep_llama(num_layers=5)
    try:
        (probe_layers, probe_keys), (final_layers, final_keys) = probed
        assert (probe_layers, final_layers) == (startup.PROBE_LAYERS, 5)
        # One program, with every part that another one has.
        (probe,) = probe_keys
        assert (probe.head, probe.sampler) == ("score", "full")
        assert probe.tokens == max(key.tokens for key in final_keys)
        assert probe.rows == max(key.rows for key in final_keys)
        assert runner.plan.temporaries >= plan.temporaries_of(runner.programs.steps.values()) > 0
        assert runner.plan.total <= runner.plan.limit
        # One page per slot and position at most: the toy fits whole.
        most = runner.settings.max_slots * runner.settings.max_pages + 2
        assert runner.plan.num_pages == most
    finally:
        runner.close()


def test_second_start_of_the_same_code_probes_nothing(monkeypatch, probed):
    profile_that_leaves_pools_to_the_plan(monkeypatch, PROBE_SLACK + 16 * MIB)
    plans = []
    for _ in range(2):
        runner = start_deep_llama(num_layers=5)
        plans.append(runner.plan)
        runner.close()
    assert [layers for layers, _ in probed] == [startup.PROBE_LAYERS, 5, 5]
    assert plans[0] == plans[1]


def test_first_layers_keep_every_other_size():
    model = toys.model_of(toys.LLAMA, num_hidden_layers=6)
    shallow = model.first_layers(4)
    assert shallow.config == dataclasses.replace(model.config, num_layers=4)
    assert set(shallow.leaves()) < set(model.leaves())
    assert model.first_layers(9).config == model.config
