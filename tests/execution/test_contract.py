"""Which of the two proofs refuses which broken step, and with what reason."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from engine.execution import check, contract, packing
from engine.execution import step as steps
from engine.execution.settings import choose_lane
from kernels.attention import api
from models import decoder, registry
from models.batch import Tiling
from models.layers import Rows
from tests.execution import toys
from tests.execution.toys import LLAMA, llama_with

STALE = [np.array([3, 4], np.int32)]
UNREAD = "the hidden states do not depend on token_ids"
EQUAL = "run B (poisoned ids) equals run A in rows [0, 1]: their ids are not read"


@pytest.fixture(scope="module")
def runner():
    run = toys.start(LLAMA)
    yield run
    run.close()


@pytest.fixture(scope="module")
def key(runner):
    return runner.settings.ladder.keys()[0]


def structural(runner, key, registration) -> list[str]:
    """Reasons of the structural proof of one program, which is traced and never compiled."""
    jaxpr = toys.jaxpr_of(runner, registration, key)
    findings = contract.check_structure(key, jaxpr, runner.shapes.num_groups)
    assert all(finding.proof == "structural" for finding in findings)
    return [finding.reason for finding in findings]


def proofs(runner, key, registration) -> list[tuple[str, str]]:
    """(proof, reason) of everything that refuses one program."""
    run = toys.runner_of(runner, registration, key)
    return [(finding.proof, finding.reason) for finding in contract.prove_program(run, key)]


def kernel_findings(runner, registration) -> list[str]:
    """Reasons of the structural proof of every program with the GPU's kernels in it."""
    model = toys.model_of(registration, head_dim=64)
    pools = model.cache_spec(64, "bfloat16").pool_shapes(10)
    shapes = dataclasses.replace(
        runner.shapes,
        model=model,
        tiling=Tiling(kernels="mosaic"),
        state=dataclasses.replace(runner.shapes.state, pools=pools),
        dtype="bfloat16",
    )
    keys = runner.settings.ladder.keys()
    return [
        finding.reason
        for key in keys
        for finding in contract.check_structure(key, shapes.step(key).trace().jaxpr, 1)
    ]


def test_programs_with_gpu_kernels_pass_the_structural_proof(runner):
    before = api.decode.counts["mosaic"]
    assert kernel_findings(runner, LLAMA) == []
    assert api.decode.counts["mosaic"] > before


def test_forward_with_gpu_kernels_that_ignores_ids_is_refused(runner):
    assert set(kernel_findings(runner, llama_with(ignoring))) == {UNREAD}


# --- forwards that the structural proof refuses ---


def ignoring(config, params, cache, token_ids, batch, *, tap):
    return decoder.forward(config, params, cache, jnp.zeros_like(token_ids), batch, tap=tap)


def closing_over(config, params, cache, token_ids, batch, *, tap):
    del token_ids
    return decoder.forward(config, params, cache, jnp.asarray(STALE[0]), batch, tap=tap)


def adding_closed_over(config, params, cache, token_ids, batch, *, tap):
    token_ids = jax.jit(lambda ids: jax.jit(lambda x: x + STALE[0])(ids))(token_ids)
    return decoder.forward(config, params, cache, token_ids, batch, tap=tap)


def adding_closed_over_in_a_branch(config, params, cache, token_ids, batch, *, tap):
    token_ids = jax.lax.cond(
        token_ids[0] > 0, lambda ids: ids + STALE[0], lambda ids: ids, token_ids
    )
    return decoder.forward(config, params, cache, token_ids, batch, tap=tap)


def asking_the_host(config, params, cache, token_ids, batch, *, tap):
    shape = jax.ShapeDtypeStruct(token_ids.shape, token_ids.dtype)
    token_ids = jax.pure_callback(lambda ids: ids, shape, token_ids)
    return decoder.forward(config, params, cache, token_ids, batch, tap=tap)


def telling_the_host(config, params, cache, token_ids, batch, *, tap):
    jax.jit(lambda ids: io_callback(lambda _: None, None, ids))(token_ids)
    return decoder.forward(config, params, cache, token_ids, batch, tap=tap)


