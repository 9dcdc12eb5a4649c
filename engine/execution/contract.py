"""The two proofs of the id contract, made at every start: what a step may read, and that it does.

Structural: from the jaxpr of each program, where it is traced, and from its compiled text. A
program that was kept and is loaded had passed the former: no other is kept. Dynamic: three runs of
each program with decode rows on the serving device, with the truth on the host (A), nowhere (B)
and on the device only (C). C must equal A bit for bit and B must differ.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from engine.execution import jaxprs
from engine.execution.buckets import ProgramKey
from engine.execution.packing import Ranges, batch_ranges, pack_install, unpack_output
from engine.execution.sampling import MaskRows
from engine.scheduling.schedule import (
    POISON_ID,
    SAMPLING_COLUMNS,
    Masks,
    RowKind,
    Schedule,
    StepResult,
)

if TYPE_CHECKING:
    from engine.execution.recipes import ProgramShapes
    from engine.execution.runner import Runner

_SCENE_TOKENS = 3
"""Tokens with KV of each row before the warm-up step."""


class ContractError(RuntimeError):
    """A proof failed: the engine must not become ready."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One failed proof of one program."""

    proof: str
    """`structural` or `dynamic`."""
    program: str
    reason: str

    def __str__(self) -> str:
        return f"{self.proof} proof failed for {self.program}: {self.reason}"


def prove(runner: Runner, progress: Callable[[str, float, str], None]) -> None:
    """Makes both proofs for every program of a runner, warms each up, and resets the state.

    The eager lane is excepted: it compiles nothing.

    Raises:
      ContractError: naming every program and reason.
    """
    if runner.settings.lane == "eager":
        return
    programs = runner.programs.steps
    findings: list[Finding] = []
    for done, key in enumerate(programs):
        progress("prove", done / len(programs), str(key))
        findings += prove_program(runner, key)
    _warm_install(runner)
    runner.reset_state()
    progress("prove", 1.0, f"{len(programs)} programs")
    if findings:
        raise ContractError("\n".join(str(finding) for finding in findings))


def prove_program(runner: Runner, key: ProgramKey) -> list[Finding]:
    """Both proofs of one program; an undeclared registration is only warmed up."""
    undonated = check_donation(
        key, runner.programs.step(key), runner.num_param_leaves, runner.state
    )
    findings = [*undonated, *runner.programs.findings[key]]
    if undonated:
        # What such a program returns may not even have the shape of a state.
        return [*findings, Finding("dynamic", str(key), "not run: the state is not donated")]
    return findings + warm_up(runner, key)


def check_traced(key: ProgramKey, jaxpr: Any, shapes: ProgramShapes) -> list[Finding]:
    """All that the step's jaxpr alone can prove, made where the step is traced."""
    findings = check_parameters(key, jaxpr, shapes.params)
    if shapes.model.registration.device_token_ids:
        findings += check_structure(key, jaxpr, shapes.num_groups, shapes.num_recurrent)
    return findings


def check_parameters(key: ProgramKey, jaxpr: Any, params: Any) -> list[Finding]:
    """Every parameter leaf must be read: an unread one is memory without a use."""
    live = jaxprs.live_inputs(jaxpr, [True] * len(jaxprs.body(jaxpr).outvars))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [
        Finding("structural", str(key), f"parameter {jax.tree_util.keystr(path)} is never read")
        for path, is_live in zip(paths, live[: len(paths)], strict=True)
        if not is_live
    ]


def check_structure(
    key: ProgramKey, jaxpr: Any, num_groups: int, num_recurrent: int = 0
) -> list[Finding]:
    """What the step's jaxpr says: who reads the host ids, and whether the forward reads its ids."""
    ranges = batch_ranges(key, num_groups, num_recurrent)
    try:
        reasons = list(_structural_reasons(key, jaxpr, ranges))
    except LookupError as error:
        reasons = [str(error)]
    return [Finding("structural", str(key), reason) for reason in reasons]


def _structural_reasons(key: ProgramKey, jaxpr: Any, ranges: Ranges) -> Iterable[str]:
    unpack = jaxprs.named_equation(jaxpr, "unpack")
    resolve = jaxprs.named_equation(jaxpr, "resolve_ids")
    forward = jaxprs.named_equation(jaxpr, "forward")
    packed = jaxprs.body(jaxpr).invars[-1]
    if (found := jaxprs.readers(jaxpr, packed)) != ["unpack"]:
        yield f"the packed batch is read by {found}, only unpack may read it"
    yield from _unread_twins(unpack, ranges)
    prompt_ids = unpack.outvars[0]
    if (found := jaxprs.readers(jaxpr, prompt_ids)) != ["resolve_ids"]:
        yield f"host ids are read by {found}, only resolve_ids may read them"
    if key.masked_rows:
        masks = unpack.outvars[-len(dataclasses.fields(MaskRows)) :]
        if any(found := {name for v in masks for name in jaxprs.readers(jaxpr, v)} - {"sample"}):
            yield f"masks are read by {sorted(found)}, only sample may read them"
    token_ids = resolve.outvars[0]
    allowed = ["forward"] if key.query_len == 1 else ["forward", "accept"]
    if (found := jaxprs.readers(jaxpr, token_ids)) != allowed:
        yield f"resolved ids are read by {found}, only {allowed} may read them"
    inner = next(jaxprs.sub_jaxprs(forward))
    live = jaxprs.live_inputs(inner, [True] + [False] * (len(forward.outvars) - 1))
    reads = [
        is_live for value, is_live in zip(forward.invars, live, strict=True) if value is token_ids
    ]
    if not any(reads):
        yield "the hidden states do not depend on token_ids"
    if found := jaxprs.callbacks(jaxpr):
        yield f"the step calls back to the host: {sorted(set(found))}"
    if found := jaxprs.integer_constants(jaxpr):
        yield f"the step closes over integer arrays of shapes {found}"


