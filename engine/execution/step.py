"""The pure step: resolve ids, forward, logits, sample, scatter. One program, the state donated.

Sampled ids reach the next step through `StepState.last_tokens` and never leave the device for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from engine.config import LIMITS
from engine.execution import sampling
from engine.execution.buckets import ProgramKey
from engine.execution.packing import (
    InstallShape,
    Packed,
    install_ranges,
    pack_output,
    unpack,
)
from engine.execution.sampling import MaskRows, Sampled, SamplingTables
from engine.scheduling.schedule import RowFault, RowKind
from models.batch import Batch, Tiling
from models.cache import Cache, open_cache
from models.registry import Model

SCORE_BLOCK = 128
"""Tokens whose vocabulary logits stand in memory at once under the score head."""


@flax.struct.dataclass
class StepState:
    """Everything one step hands to the next. Donated: use the returned one."""

    last_tokens: jax.Array  # i32[max_slots + 1], id sampled last; -1 until a slot's own prefill
    num_tokens: jax.Array  # i32[max_slots + 1], tokens with KV
    history: jax.Array  # i32[max_slots + 1, max_model_len], ids of each slot
    page_tables: tuple[jax.Array, ...]  # per paged group i32[max_slots + 1, W], 0 is trash
    tables: SamplingTables  # [max_slots + 1, ...]
    counters: jax.Array  # i32[2], rows whose first id came from the device, from the host
    pools: tuple[tuple[jax.Array, ...], ...]  # per paged group, per layer
    states: tuple[tuple[jax.Array, ...], ...] = ()  # per recurrent group, per layer


@dataclasses.dataclass(frozen=True)
class StateShape:
    """Sizes of a StepState. The last slot is the padding slot."""

    max_slots: int
    max_model_len: int
    vocab_size: int
    table_width: int
    """Pages of one slot's table."""
    pools: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
    states: tuple[tuple[jax.ShapeDtypeStruct, ...], ...] = ()

    @property
    def num_states(self) -> int:
        """States of each recurrent pool, trash included; 0 without such a pool."""
        return self.states[0][0].shape[0] if self.states else 0

    def fresh(self) -> StepState:
        """An empty state: no id is known, every page is zero."""
        slots = self.max_slots + 1
        ids = functools.partial(jnp.full, dtype=jnp.int32)
        return StepState(
            last_tokens=ids((slots,), -1).at[self.max_slots].set(0),
            num_tokens=ids((slots,), 0),
            history=ids((slots, self.max_model_len), 0),
            page_tables=tuple(ids((slots, self.table_width), 0) for _ in self.pools),
            tables=SamplingTables(
                bias_ids=ids((slots, LIMITS.logit_bias), self.vocab_size),
                bias_values=jnp.zeros((slots, LIMITS.logit_bias), jnp.float32),
                stop_ids=ids((slots, LIMITS.stop_ids), self.vocab_size),
                bad_words=ids((slots, LIMITS.bad_words, LIMITS.bad_word_ids), -1),
                allowed_ids=ids((slots, LIMITS.allowed_ids), self.vocab_size),
                num_allowed=ids((slots,), 0),
            ),
            counters=ids((2,), 0),
            pools=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.pools),
            states=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.states),
        )


@flax.struct.dataclass
class Resolved:
    """What `resolve_ids` found."""

    token_ids: jax.Array  # i32[T], inside the vocabulary
    is_bad_row: jax.Array  # bool[R], an id of the row lay outside
    counts: jax.Array  # i32[2], rows whose first id came from the device, from the host


def resolve_ids(
    vocab_size: int, prompt_ids: jax.Array, last_tokens: jax.Array, packed: Packed, batch: Batch
) -> Resolved:
    """The one place that chooses where a row's newest id comes from.

    A DEVICE_ID row takes its first id from `last_tokens[slot]`, every other token its host id. A
    padding row reads the padding slot. An id outside the vocabulary is embedded as 0 and flags its
    row.
    """
    is_device_row = packed.has(RowKind.DEVICE_ID)
    newest = last_tokens.at[packed.slots].get(mode="clip")
    token = jnp.arange(prompt_ids.shape[0], dtype=jnp.int32)
    is_first = token == batch.cu_q_lens[batch.rows]
    takes_device = is_first & is_device_row[batch.rows] & batch.is_real
    ids = jnp.where(takes_device, newest[batch.rows], prompt_ids)
    is_inside = (ids >= 0) & (ids < vocab_size)
    is_bad = batch.is_real & ~is_inside
    is_real_row = packed.q_lens > 0
    counts = jnp.stack(
        [
            jnp.sum(is_real_row & is_device_row, dtype=jnp.int32),
            jnp.sum(is_real_row & ~is_device_row, dtype=jnp.int32),
        ]
    )
    return Resolved(jnp.where(is_inside, ids, 0), _any_in_row(is_bad, batch), counts)