@pytest.mark.parametrize(
    ("forward", "reasons"),
    [
        (ignoring, [UNREAD]),
        (closing_over, [UNREAD, "the step closes over integer arrays of shapes [(2,)]"]),
        (adding_closed_over, ["the step closes over integer arrays of shapes [(2,)]"]),
        (adding_closed_over_in_a_branch, ["the step closes over integer arrays of shapes [(2,)]"]),
        (asking_the_host, ["the step calls back to the host: ['pure_callback']"]),
        (telling_the_host, ["the step calls back to the host: ['io_callback']"]),
    ],
)
def test_structural_proof_refuses_a_forward(runner, key, forward, reasons):
    assert structural(runner, key, llama_with(forward)) == reasons


def test_structural_proof_accepts_the_step_it_is_meant_for(runner):
    for key in runner.programs.steps:
        assert structural(runner, key, LLAMA) == []


# --- steps that the structural proof refuses ---


def ids_range(runner, key) -> tuple[int, int]:
    places = packing.batch_ranges(key, runner.shapes.num_groups).places
    name, start, shape = places[-1]
    assert name == "prompt_ids"
    return start, start + shape[0]


def unpack_with(change):
    """`unpack` whose Packed a `change(packed, flat, ids)` has touched."""

    def unpack(key, num_groups, flat, **groups):
        ids, packed = packing.unpack(key, num_groups, flat, **groups)
        return change(ids, packed, flat)

    return unpack


def test_prompt_ids_sliced_twice_are_refused(runner, key, monkeypatch):
    start, stop = ids_range(runner, key)

    def twice(ids, packed, flat):
        return ids, dataclasses.replace(packed, kinds=jax.lax.slice(flat, (start,), (stop,)))

    monkeypatch.setattr(steps, "unpack", unpack_with(twice))
    sliced = [(start, stop)] * 2
    assert f"the host ids at [{start}, {stop}) are sliced as {sliced}" in structural(
        runner, key, LLAMA
    )


def test_slice_that_reaches_into_the_prompt_ids_is_refused(runner, key, monkeypatch):
    start, stop = ids_range(runner, key)

    def overlapping(ids, packed, flat):
        kinds = jax.lax.slice(flat, (start - 1,), (start + 1,))
        return ids, dataclasses.replace(packed, kinds=kinds)

    monkeypatch.setattr(steps, "unpack", unpack_with(overlapping))
    (reason,) = structural(runner, key, LLAMA)
    assert reason.startswith(f"the host ids at [{start}, {stop}) are sliced as [(")
    assert f"({start - 1}, {start + 1})" in reason


def test_prompt_ids_read_by_another_operation_are_refused(runner, key, monkeypatch):
    def gathering(ids, packed, flat):
        del ids
        start, stop = ids_range(runner, key)
        return flat[jnp.arange(start, stop, dtype=jnp.int32)], packed

    monkeypatch.setattr(steps, "unpack", unpack_with(gathering))
    reasons = structural(runner, key, LLAMA)
    assert any("only by static slices" in reason for reason in reasons)


def test_host_ids_that_leave_unpack_twice_are_refused(runner, key, monkeypatch):
    def twins(ids, packed, flat):
        del flat
        return ids, dataclasses.replace(packed, kinds=packed.kinds + 0 * ids)

    monkeypatch.setattr(steps, "unpack", unpack_with(twins))
    assert structural(runner, key, LLAMA) == ["unpack returns the host ids a second time"]


def toy_step(unpack):
    """A step of the named functions alone, whose unpack also returns what it likes."""

    def step(flat):
        ids, others = steps._named("unpack", unpack)(flat)
        token_ids = steps._named("resolve_ids", lambda ids: ids + 1)(ids)
        hidden = steps._named("forward", lambda ids: ids.astype(jnp.float32))(token_ids)
        return hidden, [other + 1 for other in others]

    return step


def toy_reasons(unpack) -> list[str]:
    key = toys.decode_key()
    size = packing.batch_ranges(key, 1).size
    jaxpr = jax.jit(toy_step(unpack)).trace(jnp.zeros((size,), jnp.int32)).jaxpr
    return [finding.reason for finding in contract.check_structure(key, jaxpr, 1)]


def sliced_ids(flat):
    return jax.lax.slice(flat, (flat.shape[0] - 2,), flat.shape)


def test_toy_step_itself_is_accepted():
    assert toy_reasons(lambda flat: (sliced_ids(flat), [])) == []