def _unread_twins(unpack: Any, ranges: Ranges) -> Iterable[str]:
    """The prompt-id range is sliced once, for the first output alone, and by no other slice."""
    places = {name: (o, o + int(np.prod(s))) for name, o, s in ranges.places}
    start, stop = places["prompt_ids"]
    inner = jaxprs.body(next(jaxprs.sub_jaxprs(unpack)))
    overlapping, slices = [], set()
    if any(value is inner.invars[0] for value in inner.outvars):
        yield "unpack returns the packed batch"
    for equation in inner.eqns:
        if not any(value is inner.invars[0] for value in equation.invars):
            continue
        if equation.primitive.name != "slice":
            name = equation.primitive.name
            yield f"unpack reads the packed batch by {name}, only by static slices"
            continue
        low, high = equation.params["start_indices"][0], equation.params["limit_indices"][0]
        if low < stop and high > start:
            overlapping.append((low, high))
            slices |= set(equation.outvars)
    if overlapping != [(start, stop)]:
        yield f"the host ids at [{start}, {stop}) are sliced as {overlapping}"
    elif any(jaxprs.reached_outputs(inner, slices)[1:]):
        yield "unpack returns the host ids a second time"


_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)")


def check_donation(
    key: ProgramKey, compiled: jax.stages.Compiled, num_param_leaves: int, state: Any
) -> list[Finding]:
    """State leaf i of the output must alias state leaf i of the input in the compiled program."""
    header = (compiled.as_text() or "").split("\n", 1)[0]
    aliases = {int(out or 0): int(parameter) for out, parameter in _ALIAS.findall(header)}
    findings = []
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        if aliases.get(i) != num_param_leaves + i:
            reason = f"state leaf {jax.tree_util.keystr(path)} is not updated in place"
            findings.append(Finding("structural", str(key), reason))
    return findings


def warm_up(runner: Runner, key: ProgramKey) -> list[Finding]:
    """Runs A, B and C of one program on scratch pages; host ids prove a score program.

    An undeclared registration is never given an id from the device: its third run repeats A.
    """
    vocab_size = runner.model.vocab_size
    is_declared = runner.model.registration.device_token_ids
    num_rows = min(key.rows, key.tokens, runner.plan.num_pages - 1, runner.settings.max_slots)
    if runner.shapes.num_recurrent:  # a state for each row, and the one all of them go on from
        num_rows = min(num_rows, runner.shapes.state.num_states - 2)
    truth = (np.arange(num_rows, dtype=np.int32) * 13 + 7) % (vocab_size - 1) + 1
    poison = np.where(truth == vocab_size - 1, 1, truth + 1).astype(np.int32)
    results = {}
    for run, host_ids, is_device in (
        ("A", truth, False),
        ("B", poison, False),
        ("C", np.full_like(truth, POISON_ID) if is_declared else truth, is_declared),
    ):
        schedule = _scene(key, host_ids, is_device, runner)
        known = truth if is_device else np.full_like(truth, POISON_ID)
        results[run] = _run(runner, key, schedule, known)
    if not is_declared:
        return []
    if key.head == "score" and not _differ(
        results["A"].prompt_logprobs, results["B"].prompt_logprobs
    ):
        return [Finding("dynamic", str(key), "prompt log-probabilities ignore the prompt ids")]
    return [
        Finding("dynamic", str(key), reason)
        for reason in _compare(results, _num_proved(key, num_rows))
    ]


def _num_proved(key: ProgramKey, num_rows: int) -> int:
    """Decode rows of the scene."""
    return num_rows if key.is_decode else max(num_rows - 1, 0)


def _compare(results: dict[str, StepResult], num_decode: int) -> Iterable[str]:
    a, b, c = results["A"], results["B"], results["C"]
    for name in ("sampled", "logprobs"):
        first, third = getattr(a, name)[:num_decode], getattr(c, name)[:num_decode]
        if not np.isfinite(first).all():
            yield f"{name} of run A are not finite"
        if _differ(first, third):
            rows = np.flatnonzero((first != third).any(axis=-1)).tolist()[:8]
            yield f"{name} of run C (ids on the device) differ from run A in rows {rows}"
    is_same = (a.sampled == b.sampled).all(axis=-1) & (a.logprobs == b.logprobs).all(axis=-1)
    if is_same[:num_decode].any():
        rows = np.flatnonzero(is_same[:num_decode]).tolist()[:8]
        yield f"run B (poisoned ids) equals run A in rows {rows}: their ids are not read"


