"""A compiled program is kept under what tells it apart, and loaded; a broken file is no program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from engine.execution import kept
from kernels.tuning import TUNING, Choice, Entry, Table

ABOUT = ("no options",)


SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """An empty one, which jax's own cache is in too."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in (SETTINGS | {"jax_compilation_cache_dir": str(tmp_path)}).items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def trace(scale: float = 2.0, dtype=jnp.float32, **options):
    """Of a function that takes a donated state and a number, like a step."""

    def step(state, by):
        return {"sum": state["sum"] + scale * by}, by + 1

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"sum": jax.ShapeDtypeStruct((4,), dtype)}, jax.ShapeDtypeStruct((), dtype)
    return jax.jit(step, out_shardings=here, **options).trace(*shapes)


def made(traced):
    file = kept.file_of(traced, ABOUT)
    assert file is not None
    kept.compiled(traced.lower(), file, {})
    return file


def load(file, traced):
    trees = (jax.tree.structure(info) for info in (traced.args_info, traced.out_info))
    return kept.load(file, *trees, jax.devices()[:1])


def test_loaded_program_computes_and_donates_like_the_compiled_one(folder):
    traced = trace(donate_argnums=(0,))
    file = made(traced)
    assert [one.name for one in folder.iterdir() if one.suffix == ".program"] == [file.name]
    program = load(file, trace(donate_argnums=(0,)))
    assert program is not None
    state = {"sum": jnp.arange(4.0)}
    (out, following) = program(state, jnp.float32(3))
    np.testing.assert_array_equal(out["sum"], np.arange(4.0) + 6)
    assert following == 4
    assert state["sum"].is_deleted()
    assert program.memory_analysis().argument_size_in_bytes == 20


def test_the_same_program_has_the_same_name():
    assert kept.file_of(trace(), ABOUT) == kept.file_of(trace(), ABOUT)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: kept.file_of(trace(scale=3.0), ABOUT), id="body"),
        pytest.param(lambda: kept.file_of(trace(dtype=jnp.bfloat16), ABOUT), id="dtype"),
        pytest.param(lambda: kept.file_of(trace(donate_argnums=(0,)), ABOUT), id="donation"),
        pytest.param(lambda: kept.file_of(trace(), ("options",)), id="options"),
    ],
)
def test_another_program_has_another_name(other):
    assert other() != kept.file_of(trace(), ABOUT)


def test_settings_and_flags_are_part_of_the_name(monkeypatch):
    before = kept.file_of(trace(), ABOUT)
    with jax.numpy_dtype_promotion("strict"):
        assert kept.file_of(trace(), ABOUT) == before, "a setting of tracing shows in the jaxpr"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert kept.file_of(trace(), ABOUT) != before


def test_precision_setting_is_part_of_the_name():
    before = kept.file_of(trace(), ABOUT)
    old = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert kept.file_of(trace(), ABOUT) != before
    finally:
        jax.config.update("jax_default_matmul_precision", old)


def test_what_was_measured_for_the_device_is_part_of_the_name():
    shape = {"inputs": 4096, "outputs": 4096}
    choice = Choice.of("mosaic", depth=64, splits=4)
    measured = Entry("linear.parts", shape, choice, 9.0, 9.9, "2026-12-01")
    names = []
    for entries in ((), (), (measured,), (dataclasses.replace(measured, us=8.0),)):
        with TUNING.using(Table(jax.devices()[0].device_kind, entries)):
            names.append(kept.file_of(trace(), ABOUT))
    assert names[0] == names[1] == kept.file_of(trace(), ABOUT)
    assert len(set(names)) == 3


def test_program_with_array_constants_is_not_kept():
    table = np.arange(3)
    traced = jax.jit(lambda x: x + jnp.asarray(table)).trace(jax.ShapeDtypeStruct((3,), jnp.int32))
    assert traced.jaxpr.consts
    assert kept.file_of(traced, ABOUT) is None


def test_without_a_cache_nothing_is_kept():
    jax.config.update("jax_compilation_cache_dir", None)
    assert kept.file_of(trace(), ABOUT) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_broken_file_is_no_program(damage):
    traced = trace()
    file = made(traced)
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes({"cut": content[:-7], "flipped": flipped, "empty": b""}[damage])
    assert load(file, traced) is None


def test_what_jax_found_in_its_own_cache_is_not_written_again(folder):
    file = kept.file_of(trace(), ABOUT)
    assert file is not None
    made(trace())
    assert file.exists() and any(one.name.startswith("jit_step") for one in folder.iterdir())
    file.unlink()
    kept.compiled(trace().lower(), file, {})
    assert not file.exists()


def test_what_jax_still_had_in_memory_is_not_written_again(folder):
    file = made(trace())  # what is compiled of it now on comes from jax's cache
    again = trace()
    for number in range(2):
        file.unlink(missing_ok=True)
        kept.compiled(again.lower(), file, {})
        assert not file.exists(), number


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_file_that_others_can_write_is_not_read(folder, whose):
    traced = trace()
    file = made(traced)
    assert load(file, traced) is not None
    {"file": file, "folder": folder}[whose].chmod(0o770)
    assert load(file, traced) is None


def test_file_of_another_user_is_not_read(monkeypatch):
    traced = trace()
    file = made(traced)
    monkeypatch.setattr(kept.os, "getuid", lambda: 12345)
    assert load(file, traced) is None


def test_folder_that_cannot_be_written_costs_no_start(folder, caplog):
    traced = trace()
    file = kept.file_of(traced, ABOUT)
    assert file is not None
    program = kept.compiled(traced.lower(), folder / "gone" / file.name, {})
    assert program is not None and not file.exists()
    assert "the next start will be slower" in caplog.text