def test_packed_batch_that_leaves_unpack_whole_is_refused():
    reasons = toy_reasons(lambda flat: (sliced_ids(flat), [flat]))
    assert reasons == ["unpack returns the packed batch"]


def test_packed_batch_handed_on_inside_unpack_is_refused():
    def unpack(flat):
        return sliced_ids(flat), [jax.jit(lambda x: x * 2)(flat)]

    assert toy_reasons(unpack) == ["unpack reads the packed batch by jit, only by static slices"]


def test_packed_batch_read_beside_unpack_is_refused(runner, key, monkeypatch):
    lay_out, flats = steps.lay_out, []
    original = steps._named

    def recording(name, function):
        jitted = original(name, function)
        if name != "unpack":
            return jitted
        return lambda flat: flats.append(flat) or jitted(flat)

    def shifted(key, tiling, packed, num_tokens, tables):
        return lay_out(key, tiling, packed, num_tokens + flats[-1][0], tables)

    monkeypatch.setattr(steps, "_named", recording)
    monkeypatch.setattr(steps, "lay_out", shifted)
    (reason,) = structural(runner, key, LLAMA)
    assert reason.startswith("the packed batch is read by ['unpack', ")


def bypass(monkeypatch, forward_of):
    """A step whose forward gets the host's ids: forward_of(named, function, prompt ids)."""
    original, host_ids = steps._named, []

    def named(name, function):
        jitted = original(name, function)
        if name == "unpack":

            def unpack(flat):
                ids, packed = jitted(flat)
                host_ids.append(ids)
                return ids, packed

            return unpack
        return forward_of(original, function, host_ids) if name == "forward" else jitted

    monkeypatch.setattr(steps, "_named", named)


def test_host_ids_beside_the_resolved_ones_are_refused(runner, key, monkeypatch):
    def forward_of(named, function, host_ids):
        return named(
            "forward",
            lambda params, cache, ids, batch: function(params, cache, ids + host_ids[-1], batch),
        )

    bypass(monkeypatch, forward_of)
    assert structural(runner, key, LLAMA) == [
        "host ids are read by ['resolve_ids', 'forward'], only resolve_ids may read them"
    ]


def test_host_ids_instead_of_the_resolved_ones_are_refused(runner, key, monkeypatch):
    def forward_of(named, function, host_ids):
        forward = named("forward", function)
        return lambda params, cache, ids, batch: forward(params, cache, host_ids[-1], batch)

    bypass(monkeypatch, forward_of)
    assert structural(runner, key, LLAMA) == [
        "host ids are read by ['resolve_ids', 'forward'], only resolve_ids may read them",
        "resolved ids are read by [], only ['forward'] may read them",
        UNREAD,
    ]


def test_host_ids_that_nothing_resolves_are_refused(runner, key, monkeypatch):
    original = steps._named

    def named(name, function):
        jitted = original(name, function)
        if name != "resolve_ids":
            return jitted
        return lambda ids, *rest: jitted(jnp.ones_like(ids), *rest)

    monkeypatch.setattr(steps, "_named", named)
    assert structural(runner, key, LLAMA) == [
        "host ids are read by [], only resolve_ids may read them"
    ]


def test_resolved_ids_read_beside_the_forward_are_refused(runner, key, monkeypatch):
    advance = steps.advance
    seen = []
    original = steps._named

    def named(name, function):
        jitted = original(name, function)
        if name != "resolve_ids":
            return jitted

        def resolve(*args):
            seen.append(jitted(*args))
            return seen[-1]

        return resolve

    def keeping(state, cache, packed, accepted, counts):
        state = advance(state, cache, packed, accepted, counts)
        return dataclasses.replace(state, counters=state.counters + seen[-1].token_ids[:2])

    monkeypatch.setattr(steps, "_named", named)
    monkeypatch.setattr(steps, "advance", keeping)
    (reason,) = structural(runner, key, LLAMA)
    assert reason.startswith("resolved ids are read by ['forward', ")


def test_step_without_a_named_function_is_refused(runner, key, monkeypatch):
    original = steps._named
    monkeypatch.setattr(
        steps,
        "_named",
        lambda name, function: original("embed" if name == "resolve_ids" else name, function),
    )
    assert structural(runner, key, LLAMA) == [
        "the step has 0 inner functions named 'resolve_ids', needs one"
    ]


