"""Rows made on the host: one argument more in that model's step, none in any other's."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from engine.execution import jaxprs, plan, startup
from engine.execution.packing import unpack_output
from engine.execution.runner import Runner
from engine.scheduling.schedule import Schedule
from models import layers, llama_host_embed
from tests.execution import toys
from tests.execution.toys import DECODE, LAST_CHUNK, LLAMA

PAGES = np.array([[1, 2], [3, 4]], np.int32)

HOST_EMBED = llama_host_embed.REGISTRATION


@pytest.fixture(scope="module")
def runner() -> Runner:
    run = toys.start(HOST_EMBED)
    yield run
    run.close()


@pytest.fixture(scope="module")
def llama_runner() -> Runner:
    run = toys.start(LLAMA)
    yield run
    run.close()


def scene(rows: list) -> Schedule:
    """A step of rows that own two pages each."""
    return toys.schedule_of(rows, page_tables=(PAGES[: len(rows)],))


@pytest.fixture(params=["decode", "mixed"])
def key(request, runner):
    return next(
        one for one in runner.programs.steps if one.is_decode == (request.param == "decode")
    )


def test_forward_reads_the_rows_and_no_ids(runner, key):
    jaxpr = runner.shapes.step(key).trace().jaxpr
    rows = jaxprs.body(jaxpr).invars[-1]
    assert (rows.aval.shape, rows.aval.dtype) == ((key.tokens, 64), np.float32)
    assert jaxprs.readers(jaxpr, rows) == ["forward"]
    token_ids = jaxprs.named_equation(jaxpr, "resolve_ids").outvars[0]
    forward = jaxprs.named_equation(jaxpr, "forward")
    inner = next(jaxprs.sub_jaxprs(forward))
    live = jaxprs.live_inputs(inner, [True] * len(forward.outvars))
    is_live = dict(zip(forward.invars, live, strict=True))
    assert is_live[rows] and not is_live.get(token_ids, False)


def test_every_other_model_keeps_its_arguments(llama_runner):
    for key in llama_runner.programs.steps:
        jaxpr = llama_runner.shapes.step(key).trace().jaxpr
        num_state = len(jax.tree.leaves(llama_runner.state))
        assert len(jaxprs.body(jaxpr).invars) == llama_runner.num_param_leaves + num_state + 1
        schedule = scene([(0, LAST_CHUNK, [5, 6], 0)])
        assert llama_runner.host_rows(schedule, key) == ()
    assert not llama_runner.tables
    assert "host" not in str(llama_runner.plan)


def test_rows_are_those_of_the_ids_then_of_id_zero(runner):
    schedule = scene([(0, DECODE, [5], 2), (1, LAST_CHUNK, [7, 8], 0)])
    packed = runner.pack(schedule)
    (rows,) = packed.host_rows
    assert rows.shape == (8, 64) and rows.dtype == np.float32
    assert (rows == runner.tables["embed"][[5, 7, 8, 0, 0, 0, 0, 0]]).all()
    (again,) = runner.pack(schedule).host_rows
    assert not np.shares_memory(rows, again)


def test_step_equals_that_of_the_model_with_its_table_on_the_device(runner, llama_runner):
    place = llama_runner.params["embed"].kernel.sharding
    table = jax.device_put(runner.tables["embed"], place)
    llama_runner.replace_params(runner.params | {"embed": layers.Rows(table)})
    schedule = scene([(0, LAST_CHUNK, [5, 6, 9], 0), (1, LAST_CHUNK, [7, 8], 0)])
    found = []
    for run in (runner, llama_runner):
        run.reset_state()
        result = run.settle(run.launch(run.pack(schedule)))
        assert run.device_counters() == (0, 2)
        found.append(result)
    for name in ("sampled", "num_new", "faults", "logprobs"):
        assert getattr(found[0], name).tobytes() == getattr(found[1], name).tobytes(), name
    assert not found[0].faults.any() and np.isfinite(found[0].logprobs).all()


def test_other_rows_give_another_output(runner):
    """The rows are merged, not merely received."""
    schedule = scene([(0, LAST_CHUNK, [5, 6, 9], 0)])
    results = []
    for change in (0.0, 1.0):
        runner.reset_state()
        packed = runner.pack(schedule)
        rows = tuple(rows + np.float32(change) for rows in packed.host_rows)
        launch = runner.launch(dataclasses.replace(packed, host_rows=rows))
        results.append(unpack_output(launch.key, np.asarray(launch.output), 1, 3))
    assert results[0].logprobs[0, 0] != results[1].logprobs[0, 0]


# --- memory ---


def test_table_is_on_the_host_alone_and_the_plan_says_so(runner):
    assert set(runner.params) == {"head", "layers", "norm"}
    assert isinstance(runner.tables["embed"], np.ndarray)
    table_bytes = 128 * 64 * 4
    largest = max(key.tokens for key in runner.programs.steps) * 64 * 4
    assert runner.plan.host_tables == table_bytes and runner.plan.host_rows == largest
    without = dataclasses.replace(runner.plan, host_tables=0)
    assert without.total == runner.plan.total
    assert dataclasses.replace(runner.plan, host_rows=0).total == runner.plan.total - largest
    assert runner.plan.weights == plan.tree_bytes(runner.params)
    lines = str(runner.plan).splitlines()
    assert lines[-1].startswith("  tables on the host ")
    assert any(line.startswith("  embeddings sent ") for line in lines)


def test_parameters_are_counted_with_the_table_and_shared_ones_once(runner, llama_runner):
    assert runner.num_parameters == llama_runner.num_parameters
    model = toys.model_of(HOST_EMBED, tie_word_embeddings=True)
    config = dataclasses.replace(toys.CONFIG, eager=True)
    tied = startup.start(config, model, None, lambda *_: None)
    assert tied.num_parameters == runner.num_parameters - 128 * 64
    tied.close()


def test_new_parameters_without_their_table_are_refused(runner):
    with pytest.raises(ValueError) as refusal:
        runner.replace_params(runner.params)
    assert str(refusal.value) == (
        "the new host tables are none, the engine has {'embed': (128, 64)}; give the tables that "
        "belong to the new parameters"
    )
    version, tables = runner.weights_version, {"embed": runner.tables["embed"] * 2}
    runner.replace_params(runner.params, tables)
    assert runner.tables is tables and runner.weights_version == version + 1