def _differ(first: Any, second: Any) -> bool:
    return first.tobytes() != second.tobytes()


def _scene(key: ProgramKey, ids: np.ndarray, is_device: bool, runner: Runner) -> Schedule:
    """Decode rows of three cached tokens each; a mixed program gets one chunk row too."""
    num_rows, q = len(ids), key.query_len
    num_decode = _num_proved(key, num_rows)
    decode = RowKind.DECODE | RowKind.SAMPLES | (RowKind.DEVICE_ID if is_device else RowKind(0))
    chunk = RowKind.SAMPLES | (RowKind.SCORES if key.head == "score" else RowKind(0))
    kinds = np.full(num_rows, int(decode), np.int32)
    q_lens = np.full(num_rows, q, np.int32)
    tokens = np.repeat(ids[:, None], q, axis=1)
    tokens[:, 1:] = 1
    flat = tokens.reshape(-1)
    if num_decode < num_rows:
        room = key.tokens - num_decode
        q_lens[-1] = min(4, room, runner.settings.max_model_len - _SCENE_TOKENS)
        kinds[-1] = int(chunk)
        # The chunk of a sample program is the same in all runs: host ids are its truth.
        fill = ids[-1] if key.head == "score" else 1
        flat = np.concatenate([flat[: num_decode * q], np.full(q_lens[-1], fill, np.int32)])
    kinds[: key.masked_rows] |= int(RowKind.MASKED)
    pages = 1 + np.arange(num_rows, dtype=np.int32) % (runner.plan.num_pages - 1)
    num_pages = -(-int(_SCENE_TOKENS + q_lens.max()) // runner.settings.page_size)
    return Schedule(
        step=0,
        is_decode=key.is_decode,
        is_full_sampler=key.sampler == "full",
        scores_prompt=key.head == "score",
        slots=np.arange(num_rows, dtype=np.int32),
        generations=np.zeros(num_rows, np.int64),
        kinds=kinds,
        q_lens=q_lens,
        token_ids=flat.astype(np.int32),
        kv_lens=_SCENE_TOKENS + q_lens,
        page_tables=tuple(
            np.repeat(pages[:, None], min(num_pages, key.width), axis=1)
            for _ in range(runner.shapes.num_groups)
        ),
        sampling={name: np.zeros(num_rows, dtype) for name, dtype in SAMPLING_COLUMNS},
        state_ids=(_scene_states(num_rows, runner),) * runner.shapes.num_recurrent,
        masks=_scene_masks(num_rows, key) if key.masked_rows else None,
    )


def _scene_masks(num_rows: int, key: ProgramKey) -> Masks:
    """Masks that allow every id, for as many rows as the program takes."""
    num_masks = min(num_rows, key.masked_rows)
    return Masks(
        slots=np.arange(num_masks, dtype=np.int32),
        generations=np.zeros(num_masks, np.int64),
        words=np.full((num_masks, key.mask_words), -1, np.int32),
    )


def _scene_states(num_rows: int, runner: Runner) -> np.ndarray:
    """i32[rows, 2]: every row goes on from the last state, which no run of a scene writes."""
    first = np.full(num_rows, runner.shapes.state.num_states - 1, np.int32)
    return np.stack([first, 1 + np.arange(num_rows, dtype=np.int32)], axis=1)


def _run(runner: Runner, key: ProgramKey, schedule: Schedule, newest: np.ndarray) -> StepResult:
    """One warm-up run from lengths and newest ids put into the state by value."""
    settings = runner.settings
    last_tokens = np.full(settings.max_slots + 1, -1, np.int32)
    last_tokens[-1] = 0
    last_tokens[: len(newest)] = newest
    num_tokens = np.zeros(settings.max_slots + 1, np.int32)
    num_tokens[: schedule.num_rows] = _SCENE_TOKENS
    place = runner.shapes.replicated
    packed = runner.pack(schedule, key)
    runner.state = dataclasses.replace(
        runner.state,
        last_tokens=jax.device_put(last_tokens, place),
        num_tokens=jax.device_put(num_tokens, place),
    )
    output = runner.run(packed)
    return unpack_output(key, np.asarray(output), schedule.num_rows, schedule.num_tokens)


def _warm_install(runner: Runner) -> None:
    """Runs the install program on no slot: nothing may change."""
    before = np.asarray(runner.state.num_tokens)
    shape = runner.programs.install_shape
    runner.install(pack_install((), (np.zeros((3, 0), np.int32),) * shape.num_groups, shape))
    if _differ(before, np.asarray(runner.state.num_tokens)):
        raise ContractError("installing no slot changed the state")
