"""The closed set of programs, the guard that hears compiles, and the swap of weights."""

import dataclasses
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.execution.programs import CompileGuard
from engine.scheduling.schedule import Install
from tests.execution import toys
from tests.execution.toys import LAST_CHUNK, LATE, POISON, schedule_of


@pytest.fixture(scope="module")
def runner():
    run = toys.start(toys.LLAMA)
    yield run
    run.close()


@pytest.fixture
def guard():
    guard = CompileGuard()
    yield guard
    guard.close()


def compile_something(number: int = 0) -> None:
    """A new program every time: the shape and the constant are its own."""
    jax.jit(lambda x: x * number).lower(jax.ShapeDtypeStruct((3,), jnp.int32)).compile()


def install_of(slot: int, ids: list[int]) -> Install:
    return Install(slot, np.array(ids, np.int32), 0, (), (), (), ())


def prompt(runner, slot: int, ids: list[int]) -> int:
    """Prefills a prompt and returns its first id."""
    schedule = schedule_of([(slot, LAST_CHUNK, ids, 0)], installs=(install_of(slot, ids),))
    schedule = on_pages(schedule, slot)
    return int(runner.settle(runner.launch(runner.pack(schedule))).sampled[0, 0])


def on_pages(schedule, slot: int):
    tables = (np.array([[1 + 2 * slot, 2 + 2 * slot]], np.int32),)
    return dataclasses.replace(schedule, page_tables=tables)


# --- programs ---


def test_ladders_programs_are_all_there_and_no_other(runner):
    keys = runner.settings.ladder.keys()
    assert set(runner.programs.steps) == set(keys) == set(runner.programs.findings)
    for key in keys:
        assert runner.programs.step(key) is runner.programs.steps[key]
    had = [name.split(" ", 1) for name in runner.programs.seconds]
    assert {name for verb, name in had if verb in ("compile", "load")} == {
        str(key) for key in (*keys, "install", "fresh")
    }


SECOND_START = """
import sys

import numpy as np

from engine.config import EngineConfig
from engine.core import Core
from engine.request import Request, SamplingParams

sizes = dict(max_rows=2, token_budget=32, max_model_len=64)
core = Core.start(
    EngineConfig(sys.argv[1], load_format="dummy", compilation_cache=sys.argv[2], **sizes)
)
params = SamplingParams(temperature=0.0, ignore_eos=True)
core.submit(Request("a", np.arange(5, 12, dtype=np.int32), params, (), (), 9, 0))
ids = []
while not core.is_idle:
    core.step()
    ids += [int(i) for delta in core.poll() for i in delta.token_ids]
print(sorted({name.split()[0] for name in core.runner.programs.seconds}), ids)
"""


def test_second_start_lowers_nothing_and_answers_the_same(tmp_path):
    # In processes of their own: the folder is a process's, once and for all.
    model = pathlib.Path(__file__).parents[1] / "families" / "qwen3.json"
    command = [sys.executable, "-c", SECOND_START, str(model), str(tmp_path / "xla")]
    said = [subprocess.check_output(command, text=True).splitlines()[-1] for _ in range(2)]
    verbs, ids = zip(*(line.split("] [") for line in said), strict=True)
    assert verbs == ("['compile', 'lower'", "['load'")
    assert ids[0] == ids[1]
    assert ids[0].count(",") == 8


def test_key_without_a_program_is_an_error_with_its_shape(runner):
    key = toys.decode_key(rows=64, width=7)
    with pytest.raises(KeyError, match="no compiled program for decode rows 64 tokens 64 query 1"):
        runner.programs.step(key)


def test_step_that_exceeds_the_ladder_is_refused_before_the_device(runner):
    before = runner.counters.steps.copy()
    rows = [(slot, LATE, [POISON], 3) for slot in range(3)]
    with pytest.raises(ValueError, match="a step of 3 rows exceeds the largest rung 2"):
        runner.pack(schedule_of(rows))
    assert runner.counters.steps == before


def test_runner_refuses_pages_outside_its_pool(runner):
    tables = (np.array([[runner.plan.num_pages, 0]], np.int32),)
    schedule = schedule_of([(0, LAST_CHUNK, [1, 2], 0)], page_tables=tables)
    with pytest.raises(ValueError, match=r"pages must lie in \[0, 10\)"):
        runner.pack(schedule)
    tables = (np.array([[0, 3]], np.int32),)
    with pytest.raises(ValueError, match="owns no page at 0"):
        runner.pack(dataclasses.replace(schedule, page_tables=tables))


# --- guard ---


def test_guard_is_deaf_until_it_is_armed(guard):
    compile_something(101)
    assert (guard.num_own, guard.num_others) == (0, 0)
    guard.check()


def test_compile_inside_a_step_is_a_fault(guard):
    guard.arm()
    with guard.step():
        pass
    with (
        pytest.raises(RuntimeError, match="1 compiles after ready on the engine's thread"),
        guard.step(),
    ):
        compile_something(102)
    assert (guard.num_own, guard.num_others) == (1, 0)