# --- donation and parameters ---


def donation(function, num_params: int = 1, **options) -> list[str]:
    """Reasons against a program of (params, state), the state of two leaves."""
    arguments = [jnp.ones((3,)), {"a": jnp.ones((4,)), "b": jnp.ones((5,))}]
    compiled = jax.jit(function, keep_unused=True, **options).lower(*arguments).compile()
    findings = contract.check_donation(toys.decode_key(), compiled, num_params, arguments[1])
    return [finding.reason for finding in findings]


def test_state_updated_in_place_is_accepted_leaf_by_leaf():
    assert donation(lambda p, s: jax.tree.map(lambda x: x + 1, s), donate_argnums=1) == []


def test_state_that_is_not_donated_is_refused_leaf_by_leaf():
    assert donation(lambda p, s: jax.tree.map(lambda x: x + 1, s)) == [
        "state leaf ['a'] is not updated in place",
        "state leaf ['b'] is not updated in place",
    ]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_one_leaf_of_another_dtype_is_refused_by_its_path():
    def step(params, state):
        return state | {"b": state["b"].astype(jnp.bfloat16)}

    assert donation(step, donate_argnums=1) == ["state leaf ['b'] is not updated in place"]


def test_leaf_that_lands_in_another_parameters_buffer_is_refused():
    assert donation(
        lambda p, s: jax.tree.map(lambda x: x + 1, s), num_params=2, donate_argnums=1
    ) == [
        "state leaf ['a'] is not updated in place",
        "state leaf ['b'] is not updated in place",
    ]


def returning_other_pools(config, params, cache, token_ids, batch, *, tap):
    hidden, cache = decoder.forward(config, params, cache, token_ids, batch, tap=tap)
    pools = jax.tree.map(lambda pool: pool.astype(jnp.bfloat16), cache.pools)
    return hidden, dataclasses.replace(cache, pools=pools)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_forward_that_returns_a_fresh_pool_is_refused_and_never_run(runner, key):
    assert proofs(runner, key, llama_with(returning_other_pools)) == [
        ("structural", "state leaf .pools[0][0] is not updated in place"),
        ("dynamic", "not run: the state is not donated"),
    ]


def test_parameter_that_no_program_reads_is_refused_by_its_path(runner, key):
    jaxpr = toys.jaxpr_of(runner, llama_with(without_layers), key)
    findings = contract.check_parameters(key, jaxpr, runner.shapes.params)
    assert [(finding.proof, finding.reason) for finding in findings] == [
        ("structural", f"parameter ['layers']['0']{leaf} is never read")
        for leaf in (
            "['down'].kernel",
            "['gate_up'].kernel",
            "['o'].kernel",
            "['qkv'].kernel",
            "['vectors']",
        )
    ]


def without_layers(config, params, cache, token_ids, batch, *, tap):
    """Embeds and norms: no layer runs."""
    del tap, batch
    hidden = params["embed"].kernel[token_ids]
    return hidden * params["norm"][None], cache


# --- forwards that only the three runs refuse ---


def multiplying_by_zero(config, params, cache, token_ids, batch, *, tap):
    params = {**params, "embed": Rows(kernel=params["embed"].kernel * 0)}
    return decoder.forward(config, params, cache, token_ids, batch, tap=tap)


def keeping_a_stale_copy(config, params, cache, token_ids, batch, *, tap):
    """Writes its first ids into the trash page and embeds those ever after."""
    pool = cache.pools[0][0]
    num_tokens = token_ids.shape[0]
    kept = pool[0, 0, 0, 0, :num_tokens].astype(jnp.int32)
    token_ids = jnp.where(kept > 0, kept, token_ids)
    hidden, cache = decoder.forward(config, params, cache, token_ids, batch, tap=tap)
    pool = cache.pools[0][0].at[0, 0, 0, 0, :num_tokens].set(token_ids.astype(jnp.float32))
    return hidden, dataclasses.replace(cache, pools=((pool,),))


