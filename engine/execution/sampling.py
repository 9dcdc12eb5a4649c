"""Chooses the next id of each row from its logits, and reports the log-probabilities of the choice.

Pure functions inside the step. Every number of a row depends on that row alone: on its logits, its
columns, its tables and its ids so far, never on its place in the batch or on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from engine.config import LIMITS

# An entry's distance below the likeliest is >= 0, so its bits are a key that orders as it does.
_KEY_BITS = 31
_MASKED = 0x7F800000  # the key of an infinite distance
_TINY = float(jnp.finfo(jnp.float32).tiny)  # the least normal number
_NEVER = -(2**31)  # sorts below every logit, that of a masked entry included


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
class Sampled:
    """What one position of each row answers. No number in it is NaN."""

    token_ids: jax.Array  # i32[R], inside the vocabulary whatever the logits
    logprobs: jax.Array  # f32[R], of token_ids; -inf where nothing was left to choose
    ranks: jax.Array  # i32[R], 1 is the likeliest, equals counted lower id first
    top_ids: jax.Array  # i32[R, N], likeliest first, equals lower id first
    top_logprobs: jax.Array  # f32[R, N]
    nonfinite: jax.Array  # bool[R], a raw logit was NaN or infinite; the row's id is 0


@jax.named_scope("greedy")
def greedy(logits: jax.Array) -> Sampled:
    """Takes the likeliest id of each row, the lowest of equals.

    Args:
      logits: f32[R, V].

    Returns:
      Sampled with no alternatives (N = 0) and ranks of 1.
    """
    logits, nonfinite = _finite_rows(logits)
    token_ids = _argmax(logits)
    rows = logits.shape[0]
    return Sampled(
        token_ids=token_ids,
        logprobs=_log_softmax_at(logits, token_ids[:, None])[:, 0],
        ranks=jnp.ones(rows, jnp.int32),
        top_ids=jnp.zeros((rows, 0), jnp.int32),
        top_logprobs=jnp.zeros((rows, 0), jnp.float32),
        nonfinite=nonfinite,
    )


@jax.named_scope("sample")
def sample(
    logits: jax.Array,
    rows: SamplingRows,
    tables: SamplingTables,
    history: jax.Array,
    num_history: jax.Array,
    *,
    unroll: bool = False,
) -> Sampled:
    """Draws one id per row: edits, temperature, min-p, top-k, top-p, then Gumbel-max.

    The edits are, in this order: penalties, logit bias, allowed ids, bad words, min_tokens. A row
    they leave without any id answers id 0 with log-probability -inf if it asks for processed ones.

    Args:
      logits: f32[R, V], of the position after the last id of `history`.
      rows: columns of each row.
      tables: lists of each row.
      history: i32[R, L], the row's ids so far, the prompt first; what follows them is not read.
      num_history: i32[R], how many they are, the id that produced the logits included.
      unroll: write the searches' rounds out: slower to compile, but a GPU cannot record a loop.

    Returns:
      Sampled with N = LIMITS.logprobs alternatives, zeros unless some row wants any; entries past
      the vocabulary are id 0 with -inf. Log-probabilities are of the raw logits, or where the row
      says `processed_logprobs` of the edited, scaled (a greedy row's by 1) and filtered ones.
    """
    logits, nonfinite = _finite_rows(logits)
    edited = _edited(logits, rows, tables, history, num_history)
    distances = _filtered(_distances(edited, rows), rows, unroll)
    token_ids = _drawn(distances, rows)
    reported = jnp.where((rows.processed_logprobs != 0)[:, None], -distances, logits)
    top_ids, top_logprobs = jax.lax.cond(
        jnp.any(rows.num_logprobs > 0),
        lambda x: _top_logprobs(x, LIMITS.logprobs, unroll),
        lambda x: _no_top_logprobs(x, LIMITS.logprobs),
        reported,
    )
    logprobs, ranks, _, _ = logprobs_of(reported, token_ids, num_top=0)
    return Sampled(token_ids, logprobs, ranks, top_ids, top_logprobs, nonfinite)


def logprobs_of(
    logits: jax.Array, targets: jax.Array, *, num_top: int, unroll: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Scores given ids under the softmax of the logits.

    Args:
      logits: f32[R, V]; -inf is an id that cannot come. A row with NaN or +inf scores -inf.
      targets: i32[R]; one outside the vocabulary is moved to its nearest end.
      num_top: alternatives to report.
      unroll: write the rounds of the search for alternatives out.

    Returns:
      Log-probability f32[R] and rank i32[R] of the targets, ids i32[R, num_top] and
      log-probabilities f32[R, num_top] of the likeliest. Of equals the lower id comes first.
    """
    vocab_size = logits.shape[-1]
    targets = jnp.clip(targets, 0, vocab_size - 1)[:, None]
    value = jnp.take_along_axis(logits, targets, axis=-1)
    is_before = (logits > value) | ((logits == value) & (_token_ids(logits) < targets))
    ranks = 1 + _count(is_before)
    logprobs = _log_softmax_at(logits, targets)[:, 0]
    return logprobs, ranks, *_top_logprobs(logits, num_top, unroll)


def _finite_rows(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A row the model broke is masked whole: its id is 0, and nothing after this meets a NaN.
    nonfinite = ~jnp.all(jnp.isfinite(logits), axis=-1)
    return jnp.where(nonfinite[:, None], -jnp.inf, logits), nonfinite


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


def _filtered(distances: jax.Array, rows: SamplingRows, unroll: bool) -> jax.Array:
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
            lambda x: _likeliest_kept(x, top_k, top_p, unroll),
            lambda x: x,
            distances,
        )

    return jax.lax.cond(
        jnp.any(has_top_k | has_top_p | has_min_p), apply_all, lambda x: x, distances
    )


def _likeliest_kept(
    distances: jax.Array, top_k: jax.Array, top_p: jax.Array, unroll: bool
) -> jax.Array:
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
        lambda: _top_k_prefix(keys, top_k, unroll),
        lambda: everything,
    )
    last, num_shared = jax.lax.cond(
        jnp.any(top_p < 1.0),
        lambda: _top_p_prefix(keys, distances, top_p, top_k_last, top_k_shared, unroll),
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
            unroll,
        ),
        lambda: jnp.full_like(last, vocab_size),
    )
    is_kept = (keys < last[:, None]) | (shares_last & (_token_ids(keys) <= last_id[:, None]))
    return jnp.where(is_kept, distances, jnp.inf)