def test_compile_of_another_thread_or_between_steps_is_counted_and_legal(guard):
    guard.arm()
    thread = threading.Thread(target=compile_something, args=(103,))
    with guard.step():
        thread.start()
        thread.join()
    compile_something(105)
    assert (guard.num_own, guard.num_others) == (0, 2)
    guard.check()


def test_compile_of_a_launch_in_a_thread_of_its_own_is_a_fault_in_both(guard):
    guard.arm()
    errors = []

    def launch():
        try:
            with guard.step():
                compile_something(106)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=launch)
    with pytest.raises(RuntimeError, match="1 compiles after ready"), guard.step():
        thread.start()
        thread.join()
    assert (guard.num_own, guard.num_others) == (1, 0) and "1 compiles after ready" in errors[0]
    compile_something(107)
    assert (guard.num_own, guard.num_others) == (1, 1), "the thread's step is over"


def test_closed_guard_hears_nothing(guard):
    guard.arm()
    guard.close()
    compile_something(104)
    assert (guard.num_own, guard.num_others) == (0, 0)
    jax.monitoring.register_event_duration_secs_listener(guard._heard)  # for the fixture


def test_every_program_of_the_ladder_runs_without_a_compile(runner, guard):
    prompt(runner, 0, [1, 2, 3])  # numpy and listener paths of the first call
    guard.arm()
    prompt(runner, 1, [1, 2, 3])
    schedule = on_pages(schedule_of([(1, LATE, [POISON], 3)]), 1)
    runner.settle(runner.launch(runner.pack(schedule)))
    runner.reset_state()
    runner.device_counters()
    assert (guard.num_own, guard.num_others) == (0, 0)


# --- runner ---


def test_both_sides_count_the_same_rows(runner):
    runner.reset_state()
    before = (runner.counters.device_rows, runner.counters.host_rows)
    prompt(runner, 0, [5, 6])
    assert runner.device_counters() == (0, 1)
    runner.settle(runner.launch(runner.pack(on_pages(schedule_of([(0, LATE, [POISON], 2)]), 0))))
    assert runner.device_counters() == (1, 1)
    after = (runner.counters.device_rows, runner.counters.host_rows)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


def test_more_installs_than_one_program_takes_are_written_in_turns(runner):
    runner.reset_state()
    at_once = runner.programs.install_shape.rows
    installs = tuple(install_of(slot, [slot + 1]) for slot in range(at_once + 1))
    schedule = on_pages(schedule_of([(0, LAST_CHUNK, [1], 0)], installs=installs), 0)
    runner.settle(runner.launch(runner.pack(schedule)))
    history = np.asarray(runner.state.history)[: len(installs), 0]
    assert history.tolist() == [install.known_ids[0] for install in installs]


def test_reset_state_is_empty_and_gives_the_old_buffers_back(runner):
    prompt(runner, 0, [1, 2])
    old = runner.state
    runner.reset_state()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert np.asarray(runner.state.num_tokens).tolist() == [0] * 4
    assert np.asarray(runner.state.last_tokens).tolist() == [-1, -1, -1, 0]


def test_new_weights_are_served_without_a_compile(runner, guard):
    first = prompt(runner, 0, [1, 2, 3])
    old, version = runner.params, runner.weights_version
    # The head turned by one row: every sampled id moves by one.
    head = dataclasses.replace(old["head"], kernel=jnp.roll(old["head"].kernel, 1, axis=0))
    head = jax.device_put(head, old["head"].kernel.sharding)
    guard.arm()
    runner.replace_params({**old, "head": head})
    second = prompt(runner, 0, [1, 2, 3])
    assert second == (first + 1) % runner.model.vocab_size
    assert runner.weights_version == version + 1
    assert (guard.num_own, guard.num_others) == (0, 0)
    runner.replace_params(old)
    assert prompt(runner, 0, [1, 2, 3]) == first
    assert runner.weights_version == version + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], r"a new parameter is float32\[.*\] on .*, the compiled one float32\["),
        (lambda x: x.astype(jnp.bfloat16), "a new parameter is bfloat16.*compiled one float32"),
        (lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), "SingleDevice.* compiled one"),
    ],
)
def test_weights_of_another_shape_dtype_or_place_are_refused(runner, change, message):
    old, version = runner.params, runner.weights_version
    with pytest.raises(ValueError, match=message):
        runner.replace_params(jax.tree.map(change, old))
    assert runner.params is old and runner.weights_version == version


def test_weights_of_another_structure_are_refused(runner):
    old = runner.params
    with pytest.raises(ValueError, match="another structure than the compiled ones"):
        runner.replace_params({name: value for name, value in old.items() if name != "head"})
    assert runner.params is old


def test_parameters_are_counted_by_leaf_and_by_weight(runner):
    leaves = jax.tree.leaves(runner.params)
    assert runner.num_param_leaves == len(leaves)
    assert runner.num_parameters == sum(leaf.size for leaf in leaves)


def test_closed_runner_has_no_program_and_no_buffer():
    # A second engine in the process, so that its end cannot touch the first.
    run = toys.start(
        toys.LLAMA, max_rows=1, row_rungs=(1,), deterministic=True, token_budget=4, token_rungs=(4,)
    )
    leaves = jax.tree.leaves((run.params, run.state))
    run.close()
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not hasattr(run, "programs") and run.params is None