def carrying_to_nowhere(config, params, cache, token_ids, batch, *, tap):
    """The ids are the carry of a loop whose other carry never looks at them."""

    def body(_, carry):
        ids, embedded = carry
        return ids + 1, embedded + 1

    _, embedded = jax.lax.fori_loop(0, 3, body, (token_ids, jnp.zeros_like(token_ids)))
    return decoder.forward(config, params, cache, embedded, batch, tap=tap)


def losing_ids_in_an_unknown_operation(config, params, cache, token_ids, batch, *, tap):
    """A while loop counts as reading all it is given."""

    def body(carry):
        return carry[0], carry[1] + 1

    def is_going(carry):
        return carry[1][0] < 2

    _, embedded = jax.lax.while_loop(is_going, body, (token_ids, jnp.zeros_like(token_ids)))
    return decoder.forward(config, params, cache, embedded, batch, tap=tap)


@pytest.mark.parametrize(
    "forward",
    [
        multiplying_by_zero,
        keeping_a_stale_copy,
        carrying_to_nowhere,
        losing_ids_in_an_unknown_operation,
    ],
)
def test_only_the_dynamic_proof_refuses_a_forward_whose_ids_change_nothing(runner, key, forward):
    registration = llama_with(forward)
    assert structural(runner, key, registration) == []
    assert proofs(runner, key, registration) == [("dynamic", EQUAL)]


def test_only_the_dynamic_proof_refuses_a_last_token_of_another_slot(runner, key, monkeypatch):
    def neighbours(vocab_size, prompt_ids, last_tokens, packed, batch):
        last_tokens = jnp.roll(last_tokens, 1)
        return resolve(vocab_size, prompt_ids, last_tokens, packed, batch)

    resolve = steps.resolve_ids
    monkeypatch.setattr(steps, "resolve_ids", neighbours)
    (proof, reason), *others = proofs(runner, key, LLAMA)
    assert proof == "dynamic" and "run C (ids on the device) differ from run A" in reason
    assert {proof for proof, _ in others} <= {"dynamic"}


def test_only_the_dynamic_proof_refuses_ids_taken_from_the_host(runner, key, monkeypatch):
    resolve = steps.resolve_ids

    def host_only(vocab_size, prompt_ids, last_tokens, packed, batch):
        packed = dataclasses.replace(packed, kinds=packed.kinds & ~1)
        return resolve(vocab_size, prompt_ids, last_tokens, packed, batch)

    monkeypatch.setattr(steps, "resolve_ids", host_only)
    reasons = proofs(runner, key, LLAMA)
    assert (
        "dynamic",
        "logprobs of run C (ids on the device) differ from run A in rows [0, 1]",
    ) in (reasons)


def not_finite(config, params, cache, token_ids, batch, *, tap):
    hidden, cache = decoder.forward(config, params, cache, token_ids, batch, tap=tap)
    return jnp.where(token_ids[:, None] > 0, jnp.nan, hidden), cache


def test_dynamic_proof_refuses_what_is_not_finite(runner, key):
    assert ("dynamic", "logprobs of run A are not finite") in proofs(
        runner, key, llama_with(not_finite)
    )


def test_score_program_that_ignores_the_prompt_is_refused(runner):
    score = next(key for key in runner.programs.steps if key.head == "score")
    (finding, *_) = contract.warm_up(
        toys.runner_of(runner, llama_with(multiplying_by_zero), score), score
    )
    assert str(finding) == (
        f"dynamic proof failed for {score}: prompt log-probabilities ignore the prompt ids"
    )


# --- the start ---


def test_engine_of_a_refused_forward_never_becomes_ready(runner, key):
    run = toys.runner_of(runner, llama_with(multiplying_by_zero), key)
    with pytest.raises(contract.ContractError) as refusal:
        contract.prove(run, lambda *_: None)
    assert str(refusal.value) == f"dynamic proof failed for {key}: {EQUAL}"


def test_proofs_leave_an_empty_state_behind(runner):
    contract.prove(runner, lambda *_: None)
    fresh = runner.programs.fresh()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), runner.state, fresh)
    assert all(jax.tree.leaves(same))


def test_every_program_of_a_mixed_ladder_is_proved_with_both_kinds_of_rows(runner):
    for key in runner.programs.steps:
        assert contract.prove_program(runner, key) == []
    num_device, num_host = runner.device_counters()
    assert num_device > 0 and num_host > 0