def _top_k_prefix(keys: jax.Array, top_k: jax.Array, unroll: bool) -> tuple[jax.Array, jax.Array]:
    # A row that keeps all must not depend on whether a neighbour made this search run.
    keeps_all = top_k >= keys.shape[-1]
    last = _first_reaching(keys, jnp.int32(1), top_k, _KEY_BITS, unroll)
    last = jnp.where(keeps_all, _MASKED, last)
    num_shared = top_k - _count(keys < last[:, None])
    return last, jnp.where(keeps_all, top_k, num_shared)


def _top_p_prefix(
    keys: jax.Array,
    distances: jax.Array,
    top_p: jax.Array,
    last: jax.Array,
    num_shared: jax.Array,
    unroll: bool,
) -> tuple[jax.Array, jax.Array]:
    masses = jnp.exp(-distances)
    shared = num_shared.astype(jnp.float32) * _mass(last)
    wanted = top_p * (_sum(masses, keys < last[:, None]) + shared)
    nucleus_last = jnp.minimum(_first_reaching(keys, masses, wanted, _KEY_BITS, unroll), last)
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
    keys: jax.Array, weights: jax.Array, wanted: jax.Array, num_bits: int, unroll: bool
) -> jax.Array:
    """Finds bit by bit the smallest key up to which the entries of a row weigh enough.

    Args:
      keys: i32[R, V] >= 0.
      weights: [R, V] or [], >= 0.
      wanted: [R], in the type of the weights.
      num_bits: of the largest key that may be found.
      unroll: write the rounds out.

    Returns:
      i32[R], 2 ** num_bits - 1 where all entries below it weigh less than wanted.
    """

    def decide_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        bit = jnp.left_shift(jnp.int32(1), num_bits - 1 - place)
        falls_short = _sum(weights, keys < (found + bit)[:, None]) < wanted
        return jnp.where(falls_short, found + bit, found)

    return jax.lax.fori_loop(0, num_bits, decide_bit, jnp.zeros_like(keys[:, 0]), unroll=unroll)


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
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))
    value = jnp.take_along_axis(logits, ids, axis=-1)
    is_scored = (value > -jnp.inf) & jnp.isfinite(log_total)
    return jnp.where(is_scored, (value - top) - log_total, -jnp.inf)


def _top_logprobs(logits: jax.Array, num: int, unroll: bool) -> tuple[jax.Array, jax.Array]:
    """Ids i32[R, num] and log-probabilities f32[R, num] of the likeliest, by max and mask."""
    keys = _ordered_bits(logits)
    num_rows, vocab_size = keys.shape

    def take(place: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        keys, ids = state
        nearest = _argmax(keys)
        keys = jnp.where(_token_ids(keys) == nearest[:, None], _NEVER, keys)
        return keys, jnp.where(
            jnp.arange(num, dtype=jnp.int32)[None, :] == place, nearest[:, None], ids
        )

    ids = jnp.zeros((num_rows, num), jnp.int32)
    _, ids = jax.lax.fori_loop(0, num, take, (keys, ids), unroll=unroll)
    exists = jnp.arange(num, dtype=jnp.int32)[None, :] < vocab_size
    return ids, jnp.where(exists, _log_softmax_at(logits, ids), -jnp.inf)


def _no_top_logprobs(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    shape = logits.shape[0], num
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Integers that order as the floats do, -0 equal to 0, and stay above `_NEVER`."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