def _any_in_row(is_flagged: jax.Array, batch: Batch) -> jax.Array:
    """bool[T] -> bool[R]: some token of the row is flagged."""
    num_rows = batch.kv_lens.shape[0]
    counts = jnp.zeros((num_rows,), jnp.int32).at[batch.rows].add(is_flagged.astype(jnp.int32))
    return counts > 0


def set_pages(
    tables: tuple[jax.Array, ...], changes: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Writes i32[3, n] (slots, places, pages) into each group's table; a slot past the end drops.

    Named entries are distinct.
    """
    return tuple(
        table.at[slots, places].set(pages, mode="drop")
        for table, (slots, places, pages) in zip(tables, changes, strict=True)
    )


def lay_out(
    key: ProgramKey,
    tiling: Tiling,
    packed: Packed,
    num_tokens: jax.Array,
    page_tables: tuple[jax.Array, ...],
) -> Batch:
    """Positions, rows and lengths of every token, from query lengths and the state's columns."""
    starts = num_tokens.at[packed.slots].get(mode="clip")
    ends = jnp.cumsum(packed.q_lens, dtype=jnp.int32)
    cu_q_lens = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    token = jnp.arange(key.tokens, dtype=jnp.int32)
    if key.is_decode:
        rows = token // key.query_len
        is_real = token < ends[-1]
    else:
        is_real = token < ends[-1]
        rows = jnp.sum(token[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        rows = jnp.where(is_real, rows, 0)
    positions = jnp.where(is_real, starts[rows] + token - cu_q_lens[rows], 0)
    return Batch(
        positions=positions,
        rows=rows,
        is_real=is_real,
        kv_lens=jnp.where(packed.q_lens > 0, starts + packed.q_lens, 0),
        cu_q_lens=cu_q_lens,
        num_decode=packed.num_decode,
        page_tables=tuple(
            table.at[packed.slots].get(mode="clip")[:, : key.width] for table in page_tables
        ),
        is_decode=key.is_decode,
        max_chunk_rows=key.max_chunk_rows,
        tiling=tiling,
        state_ids=packed.state_ids,
    )


def sample(
    key: ProgramKey,
    logits: jax.Array,
    packed: Packed,
    tables: SamplingTables,
    history: jax.Array,
    kv_lens: jax.Array,
    masks: MaskRows | None = None,
) -> Sampled:
    """The head every program has: f32[logit rows, V] -> one id per logit row."""
    if key.sampler == "greedy":
        return sampling.greedy(logits, masks)
    if key.query_len > 1:
        raise NotImplementedError(f"query length {key.query_len} needs the greedy sampler")
    assert packed.sampling is not None
    row_tables = jax.tree.map(lambda t: t.at[packed.slots].get(mode="clip"), tables)
    row_history = history.at[packed.slots].get(mode="clip")
    return sampling.sample(logits, packed.sampling, row_tables, row_history, kv_lens, masks)


def score(
    model: Model,
    params: Any,
    hidden: jax.Array,
    packed: Packed,
    batch: Batch,
    history: jax.Array,
) -> dict[str, jax.Array]:
    """Log-probability, rank and alternatives of the id that follows each token of a SCORES row.

    Targets come from `history`. Logits are made for SCORE_BLOCK tokens at a time.
    """
    num_tokens = hidden.shape[0]
    block = min(SCORE_BLOCK, num_tokens)
    num_blocks = -(-num_tokens // block)
    slots = packed.slots[batch.rows]
    targets = history.at[slots, batch.positions + 1].get(mode="clip")
    is_wanted = packed.has(RowKind.SCORES)[batch.rows] & batch.is_real

    def score_block(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        logits = model.logits(params, hidden)
        return sampling.logprobs_of(logits, targets, num_top=LIMITS.logprobs)

    def skip_block(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        return (
            jnp.zeros((block,), jnp.float32),
            jnp.zeros((block,), jnp.int32),
            jnp.zeros((block, LIMITS.logprobs), jnp.int32),
            jnp.zeros((block, LIMITS.logprobs), jnp.float32),
        )

    def one(item: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden, targets, is_wanted = item
        return jax.lax.cond(jnp.any(is_wanted), score_block, skip_block, hidden, targets)

    def blocks(x: jax.Array) -> jax.Array:
        padding = ((0, num_blocks * block - num_tokens),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(num_blocks, block, *x.shape[1:])

    results = jax.lax.map(one, (blocks(hidden), blocks(targets), blocks(is_wanted)))
    names = ("prompt_logprobs", "prompt_ranks", "prompt_top_ids", "prompt_top_logprobs")
    return {
        name: x.reshape(num_blocks * block, *x.shape[2:])[:num_tokens]
        for name, x in zip(names, results, strict=True)
    }


@flax.struct.dataclass
class Accepted:
    """Which sampled ids count, how many of each row, and where the row's KV now ends."""

    ids: jax.Array  # i32[R, q]
    num_new: jax.Array  # i32[R]
    kv_lens: jax.Array  # i32[R], tokens with KV that count


def accept(
    key: ProgramKey, sampled: jax.Array, token_ids: jax.Array | None, packed: Packed, batch: Batch
) -> Accepted:
    """Takes each row's first sample, and of a longer decode row every draft it confirms.

    `token_ids` i32[T] holds the drafts; None where rows have none.

    A draft (input token j of a decode row, j >= 1) is confirmed when it equals the sample at j - 1
    and all drafts before it were; the sample after the last confirmed one counts too.
    """
    num_rows = key.rows
    sampled = sampled.reshape(num_rows, -1)
    is_sampling = packed.has(RowKind.SAMPLES)
    if token_ids is None:
        num_new = is_sampling.astype(jnp.int32)
        return Accepted(jnp.where(is_sampling[:, None], sampled, 0), num_new, batch.kv_lens)
    assert token_ids is not None
    drafts = token_ids.reshape(num_rows, key.query_len)[:, 1:]
    is_confirmed = jnp.cumprod((drafts == sampled[:, :-1]).astype(jnp.int32), axis=1)
    num_new = jnp.where(is_sampling, 1 + jnp.sum(is_confirmed, axis=1, dtype=jnp.int32), 0)
    lane = jnp.arange(key.query_len, dtype=jnp.int32)
    kept = jnp.where(lane[None, :] < num_new[:, None], sampled, 0)
    ends = jnp.where(is_sampling, batch.kv_lens - key.query_len + num_new, batch.kv_lens)
    return Accepted(kept, num_new, ends)


def advance(
    state: StepState, cache: Cache, packed: Packed, accepted: Accepted, counts: jax.Array
) -> StepState:
    """Scatters what the step learnt into the state.

    Padding rows' slots lie past the end: dropped.
    """
    past_end = state.last_tokens.shape[0]
    writes = jnp.where(accepted.num_new > 0, packed.slots, past_end)
    newest = jnp.take_along_axis(
        accepted.ids, jnp.maximum(accepted.num_new - 1, 0)[:, None], axis=1
    )[:, 0]
    lane = jnp.arange(accepted.ids.shape[1], dtype=jnp.int32)
    is_new = lane[None, :] < accepted.num_new[:, None]
    first = accepted.kv_lens - accepted.num_new + 1
    places = jnp.where(is_new, first[:, None] + lane[None, :], state.history.shape[1])
    return dataclasses.replace(
        state,
        last_tokens=state.last_tokens.at[writes].set(newest, mode="drop"),
        num_tokens=state.num_tokens.at[packed.slots].set(accepted.kv_lens, mode="drop"),
        history=state.history.at[writes[:, None], places].set(accepted.ids, mode="drop"),
        counters=state.counters + counts,
        pools=cache.pools,
        states=cache.states,
    )


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The named inner functions of one program, as jitted functions whose names the jaxpr keeps."""

    unpack: Callable[..., Any]
    resolve_ids: Callable[..., Any]
    forward: Callable[..., Any]
    sample: Callable[..., Any]
    score: Callable[..., Any]
    accept: Callable[..., Any]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An inner jit that shows as `name` in the jaxpr."""

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = name
    return jax.jit(named)


def make_step(
    model: Model, key: ProgramKey, tiling: Tiling, num_groups: int, num_recurrent: int = 0
) -> Callable[..., tuple[StepState, jax.Array]]:
    """The step of one program: (params, state, packed batch) -> (state, packed output).

    One more argument, embeddings [T, D], where the registration makes them on the host.

    Raises:
      NotImplementedError: a recurrent group in a program whose decode rows bring drafts.
    """
    if num_recurrent and key.query_len > 1:
        raise NotImplementedError(
            f"query length {key.query_len} with a recurrent cache group: a refused draft would "
            "have to be taken back out of the state; use query length 1"
        )
    parts = StepParts(
        unpack=_named(
            "unpack", functools.partial(unpack, key, num_groups, num_recurrent=num_recurrent)
        ),
        resolve_ids=_named("resolve_ids", functools.partial(resolve_ids, model.vocab_size)),
        forward=_named("forward", model.forward),
        sample=_named("sample", functools.partial(sample, key)),
        score=_named("score", functools.partial(score, model)),
        accept=_named("accept", functools.partial(accept, key)),
    )

    def step(
        params: Any, state: StepState, flat: jax.Array, embeddings: jax.Array | None = None
    ) -> tuple[StepState, jax.Array]:
        prompt_ids, packed = parts.unpack(flat)
        # Masks go to `sample` alone: no other part could read them by mistake.
        masks, packed = packed.masks, dataclasses.replace(packed, masks=None)
        state = dataclasses.replace(
            state, page_tables=set_pages(state.page_tables, packed.page_changes)
        )
        batch = lay_out(key, tiling, packed, state.num_tokens, state.page_tables)
        resolved = parts.resolve_ids(prompt_ids, state.last_tokens, packed, batch)
        embedded = dataclasses.replace(batch, embeddings=embeddings)
        hidden, cache = parts.forward(
            params, open_cache(state.pools, key.tokens, state.states), resolved.token_ids, embedded
        )
        last = hidden if key.is_decode else hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]
        sampled = parts.sample(
            model.logits(params, last), packed, state.tables, state.history, batch.kv_lens, masks
        )
        drafts = resolved.token_ids if key.query_len > 1 else None
        accepted = parts.accept(sampled.token_ids, drafts, packed, batch)
        output = _output(key, sampled, accepted, packed, batch, resolved, cache)
        if key.head == "score":
            output |= parts.score(params, hidden, packed, batch, state.history)
        return advance(state, cache, packed, accepted, resolved.counts), pack_output(key, output)

    return step


def _output(
    key: ProgramKey,
    sampled: Sampled,
    accepted: Accepted,
    packed: Packed,
    batch: Batch,
    resolved: Resolved,
    cache: Cache,
) -> dict[str, jax.Array]:
    is_sampling = packed.has(RowKind.SAMPLES)
    is_broken = sampled.nonfinite.reshape(key.rows, -1).any(axis=1) & is_sampling
    faults = (
        jnp.where(resolved.is_bad_row, int(RowFault.BAD_ID), 0)
        | jnp.where(_any_in_row(cache.is_nonfinite, batch), int(RowFault.NONFINITE_KV), 0)
        | jnp.where(is_broken, int(RowFault.NONFINITE_LOGITS), 0)
    )
    if key.masked_rows:
        faults |= jnp.where(sampled.lacks_mask & is_sampling, int(RowFault.MISSING_MASK), 0)
        faults |= jnp.where(sampled.is_stuck & is_sampling, int(RowFault.NOTHING_ALLOWED), 0)
    output = {
        "sampled": accepted.ids,
        "num_new": accepted.num_new,
        "faults": faults.astype(jnp.int32),
        "logprobs": sampled.logprobs,
        "ranks": sampled.ranks,
    }
    if key.sampler == "full":
        output |= {"top_ids": sampled.top_ids, "top_logprobs": sampled.top_logprobs}
    return output


def make_install(
    shape: InstallShape,
) -> Callable[[StepState, jax.Array | np.ndarray], StepState]:
    """The program that tells the device about newly admitted slots: (state, packed) -> state."""

    def install(state: StepState, flat: jax.Array | np.ndarray) -> StepState:
        parts = install_ranges(shape).read(jnp.asarray(flat))
        slots = parts["slots"]

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[slots].set(new, mode="drop")

        tables = state.tables
        changes = tuple(parts[f"page_changes_{g}"] for g in range(shape.num_groups))
        empty = jnp.zeros((shape.rows, shape.table_width), jnp.int32)
        return dataclasses.replace(
            state,
            page_tables=set_pages(tuple(put(t, empty) for t in state.page_tables), changes),
            last_tokens=put(state.last_tokens, jnp.full_like(slots, -1)),
            num_tokens=put(state.num_tokens, parts["num_cached"]),
            history=put(state.history, parts["history"]),
            tables=SamplingTables(
                bias_ids=put(tables.bias_ids, parts["bias_ids"]),
                bias_values=put(
                    tables.bias_values,
                    jax.lax.bitcast_convert_type(parts["bias_values"], jnp.float32),
                ),
                stop_ids=put(tables.stop_ids, parts["stop_ids"]),
                bad_words=put(tables.bad_words, parts["bad_words"]),
                allowed_ids=put(tables.allowed_ids, parts["allowed_ids"]),
                num_allowed=put(tables.num_allowed, parts["num_allowed"]),
            ),
        )

    return install
