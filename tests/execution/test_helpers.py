"""Steps lowered by other processes are the same programs, proved the same; no helper is needed."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from engine.execution import contract, helper, helpers, remembered
from engine.execution.helpers import Helpers
from engine.execution.programs import Means, compile_programs
from engine.execution.recipes import Recipe
from engine.execution.runner import Runner
from engine.scheduling.schedule import Install
from kernels.tuning import TUNING, Choice, Entry, Table
from models.batch import Tiling
from tests.execution import toys
from tests.execution.toys import DECODE, LAST_CHUNK, LATE, LLAMA, POISON, schedule_of

ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base():
    """A runner whose programs were lowered here."""
    run = toys.start(LLAMA)
    yield run
    run.close()


@pytest.fixture(scope="module")
def pool():
    with Helpers(1, ENVIRONMENT) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path):
    """An empty compilation cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def greedy_keys(base):
    """A decode program and a mixed one."""
    return [key for key in base.programs.steps if key.sampler == "greedy"]


def programs_of(base, means, keys, registration=LLAMA):
    shapes = dataclasses.replace(base.shapes, model=toys.model_of(registration))
    return compile_programs(shapes, keys, base.programs.install_shape, lambda *_: None, means)


def verbs(programs, key):
    return {name.split()[0] for name in programs.seconds if name.endswith(str(key))}