def test_eager_lane_is_excepted(runner, monkeypatch):
    settings = dataclasses.replace(runner.settings, lane="eager")
    monkeypatch.setattr(runner, "settings", settings)
    before = runner.device_counters()
    stages = []
    contract.prove(runner, lambda *stage: stages.append(stage))
    assert stages == [] and runner.device_counters() == before


# --- treadle check ---


def check_on_the_smallest_ladder(registration, monkeypatch) -> tuple[bool, list[str]]:
    lines = []
    monkeypatch.setattr(check, "_start", lambda registration, _: toys.start(registration))
    return check.check_registration(registration, lines.append), lines


def test_check_reports_every_program_of_a_family():
    lines = []
    assert check.check(["LlamaForCausalLM"], lines.append)
    assert len(lines) == 7 and all("rows" in line for line in lines)
    assert all(line.endswith(": structural holds, dynamic holds") for line in lines)
    assert sum("decode rows" in line for line in lines) == 4
    assert sum("mixed+score" in line for line in lines) == 1


@pytest.mark.parametrize(
    "architecture",
    [
        name
        for name in registry.architectures()
        if name != "LlamaForCausalLM" and registry.get(name).device_token_ids
    ],
)
def test_check_holds_for_every_other_declared_registration(architecture, monkeypatch):
    holds, lines = check_on_the_smallest_ladder(registry.get(architecture), monkeypatch)
    assert holds and len(lines) == 5
    assert all(
        line.startswith(f"{architecture}: ") and line.endswith(": structural holds, dynamic holds")
        for line in lines
    )


def test_check_of_a_registration_with_its_table_on_the_host_says_where_it_is(monkeypatch):
    name = "LlamaHostEmbedForCausalLM"
    holds, lines = check_on_the_smallest_ladder(registry.get(name), monkeypatch)
    assert holds
    assert lines[0] == f"{name}: embed float32[128, 64] stays on the host"
    assert lines[-1] == f"{name}: sync lane: not applicable"
    assert len(lines) == 7
    assert all(line.endswith(": donation and parameters holds") for line in lines[1:-1])


def check_one_program(runner, key, registration, monkeypatch) -> tuple[bool, list[str]]:
    run, lines = toys.runner_of(runner, registration, key), []
    monkeypatch.setattr(run, "close", lambda: None)
    monkeypatch.setattr(check, "_start", lambda *_: run)
    return check.check_registration(registration, lines.append), lines


def test_check_names_the_proof_that_failed(runner, key, monkeypatch):
    holds, lines = check_one_program(runner, key, llama_with(ignoring), monkeypatch)
    assert not holds
    assert lines == [
        f"LlamaForCausalLM: {key}: structural FAILED: {UNREAD}, dynamic FAILED: {EQUAL}"
    ]


def test_check_of_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'NoSuch' is not registered; known: LlamaForCausalLM"):
        check.check(["NoSuch"], print)


def test_undeclared_registration_is_checked_without_a_row_from_the_device(runner, key, monkeypatch):
    undeclared = llama_with(multiplying_by_zero, device_token_ids=False)
    holds, lines = check_one_program(runner, key, undeclared, monkeypatch)
    assert holds and lines == [
        f"LlamaForCausalLM: {key}: donation and parameters holds",
        "LlamaForCausalLM: sync lane: not applicable",
    ]


def test_undeclared_registration_that_was_given_a_device_id_fails_the_check(
    runner, key, monkeypatch
):
    undeclared = dataclasses.replace(LLAMA, device_token_ids=False)
    monkeypatch.setattr(check, "_check_program", lambda *_: True)
    monkeypatch.setattr("engine.execution.runner.Runner.device_counters", lambda _: (3, 1))
    holds, lines = check_one_program(runner, key, undeclared, monkeypatch)
    assert not holds
    assert lines == ["LlamaForCausalLM: sync lane: FAILED: 3 rows came from the device"]


def test_undeclared_registration_runs_on_the_sync_lane_or_refuses():
    model = toys.model_of(dataclasses.replace(LLAMA, device_token_ids=False))
    assert choose_lane(toys.CONFIG, model) == "sync"
    with pytest.raises(ValueError, match="lane is sync: LlamaForCausalLM does not declare"):
        choose_lane(dataclasses.replace(toys.CONFIG, require_overlap=True), model)
