"""Chooses the next id of each row from its logits, and reports the log-probabilities of the choice.

Pure functions inside the step. Every number of a row depends on that row alone: on its logits, its
columns, its tables and its ids so far, never on its place in the batch or on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from engine.config import LIMITS

# An entry's distance below the likeliest is >= 0, so its bits are a key that orders as it does.
_KEY_BITS = 31
_MASKED = 0x7F800000  # the key of an infinite distance
_TINY = float(jnp.finfo(jnp.float32).tiny)  # the least normal number
_NEVER = -(2**31)  # sorts below every logit, that of a masked entry included
_DIGIT_BITS = 3  # decided by each pass of a search
_BLOCK_SIZES = (256, 16)  # entries ranked as one by each pass towards the likeliest


@flax.struct.dataclass
class SamplingTables:
    """Bounded lists of each row. A padding id is vocab_size or larger, except in `bad_words`."""

    bias_ids: jax.Array  # i32[R, LIMITS.logit_bias], unique within a row
    bias_values: jax.Array  # f32[R, LIMITS.logit_bias]
    stop_ids: jax.Array  # i32[R, LIMITS.stop_ids], masked until min_tokens are out
    bad_words: (
        jax.Array
    )  # i32[R, LIMITS.bad_words, LIMITS.bad_word_ids], right-aligned, padded by -1
    allowed_ids: jax.Array  # i32[R, LIMITS.allowed_ids]
    num_allowed: jax.Array  # i32[R], 0: every id is allowed


@flax.struct.dataclass
class SamplingRows:
    """`schedule.SAMPLING_COLUMNS`, each [R]. All zeros (a padding row) is plain greedy."""

    temperature: jax.Array  # f32, 0 is greedy
    top_p: jax.Array  # f32, 1 keeps all
    min_p: jax.Array  # f32, 0 keeps all
    presence_penalty: jax.Array  # f32
    frequency_penalty: jax.Array  # f32
    repetition_penalty: jax.Array  # f32, 1 changes nothing; 0 is read as 1
    top_k: jax.Array  # i32, below 1 or above V keeps all
    seed_low: jax.Array  # u32
    seed_high: jax.Array  # u32
    choice: jax.Array  # i32
    output_index: jax.Array  # i32, outputs of the choice before this one
    min_tokens: jax.Array  # i32
    prompt_len: jax.Array  # i32
    num_logprobs: jax.Array  # i32, alternatives wanted; -1 and 0: none
    processed_logprobs: jax.Array  # i32, nonzero: of the processed logits, else of the raw ones


@flax.struct.dataclass
class MaskRows:
    """The masks of a step beside who its rows are."""

    is_masked: jax.Array  # bool[R]
    row_slots: jax.Array  # i32[R]
    row_generations: jax.Array  # i32[R]
    slots: jax.Array  # i32[M], past every row's slot where the entry is unused
    generations: jax.Array  # i32[M]
    words: jax.Array  # i32[M, ceil(V / 32)], bit i % 32 of word i // 32: id i is allowed


@flax.struct.dataclass
class Sampled:
    """What one position of each row answers. No number in it is NaN."""

    token_ids: jax.Array  # i32[R], inside the vocabulary whatever the logits
    logprobs: jax.Array  # f32[R], of token_ids; -inf where nothing was left to choose
    ranks: jax.Array  # i32[R], 1 is the likeliest, equals counted lower id first
    top_ids: jax.Array  # i32[R, N], likeliest first, equals lower id first
    top_logprobs: jax.Array  # f32[R, N]
    nonfinite: jax.Array  # bool[R], a raw logit was NaN or infinite; the row's id is 0
    lacks_mask: jax.Array  # bool[R], the row is masked and no mask is its own
    is_stuck: jax.Array  # bool[R], the row is masked and no id is left to choose


@jax.named_scope("greedy")
def greedy(logits: jax.Array, masks: MaskRows | None = None) -> Sampled:
    """Takes the likeliest id of each row, the lowest of equals.

    Args:
      logits: f32[R, V].
      masks: what masked rows may take; None where the program takes none.

    Returns:
      Sampled with no alternatives (N = 0) and ranks of 1; log-probabilities are of the raw logits.
    """
    token_ids, top, nonfinite = _likeliest(logits)
    lacks_mask, is_stuck = [jnp.zeros_like(nonfinite)] * 2
    if masks is not None:
        masked = _Masked.of(logits, masks)
        lacks_mask = masked.lacks_mask
        token_ids = masked.put(_argmax(masked.logits), jnp.where(lacks_mask, 0, token_ids))
        is_stuck = masked.put(_is_stuck(masked.logits), lacks_mask) & ~nonfinite
    token_ids = jnp.where(nonfinite, 0, token_ids)
    logprobs = _log_softmax_below(top[:, None], logits, token_ids[:, None])[:, 0]
    rows = logits.shape[0]
    return Sampled(
        token_ids=token_ids,
        logprobs=jnp.where(nonfinite, -jnp.inf, logprobs),
        ranks=jnp.ones(rows, jnp.int32),
        top_ids=jnp.zeros((rows, 0), jnp.int32),
        top_logprobs=jnp.zeros((rows, 0), jnp.float32),
        nonfinite=nonfinite,
        lacks_mask=lacks_mask,
        is_stuck=is_stuck,
    )


@jax.named_scope("sample")
def sample(
    logits: jax.Array,
    rows: SamplingRows,
    tables: SamplingTables,
    history: jax.Array,
    num_history: jax.Array,
    masks: MaskRows | None = None,
) -> Sampled:
    """Draws one id per row: edits, temperature, min-p, top-k, top-p, then Gumbel-max.

    The edits are, in this order: mask, penalties, logit bias, allowed ids, bad words, min_tokens.
    A row they leave without any id answers id 0, with log-probability -inf if it asks for processed
    ones; a masked row is told of then.

    Args:
      logits: f32[R, V], of the position after the last id of `history`.
      rows: columns of each row.
      tables: lists of each row.
      history: i32[R, L], the row's ids so far, the prompt first; what follows them is not read.
      num_history: i32[R], how many they are, the id that produced the logits included.
      masks: what masked rows may sample; None where the program takes none.

    Returns:
      Sampled with N = LIMITS.logprobs alternatives, zeros unless some row wants any; entries past
      the vocabulary are id 0 with -inf. Log-probabilities are of the raw logits, or where the row
      says `processed_logprobs` of the edited, scaled (a greedy row's by 1) and filtered ones.
    """
    logits, nonfinite = _finite_rows(logits)
    edited, lacks_mask = logits, jnp.zeros_like(nonfinite)
    if masks is not None:
        # First of the edits: none of the others makes a finite logit of an infinite one.
        masked = _Masked.of(logits, masks)
        lacks_mask = masked.lacks_mask
        edited = masked.put(masked.logits, jnp.where(lacks_mask[:, None], -jnp.inf, logits))
    edited = _edited(edited, rows, tables, history, num_history)
    is_stuck = jnp.zeros_like(nonfinite)
    if masks is not None:
        is_stuck = masks.is_masked & ~nonfinite & _is_stuck(edited)
    distances = _filtered(_distances(edited, rows), rows)
    token_ids = _drawn(distances, rows)
    reported = jnp.where((rows.processed_logprobs != 0)[:, None], -distances, logits)
    top_ids, top_logprobs = jax.lax.cond(
        jnp.any(rows.num_logprobs > 0),
        lambda x: _top_logprobs(x, LIMITS.logprobs),
        lambda x: _no_top_logprobs(x, LIMITS.logprobs),
        reported,
    )
    logprobs, ranks = _scores_of(reported, token_ids)
    return Sampled(
        token_ids, logprobs, ranks, top_ids, top_logprobs, nonfinite, lacks_mask, is_stuck
    )


def logprobs_of(
    logits: jax.Array, targets: jax.Array, *, num_top: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Scores given ids under the softmax of the logits.

    Args:
      logits: f32[R, V]; -inf is an id that cannot come. A row with NaN or +inf scores -inf.
      targets: i32[R]; one outside the vocabulary is moved to its nearest end.
      num_top: alternatives to report.

    Returns:
      Log-probability f32[R] and rank i32[R] of the targets, ids i32[R, num_top] and
      log-probabilities f32[R, num_top] of the likeliest. Of equals the lower id comes first.
    """
    alternatives = _top_logprobs if num_top > 0 else _no_top_logprobs
    return *_scores_of(logits, targets), *alternatives(logits, num_top)


def _scores_of(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    vocab_size = logits.shape[-1]
    targets = jnp.clip(targets, 0, vocab_size - 1)[:, None]
    value = jnp.take_along_axis(logits, targets, axis=-1)
    is_before = (logits > value) | ((logits == value) & (_token_ids(logits) < targets))
    return _log_softmax_at(logits, targets)[:, 0], 1 + _count(is_before)


def _finite_rows(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A row the model broke is masked whole: its id is 0, and nothing after this meets a NaN.
    nonfinite = ~jnp.all(jnp.isfinite(logits), axis=-1)
    return jnp.where(nonfinite[:, None], -jnp.inf, logits), nonfinite


def _likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row's likeliest id, the lowest of equals, its logit, and where the model broke a row.

    From one pass; of a broken row id and logit mean nothing.
    """

    def better(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (value, token, is_finite), (other_value, other_token, is_other_finite) = one, other
        is_first = (value > other_value) | ((value == other_value) & (token < other_token))
        return (
            jnp.where(is_first, value, other_value),
            jnp.where(is_first, token, other_token),
            is_finite & is_other_finite,
        )

    ids = jnp.broadcast_to(_token_ids(logits), logits.shape)
    worst = np.float32(-np.inf), np.int32(np.iinfo(np.int32).max), np.bool_(True)
    top, token_ids, is_finite = jax.lax.reduce(
        (logits, ids, jnp.isfinite(logits)), worst, better, (1,)
    )
    return token_ids, top, ~is_finite


def _argmax(scores: jax.Array) -> jax.Array:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def _count(is_member: jax.Array) -> jax.Array:
    return jnp.sum(is_member, axis=-1, dtype=jnp.int32)


def _token_ids(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]


def _row_ids(array: jax.Array) -> jax.Array:
    # Rows and ids stay two indices: their flat product passes 2**31 at 16k rows of 152k.
    return jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]


# --- edits ---


def _edited(
    logits: jax.Array,
    rows: SamplingRows,
    tables: SamplingTables,
    history: jax.Array,
    num_history: jax.Array,
) -> jax.Array:
    """Applies the edits some row asks for; a row that asks for none keeps its bits."""
    # Padding rows hold zeros, and no request may ask for a repetition penalty of 0.
    repetition = jnp.where(rows.repetition_penalty > 0.0, rows.repetition_penalty, 1.0)
    has_bias = jnp.any(tables.bias_ids < logits.shape[-1])
    has_bad_words = jnp.any(tables.bad_words[:, :, -1] >= 0)
    is_penalized = (
        (repetition != 1.0) | (rows.presence_penalty != 0.0) | (rows.frequency_penalty != 0.0)
    )
    edits: tuple[tuple[jax.Array, Callable[[jax.Array], jax.Array]], ...] = (
        (
            jnp.any(is_penalized),
            lambda x: _penalized(x, rows, repetition, history, num_history),
        ),
        (has_bias, lambda x: _biased(x, tables)),
        (jnp.any(tables.num_allowed > 0), lambda x: _only_allowed(x, tables)),
        (has_bad_words, lambda x: _without_bad_words(x, tables, history, num_history)),
        (
            jnp.any(rows.output_index < rows.min_tokens),
            lambda x: _without_early_stop(x, rows, tables),
        ),
    )

    def apply_each(edited: jax.Array) -> jax.Array:
        for is_wanted, edit in edits:
            edited = jax.lax.cond(is_wanted, edit, lambda x: x, edited)
        return edited

    # One condition for the usual step, which edits nothing.
    is_any_wanted = jnp.any(jnp.stack([is_wanted for is_wanted, _ in edits]))
    return jax.lax.cond(is_any_wanted, apply_each, lambda x: x, logits)


@flax.struct.dataclass
class _Masked:
    """Masked rows apart from the others: a mask costs what its own row does."""

    rows: jax.Array  # i32[M], the row of each mask, past the last one where the entry is unused
    logits: jax.Array  # f32[M, V], those of the row that its mask leaves
    lacks_mask: jax.Array  # bool[R]

    @classmethod
    def of(cls, logits: jax.Array, masks: MaskRows) -> _Masked:
        """A mask is of the row whose slot and generation it names."""
        num_rows, vocab_size = logits.shape
        is_own = (masks.slots[:, None] == masks.row_slots[None, :]) & (
            masks.generations[:, None] == masks.row_generations[None, :]
        )
        is_own &= masks.is_masked[None, :]
        rows = jnp.where(jnp.any(is_own, axis=-1), _argmax(is_own), num_rows)
        bit = jnp.arange(32, dtype=jnp.int32)[None, None, :]
        is_allowed = (masks.words[:, :, None] >> bit) & 1
        is_allowed = is_allowed.reshape(len(rows), -1)[:, :vocab_size] != 0
        own = logits[jnp.minimum(rows, num_rows - 1)]
        left = jnp.where(is_allowed, own, -jnp.inf)
        return cls(rows, left, masks.is_masked & ~jnp.any(is_own, axis=0))

    def put(self, values: jax.Array, into: jax.Array) -> jax.Array:
        """Values [M, ...] of masks in the places of their rows."""
        return into.at[self.rows].set(values, mode="drop")


def _is_stuck(edited: jax.Array) -> jax.Array:
    """bool[R]: nothing is left to choose."""
    return jnp.max(edited, axis=-1) == -jnp.inf


def _penalized(
    logits: jax.Array,
    rows: SamplingRows,
    repetition: jax.Array,
    history: jax.Array,
    num_history: jax.Array,
) -> jax.Array:
    """Repetition over prompt and output, presence and frequency over the output."""
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    is_known = (place < num_history[:, None]) & (history >= 0)
    is_output = is_known & (place >= rows.prompt_len[:, None])
    num_in_prompt = _counts_of(history, is_known & ~is_output, logits)
    num_in_output = _counts_of(history, is_output, logits)
    penalty = repetition[:, None]
    repeated = jnp.where(logits > 0.0, logits / penalty, logits * penalty)
    logits = jnp.where((num_in_prompt > 0) | (num_in_output > 0), repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * num_in_output.astype(jnp.float32)
    return logits - jnp.where(num_in_output > 0, rows.presence_penalty[:, None], 0.0)


def _counts_of(history: jax.Array, is_counted: jax.Array, logits: jax.Array) -> jax.Array:
    ids = jnp.where(is_counted, history, logits.shape[-1])
    counts = jnp.zeros(logits.shape, jnp.int32)
    return counts.at[_row_ids(ids), ids].add(1, mode="drop")


def _biased(logits: jax.Array, tables: SamplingTables) -> jax.Array:
    ids = tables.bias_ids
    return logits.at[_row_ids(ids), ids].add(tables.bias_values, mode="drop")


def _only_allowed(logits: jax.Array, tables: SamplingTables) -> jax.Array:
    ids = tables.allowed_ids
    mentions = jnp.zeros(logits.shape, jnp.int32).at[_row_ids(ids), ids].add(1, mode="drop")
    is_allowed = (mentions > 0) | (tables.num_allowed == 0)[:, None]
    return jnp.where(is_allowed, logits, -jnp.inf)


def _without_bad_words(
    logits: jax.Array, tables: SamplingTables, history: jax.Array, num_history: jax.Array
) -> jax.Array:
    """Masks the last id of every word whose other ids end the row's history."""
    num_before = tables.bad_words.shape[-1] - 1
    place = num_history[:, None] - num_before + jnp.arange(num_before, dtype=jnp.int32)[None, :]
    tail = jnp.take_along_axis(history, jnp.clip(place, 0, history.shape[1] - 1), axis=-1)
    tail = jnp.where(place >= 0, tail, -1)[:, None, :]
    before, last = tables.bad_words[:, :, :-1], tables.bad_words[:, :, -1]
    completes = jnp.all((before < 0) | (before == tail), axis=-1) & (last >= 0)
    return _masked(logits, jnp.where(completes, last, logits.shape[-1]))


def _without_early_stop(logits: jax.Array, rows: SamplingRows, tables: SamplingTables) -> jax.Array:
    is_early = (rows.output_index < rows.min_tokens)[:, None]
    return _masked(logits, jnp.where(is_early, tables.stop_ids, logits.shape[-1]))


def _masked(logits: jax.Array, ids: jax.Array) -> jax.Array:
    return logits.at[_row_ids(ids), ids].set(-jnp.inf, mode="drop")


# --- filters ---


def _distances(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """How far each logit lies below its row's largest, in temperatures: f32[R, V] >= 0.

    Measured from the top, no temperature overflows upward; a masked id is infinitely far.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    temperature = jnp.where(_is_greedy(rows), 1.0, rows.temperature)
    return (top - logits) / temperature[:, None]


def _is_greedy(rows: SamplingRows) -> jax.Array:
    # Devices differ in whether they read a subnormal number as 0; here it is 0 everywhere.
    return rows.temperature < _TINY


def _filtered(distances: jax.Array, rows: SamplingRows) -> jax.Array:
    """Masks what min-p, top-k and top-p drop; at least the likeliest id stays."""
    vocab_size = distances.shape[-1]
    # A greedy row's choice passes every filter; only its processed log-probabilities show them.
    shows_filter = ~_is_greedy(rows) | (rows.processed_logprobs != 0)
    has_top_k = shows_filter & (rows.top_k > 0) & (rows.top_k < vocab_size)
    has_top_p = shows_filter & (rows.top_p < 1.0)
    has_min_p = shows_filter & (rows.min_p > 0.0)

    def apply_all(distances: jax.Array) -> jax.Array:
        reach = jnp.where(has_min_p, -jnp.log(rows.min_p), jnp.inf)
        distances = jnp.where(distances <= reach[:, None], distances, jnp.inf)
        top_k = jnp.where(has_top_k, rows.top_k, vocab_size)
        top_p = jnp.where(has_top_p, rows.top_p, 1.0)
        return jax.lax.cond(
            jnp.any(has_top_k | has_top_p),
            lambda x: _likeliest_kept(x, top_k, top_p),
            lambda x: x,
            distances,
        )

    return jax.lax.cond(
        jnp.any(has_top_k | has_top_p | has_min_p), apply_all, lambda x: x, distances
    )


def _likeliest_kept(distances: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Masks all but the k nearest entries, and of those all but the nearest whose mass reaches p.

    Both keep a prefix of one order, nearest first and lower id first among equals. Such a prefix is
    the key of its last entry with the number of entries kept of those that share it.

    Args:
      distances: f32[R, V].
      top_k: i32[R], V keeps all.
      top_p: f32[R], 1 keeps all.

    Returns:
      f32[R, V].
    """
    keys = jax.lax.bitcast_convert_type(distances, jnp.int32)
    vocab_size = keys.shape[-1]
    everything = jnp.full_like(top_k, _MASKED), jnp.full_like(top_k, vocab_size)
    top_k_last, top_k_shared = jax.lax.cond(
        jnp.any(top_k < vocab_size),
        lambda: _top_k_prefix(keys, top_k),
        lambda: everything,
    )
    last, num_shared = jax.lax.cond(
        jnp.any(top_p < 1.0),
        lambda: _top_p_prefix(keys, distances, top_p, top_k_last, top_k_shared),
        lambda: (top_k_last, top_k_shared),
    )
    shares_last = keys == last[:, None]
    last_id = jax.lax.cond(
        jnp.any(_count(shares_last) > num_shared),
        lambda: _first_reaching(
            jnp.where(shares_last, _token_ids(keys), _MASKED),
            jnp.int32(1),
            num_shared,
            vocab_size.bit_length(),
        ),
        lambda: jnp.full_like(last, vocab_size),
    )
    is_kept = (keys < last[:, None]) | (shares_last & (_token_ids(keys) <= last_id[:, None]))
    return jnp.where(is_kept, distances, jnp.inf)


def _top_k_prefix(keys: jax.Array, top_k: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A row that keeps all must not depend on whether a neighbour made this search run.
    keeps_all = top_k >= keys.shape[-1]
    last = _first_reaching(keys, jnp.int32(1), top_k, _KEY_BITS)
    last = jnp.where(keeps_all, _MASKED, last)
    num_shared = top_k - _count(keys < last[:, None])
    return last, jnp.where(keeps_all, top_k, num_shared)


def _top_p_prefix(
    keys: jax.Array,
    distances: jax.Array,
    top_p: jax.Array,
    last: jax.Array,
    num_shared: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    masses = jnp.exp(-distances)
    shared = num_shared.astype(jnp.float32) * _mass(last)
    wanted = top_p * (_sum(masses, keys < last[:, None]) + shared)
    nucleus_last = jnp.minimum(_first_reaching(keys, masses, wanted, _KEY_BITS), last)
    missing = wanted - _sum(masses, keys < nucleus_last[:, None])
    num_missing = jnp.ceil(missing / jnp.maximum(_mass(nucleus_last), _TINY))
    num_present = jnp.where(nucleus_last < last, _count(keys == nucleus_last[:, None]), num_shared)
    num_nucleus = jnp.clip(num_missing, 1.0, num_present.astype(jnp.float32)).astype(jnp.int32)
    keeps_all = top_p >= 1.0
    return (
        jnp.where(keeps_all, last, nucleus_last),
        jnp.where(keeps_all, num_shared, num_nucleus),
    )


def _mass(key: jax.Array) -> jax.Array:
    return jnp.exp(-jax.lax.bitcast_convert_type(key, jnp.float32))


def _sum(weights: jax.Array, is_member: jax.Array) -> jax.Array:
    return jnp.sum(
        jnp.where(is_member, weights, jnp.zeros_like(weights)), axis=-1, dtype=weights.dtype
    )


def _first_reaching(
    keys: jax.Array, weights: jax.Array, wanted: jax.Array, num_bits: int
) -> jax.Array:
    """Finds digit by digit the smallest key up to which the entries of a row weigh enough.

    The rounds are written out, because a GPU records no loop into a command buffer.

    Args:
      keys: i32[R, V] >= 0.
      weights: [R, V] or [], >= 0.
      wanted: [R], in the type of the weights.
      num_bits: of the largest key that may be found.

    Returns:
      i32[R], 2 ** num_bits - 1 where all entries below it weigh less than wanted.
    """
    found = jnp.zeros_like(keys[:, 0])
    # A unit the compiler cannot see makes the same kernel of every round, compiled once.
    low_bits = range(0, num_bits, _DIGIT_BITS)
    found, unit = jax.lax.optimization_barrier((found, jnp.full_like(found, 1 << low_bits[-1])))
    for low_bit in reversed(low_bits):
        base = 2 ** min(_DIGIT_BITS, num_bits - low_bit)
        sums = _sums_below(keys, weights, [found + digit * unit for digit in range(1, base)])
        found = found + unit * _count(sums < wanted[:, None])
        found, unit = jax.lax.optimization_barrier((found, unit >> _DIGIT_BITS))
    return found


def _sums_below(keys: jax.Array, weights: jax.Array, bounds: list[jax.Array]) -> jax.Array:
    """The weight of each row's keys below each of its bounds, [R, bounds], from one pass."""
    zero = jnp.zeros_like(weights)
    members = tuple(jnp.where(keys < bound[:, None], weights, zero) for bound in bounds)
    starts = (np.zeros((), weights.dtype),) * len(bounds)

    def add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x + y for x, y in zip(left, right, strict=True))

    return jnp.stack(jax.lax.reduce(members, starts, add, (1,)), axis=-1)


# --- choice and report ---


def _drawn(distances: jax.Array, rows: SamplingRows) -> jax.Array:
    """Gumbel-max with a key of the row's own; a greedy row takes its nearest entry."""
    is_greedy = _is_greedy(rows)

    def with_noise(scores: jax.Array) -> jax.Array:
        noise = jax.vmap(_gumbel, in_axes=(0, None))(_keys(rows), scores.shape[-1])
        return _argmax(jnp.where(is_greedy[:, None], scores, scores + noise))

    return jax.lax.cond(jnp.any(~is_greedy), with_noise, _argmax, -distances)


def _keys(rows: SamplingRows) -> jax.Array:
    """The key of each draw: the request's seed, folded with its choice, then its output index."""
    words = jnp.stack([rows.seed_high, rows.seed_low], axis=-1)
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    fold_in = jax.vmap(jax.random.fold_in)
    return fold_in(fold_in(keys, rows.choice), rows.output_index)


def _gumbel(key: jax.Array, size: int) -> jax.Array:
    # 32 bits beneath the logarithm, exact near 0: the noise reaches 22.9, so that ids of
    # probability 1e-9 still come. jax.random.gumbel stops at 16 or draws twice as many bits.
    bits = jax.random.bits(key, (size,), jnp.uint32)
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    below_one = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-below_one))


def _log_softmax_at(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log-probabilities of ids [R, N]; -inf for masked ids and in rows where nothing is finite."""
    return _log_softmax_below(jnp.max(logits, axis=-1, keepdims=True), logits, ids)


def _log_softmax_below(top: jax.Array, logits: jax.Array, ids: jax.Array) -> jax.Array:
    """The same where each row's highest logit, [R, 1], is known."""
    top = jnp.where(top == -jnp.inf, 0.0, top)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))
    value = jnp.take_along_axis(logits, ids, axis=-1)
    is_scored = (value > -jnp.inf) & jnp.isfinite(log_total)
    return jnp.where(is_scored, (value - top) - log_total, -jnp.inf)


def _top_logprobs(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Ids i32[R, num] and log-probabilities f32[R, num] of the likeliest."""
    ids = _top_ids(_ordered_bits(logits), num)
    exists = jnp.arange(num, dtype=jnp.int32)[None, :] < logits.shape[-1]
    return ids, jnp.where(exists, _log_softmax_at(logits, ids), -jnp.inf)


def _top_ids(keys: jax.Array, num: int) -> jax.Array:
    """The ids of the num largest keys, lower id first among equals; 0 where there are no more.

    The num best blocks hold the num best entries: an entry of any other block has num before it.

    Args:
      keys: i32[R, V], above _NEVER.
      num: ids to find, at least 1.

    Returns:
      i32[R, num].
    """
    vocab_size = keys.shape[-1]
    ids = jnp.broadcast_to(_token_ids(keys), keys.shape)
    candidates = keys
    for size in _BLOCK_SIZES:
        if candidates.shape[-1] <= num * size:
            continue
        padding = ((0, 0), (0, -candidates.shape[-1] % size))
        padded = jnp.pad(candidates, padding, constant_values=_NEVER)
        largest = jnp.max(padded.reshape(keys.shape[0], -1, size), axis=-1)
        firsts = _ranked(largest, ids[:, ::size], num)
        ids = firsts[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None, :]
        ids = ids.reshape(keys.shape[0], num * size)
        candidates = jnp.take_along_axis(keys, jnp.minimum(ids, vocab_size - 1), axis=-1)
        candidates = jnp.where(ids < vocab_size, candidates, _NEVER)
    return _ranked(candidates, ids, num)


def _ranked(keys: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    """The ids of the num largest of few keys, each placed by its count of keys before it."""
    left, right = (keys[:, :, None], ids[:, :, None]), (keys[:, None, :], ids[:, None, :])
    is_before = (right[0] > left[0]) | ((right[0] == left[0]) & (right[1] < left[1]))
    ranks = _count(is_before)[:, None, :]
    is_at = ranks == jnp.arange(num, dtype=jnp.int32)[None, :, None]
    return _sum(jnp.broadcast_to(ids[:, None, :], is_at.shape), is_at)


def _no_top_logprobs(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    shape = logits.shape[0], num
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Integers that order as the floats do, -0 equal to 0, and stay above `_NEVER`."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