def runner_with(base, programs):
    steps = {**base.programs.steps, **programs.steps}
    programs = dataclasses.replace(programs, steps=steps)
    return Runner(
        base.settings, base.model, base.params, programs, base.shapes, base.plan, base.guard
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still wait to be noticed by its parent."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


# --- the same programs ---


@pytest.fixture(scope="module")
def helped(base, pool):
    return programs_of(base, Means(pool), greedy_keys(base))


def outputs(run):
    """Packed outputs of a prompt, a late row and one from the host."""
    run.reset_state()
    pages = (np.array([[1, 2]], np.int32),)
    install = Install(0, np.array([3, 4, 5], np.int32), 0, (), (), (), ())
    steps = (
        schedule_of([(0, LAST_CHUNK, [3, 4, 5], 0)], installs=(install,), page_tables=pages),
        schedule_of([(0, LATE, [POISON], 3)], page_tables=pages),
        schedule_of([(0, DECODE, [7], 4)], page_tables=pages),
    )
    return [np.asarray(run.launch(run.pack(step)).output) for step in steps]


def test_step_lowered_by_a_helper_gives_the_same_bits(base, helped):
    for key in greedy_keys(base):
        assert verbs(helped, key) == {"help", "lower", "compile"}
    run = runner_with(base, helped)
    for found, expected in zip(outputs(run), outputs(base), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_step_lowered_by_a_helper_passes_both_proofs(base, helped):
    run = runner_with(base, helped)
    for key in greedy_keys(base):
        assert helped.findings[key] == []
        leaves = run.num_param_leaves
        assert not contract.check_donation(key, helped.step(key), leaves, run.state)
        assert not contract.prove_program(run, key)


BAD = """
import dataclasses

import jax.numpy as jnp

from models import llama

GOOD = llama.REGISTRATION


def forward(config, params, cache, token_ids, batch, *, tap):
    return GOOD.forward(config, params, cache, jnp.zeros_like(token_ids), batch, tap=tap)


llama.REGISTRATION = dataclasses.replace(GOOD, forward=forward)
"""


def test_helper_proves_what_it_traced_and_what_fails_is_not_kept(base, folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BAD)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    (key, _) = greedy_keys(base)
    with Helpers(1, ENVIRONMENT | {"PYTHONPATH": paths}) as pool:
        programs = programs_of(base, Means(pool, keeps=True), [key])
    reason = "the hidden states do not depend on token_ids"
    assert [finding.reason for finding in programs.findings[key]] == [reason]
    found = contract.prove_program(runner_with(base, programs), key)
    assert ("structural", reason) in [(finding.proof, finding.reason) for finding in found]
    assert "dynamic" in [finding.proof for finding in found]
    assert "load" not in verbs(programs_of(base, Means(keeps=True), [key]), key)
    assert verbs(programs_of(base, Means(keeps=True), [key]), key) == {"load"}


def test_step_for_a_gpu_is_lowered_as_it_would_be_there(base, pool):
    """With the kernels and choices of the engine's process, which a helper has no device for."""
    heads = {"num_kv_heads": 2, "group": 2, "head_dim": 64}
    sizes = {"rows": 2, "queries": 1, **heads, "page_size": 64, "pages": 2, "window": 0}
    choice = Choice.of("mosaic", splits=1)  # by formula they are two
    entry = Entry("attention.decode", sizes, choice, 1.0, 2.0, "never")
    model = toys.model_of(LLAMA, head_dim=64)
    pools = model.cache_spec(64, "bfloat16").pool_shapes(10)
    shapes = dataclasses.replace(
        base.shapes,
        model=model,
        dtype="bfloat16",
        tiling=Tiling(kernels="mosaic"),
        state=dataclasses.replace(base.shapes.state, pools=pools),
    )
    key, _ = greedy_keys(base)
    recipe = shapes.step(key)
    by_formula = shapes.step(key).trace().lower(lowering_platforms=("cuda",)).as_text()
    with TUNING.using(Table("a GPU", (entry,))):
        job = json.loads(helper.job_of(shapes, key)) | {"platform": "cuda"}
        here = recipe.trace().lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(here) != kernels(by_formula)  # though the layer was traced before
    (future,) = pool.ask([json.dumps(job)])
    made = recipe.imported(future.result().export).trace().lower(lowering_platforms=("cuda",))
    there = made.as_text()
    assert kernels(here) == kernels(there)
    assert sum(kernels(here).values()) >= 3
    num_params, num_state = (len(jax.tree.leaves(one)) for one in recipe.arguments[:2])
    expected = [(num_params + number, number) for number in range(num_state)]
    assert aliases(here) == aliases(there) == expected


def kernels(text: str) -> collections.Counter[str]:
    """Operands and results of a lowered program's kernels."""
    return collections.Counter(re.findall(r"custom_call @mosaic_gpu_v2\(.* : (\(.*)", text))


def aliases(text: str) -> list[tuple[int, int]]:
    """(argument, result) wherever a result of a lowered program takes an argument's place."""
    (arguments,) = re.findall(r"func.func public @main\((.*?)\) ->", text)
    found = re.findall(r"%arg(\d+): (?:(?!%arg).)*?tf.aliasing_output = (\d+)", arguments)
    return [(int(argument), int(result)) for argument, result in found]


# --- helpers that fail ---


@pytest.mark.parametrize(
    ("signal_number", "told"),
    [(signal.SIGKILL, "it ended"), (signal.SIGSTOP, "no answer within 1 s")],
    ids=["killed", "hangs"],
)
def test_engine_does_without_a_helper_that_is_gone(base, caplog, signal_number, told):
    key, _ = greedy_keys(base)
    started = time.monotonic()
    with Helpers(1, ENVIRONMENT, patience_s=1.0) as pool:
        pool.start(1)
        (pid,) = pool.pids
        os.kill(pid, signal_number)
        programs = programs_of(base, Means(pool), [key])
        again = programs_of(base, Means(pool), [key])
    assert verbs(programs, key) <= {"trace", "lower", "load", "compile"}
    assert set(programs.steps) == set(again.steps) == {key}
    assert "a helper failed and is not used any more" in caplog.text
    assert told in caplog.text or "Broken pipe" in caplog.text
    assert not is_alive(pid)
    assert time.monotonic() - started < 60, "two compiles are a few seconds of it"


def test_engine_does_without_helpers_that_cannot_be_started(base, caplog, monkeypatch):
    key, _ = greedy_keys(base)
    monkeypatch.setattr(sys, "executable", "nowhere/python")
    with Helpers(2, ENVIRONMENT) as pool:
        programs = programs_of(base, Means(pool), [key])
        assert pool.number == 0
    assert "only 0 helpers could be started" in caplog.text
    assert set(programs.steps) == {key} and "help" not in verbs(programs, key)


def test_job_that_a_helper_cannot_do_is_done_here_and_the_helper_goes_on(base, pool, caplog):
    key, _ = greedy_keys(base)
    job = json.loads(helper.job_of(base.shapes, key))
    (future,) = pool.ask([json.dumps(job | {"code": "other"})])
    with pytest.raises(helpers.HelperError, match="could not lower a step"):
        future.result()
    assert "the sources have changed since the engine's process was started" in caplog.text
    (future,) = pool.ask([json.dumps(job)])
    assert future.result().findings == []


def test_registration_of_this_process_alone_is_lowered_here(base):
    own = toys.llama_with(LLAMA.forward)
    key, _ = greedy_keys(base)
    with pytest.raises(TypeError, match="is registered in this process alone"):
        helper.job_of(dataclasses.replace(base.shapes, model=toys.model_of(own)), key)
    with Helpers(1, ENVIRONMENT) as pool:
        programs = programs_of(base, Means(pool), [key], own)
        assert pool.pids == []
    assert key in programs.steps and "help" not in verbs(programs, key)


LEFT = """
import os

from engine.execution.helpers import Helpers

helpers = Helpers(1, {"JAX_PLATFORMS": "cpu"})
helpers.start(1)
print(*helpers.pids, flush=True)
os._exit(0)
"""


def test_helper_ends_with_the_process_that_started_it():
    pid = int(subprocess.check_output([sys.executable, "-c", LEFT], text=True))
    deadline = time.monotonic() + 60
    try:
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- kept by what they are made from ---


@pytest.fixture
def traces(monkeypatch):
    """Arguments of the steps that are traced."""
    seen = []
    real = Recipe.trace

    def trace(recipe):
        if len(recipe.arguments) > 2:
            seen.append(recipe.arguments)
        return real(recipe)

    monkeypatch.setattr(Recipe, "trace", trace)
    return seen


def test_what_was_kept_is_loaded_without_a_trace(base, folder, traces):
    keys = greedy_keys(base)
    first = programs_of(base, Means(keeps=True), keys)
    assert len(traces) == len(keys)
    second = programs_of(base, Means(keeps=True), keys)
    assert len(traces) == len(keys)
    assert {verb for key in keys for verb in verbs(first, key)} == {"lower", "compile"}
    assert {verb for key in keys for verb in verbs(second, key)} == {"load"}
    run = runner_with(base, second)
    for found, expected in zip(outputs(run), outputs(base), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_code_that_no_file_is_named_after_is_traced_before_it_is_loaded(
    base, folder, traces, monkeypatch
):
    key, _ = greedy_keys(base)
    own = toys.llama_with(LLAMA.forward)
    for registration, sources in ((own, remembered.CODE), (LLAMA, b"changed")):
        monkeypatch.setattr(remembered, "sources", lambda sources=sources: sources)
        for _ in range(2):
            traces.clear()
            programs = programs_of(base, Means(keeps=True), [key], registration)
            assert len(traces) == 1
        assert verbs(programs, key) == {"trace", "load"}
