"""Packs a host Schedule into the one int32 array a device step reads, and a step's output back.

Both directions share one table of ranges, so that host and device cannot disagree about a place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from engine.config import LIMITS
from engine.execution.buckets import ProgramKey
from engine.execution.sampling import MaskRows, SamplingRows
from engine.scheduling.config import GroupConfig
from engine.scheduling.schedule import (
    SAMPLING_COLUMNS,
    Install,
    RowKind,
    Schedule,
    StepResult,
)
from models.cache import TRASH_PAGE


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Named ranges of one flat int32 array."""

    places: tuple[tuple[str, int, tuple[int, ...]], ...]
    """(name, offset, shape) in order."""
    size: int

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]]) -> Ranges:
        """Lays the shapes out one after another."""
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        offsets = list(itertools.accumulate(sizes, initial=0))
        places = tuple(
            (name, offset, shape)
            for (name, shape), offset in zip(shapes.items(), offsets, strict=False)
        )
        return cls(places=places, size=offsets[-1])

    def read(self, flat: jax.Array) -> dict[str, jax.Array]:
        """Static slices of a device array."""
        return {
            name: jax.lax.slice(flat, (place.start,), (place.stop,)).reshape(shape)
            for name, place, shape in self._slices
        }

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of a host array."""
        return {name: flat[place].reshape(shape) for name, place, shape in self._slices}

    @functools.cached_property
    def _slices(self) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
        return tuple(
            (name, slice(offset, offset + math.prod(shape)), shape)
            for name, offset, shape in self.places
        )


def carried_pages(key: ProgramKey) -> int:
    """Page table entries per group that a step's batch has room for.

    Each row may begin a page, and no page has fewer than 16 tokens outside tests; what is left
    over goes ahead of the step.
    """
    return key.rows + key.tokens // 16


@functools.cache
def batch_ranges(key: ProgramKey, num_groups: int, num_recurrent: int = 0) -> Ranges:
    """Ranges of the packed batch of a program. `prompt_ids` come last.

    Args:
      key: the program.
      num_groups: groups with page tables.
      num_recurrent: groups with state ids.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "num_decode": (1,),
        "slots": (key.rows,),
        "q_lens": (key.rows,),
        "kinds": (key.rows,),
    }
    shapes |= {f"page_changes_{g}": (3, carried_pages(key)) for g in range(num_groups)}
    shapes |= {f"state_ids_{g}": (key.rows, 2) for g in range(num_recurrent)}
    if key.sampler == "full":
        shapes |= {name: (key.rows,) for name, _ in SAMPLING_COLUMNS}
    if key.masked_rows:
        shapes |= {
            "generations": (key.rows,),
            "mask_slots": (key.masked_rows,),
            "mask_generations": (key.masked_rows,),
            "mask_words": (key.masked_rows, key.mask_words),
        }
    shapes["prompt_ids"] = (key.tokens,)
    return Ranges.of(shapes)


@functools.cache
def output_ranges(key: ProgramKey) -> Ranges:
    """Ranges of the packed output of a program; floats are bit-cast."""
    q = key.query_len if key.is_decode else 1
    shapes: dict[str, tuple[int, ...]] = {
        "sampled": (key.rows, q),
        "num_new": (key.rows,),
        "faults": (key.rows,),
        "logprobs": (key.rows, q),
        "ranks": (key.rows, q),
    }
    if key.sampler == "full":
        shapes["top_ids"] = (key.rows, q, LIMITS.logprobs)
        shapes["top_logprobs"] = (key.rows, q, LIMITS.logprobs)
    if key.head == "score":
        shapes["prompt_logprobs"] = (key.tokens,)
        shapes["prompt_ranks"] = (key.tokens,)
        shapes["prompt_top_ids"] = (key.tokens, LIMITS.logprobs)
        shapes["prompt_top_logprobs"] = (key.tokens, LIMITS.logprobs)
    return Ranges.of(shapes)


_FLOAT_OUTPUTS = ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs")


def check(
    schedule: Schedule,
    key: ProgramKey,
    *,
    max_slots: int,
    vocab_size: int,
    groups: tuple[GroupConfig, ...] = (),
) -> None:
    """Refuses what the device would not notice.

    Args:
      schedule: rows of the step.
      key: the program it is to run on.
      max_slots: slots of the state, the padding slot aside.
      vocab_size: rows of the embedding table.
      groups: pools that page tables and state ids must suit; empty: neither is checked.

    Raises:
      ValueError: rows or tokens over the bucket, a slot out of range or named twice, a page that
        is trash where one is needed or past the pool's end, a state that is trash, past the pool's
        end or written by another row, an id outside the vocabulary, masked rows or masks that the
        program does not take.
    """
    _check_rows(schedule, key, max_slots, vocab_size)
    _check_masks(schedule, key)
    paged = [group for group in groups if not group.is_recurrent]
    for group, table in zip(paged, schedule.page_tables, strict=bool(groups)):
        _check_pages(schedule, table, group)
    recurrent = [group for group in groups if group.is_recurrent]
    for group, state_ids in zip(recurrent, schedule.state_ids, strict=bool(groups)):
        _check_states(schedule, state_ids, group)


def pack(
    schedule: Schedule,
    key: ProgramKey,
    *,
    max_slots: int,
    page_changes: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Builds the packed array of one step, fresh every time: it is never written again.

    Args:
      schedule: rows of the step, checked.
      key: the program it runs on.
      max_slots: slots of the state, the padding slot aside.
      page_changes: per paged group i32[3, n] slots, places and pages, at most `carried_pages(key)`.
    """
    rows, tokens = schedule.num_rows, schedule.num_tokens
    ranges = batch_ranges(key, len(page_changes), len(schedule.state_ids))
    flat = np.zeros(ranges.size, np.int32)
    views = ranges.views(flat)
    views["num_decode"][0] = schedule.num_decode
    # A padding row's slot lies past the end: reads clip to the padding slot, writes are dropped.
    views["slots"][rows:] = max_slots + 1
    views["slots"][:rows] = schedule.slots
    views["q_lens"][:rows] = schedule.q_lens
    views["kinds"][:rows] = schedule.kinds
    for group, changes in enumerate(page_changes):
        _put_changes(views[f"page_changes_{group}"], changes, max_slots)
    # A padding row's states stay 0: it writes the trash state.
    for group, state_ids in enumerate(schedule.state_ids):
        views[f"state_ids_{group}"][:rows] = state_ids
    if key.sampler == "full":
        for name, dtype in SAMPLING_COLUMNS:
            views[name][:rows] = schedule.sampling[name].astype(dtype, copy=False).view(np.int32)
    if key.masked_rows:
        _put_masks(views, schedule, max_slots)
    views["prompt_ids"][:tokens] = schedule.token_ids
    return flat


def _put_masks(views: dict[str, np.ndarray], schedule: Schedule, max_slots: int) -> None:
    """Unused entries name a slot past the end and allow nothing."""
    views["generations"][: schedule.num_rows] = schedule.generations.astype(np.int32)
    views["mask_slots"][:] = max_slots + 1
    if (masks := schedule.masks) is not None:
        views["mask_slots"][: masks.num_masks] = masks.slots
        views["mask_generations"][: masks.num_masks] = masks.generations.astype(np.int32)
        views["mask_words"][: masks.num_masks] = masks.words


def _put_changes(view: np.ndarray, changes: np.ndarray, max_slots: int) -> None:
    """Unused entries name a slot past the end: their writes are dropped."""
    num_changes = changes.shape[1]
    view[:, :num_changes] = changes
    view[0, num_changes:] = max_slots + 1


def _check_rows(schedule: Schedule, key: ProgramKey, max_slots: int, vocab_size: int) -> None:
    rows, tokens = schedule.num_rows, schedule.num_tokens
    if rows > key.rows or tokens > key.tokens:
        raise ValueError(f"{rows} rows of {tokens} tokens exceed the program {key}")
    if int(schedule.q_lens.sum()) != tokens:
        raise ValueError(f"query lengths sum to {int(schedule.q_lens.sum())} but {tokens} ids came")
    if key.is_decode and np.any(schedule.q_lens != key.query_len):
        raise ValueError(f"query lengths {schedule.q_lens.tolist()} do not suit the program {key}")
    num_chunks = rows - schedule.num_decode
    if num_chunks > key.max_chunk_rows:
        raise ValueError(f"{num_chunks} chunks exceed the program's {key.max_chunk_rows}")
    slots = schedule.slots
    if rows and (slots.min() < 0 or slots.max() >= max_slots):
        raise ValueError(f"slots {slots.tolist()} must lie in [0, {max_slots})")
    if len(np.unique(slots)) != rows:
        raise ValueError(f"slots {slots.tolist()} name one slot twice")
    ids = schedule.token_ids
    if tokens and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"token ids must lie in [0, {vocab_size}), got {ids.min()} to {ids.max()}")


def _check_masks(schedule: Schedule, key: ProgramKey) -> None:
    """A row whose mask is missing passes: the device fails it alone."""
    num_masked = int(np.count_nonzero(schedule.kinds & RowKind.MASKED))
    num_masks = 0 if schedule.masks is None else schedule.masks.num_masks
    if max(num_masked, num_masks) > key.masked_rows:
        raise ValueError(
            f"{num_masked} masked rows with {num_masks} masks exceed the {key.masked_rows} that "
            f"the program {key} takes"
        )
    if schedule.masks is not None and schedule.masks.words.shape[1] != key.mask_words:
        raise ValueError(
            f"masks have {schedule.masks.words.shape[1]} words, the program takes {key.mask_words}"
        )


def _check_pages(schedule: Schedule, table: np.ndarray, group: GroupConfig) -> None:
    """Every position that a row reads or writes lies in a page of the pool that is not trash."""
    ends = -(-schedule.kv_lens // group.page_size)
    starts = np.zeros_like(ends)
    if group.window is not None:
        seen = schedule.kv_lens - schedule.q_lens - group.window + 1
        starts = np.maximum(seen, 0) // group.page_size
    # One column more than the table has, so that a table too narrow lacks a page too.
    index = np.arange(table.shape[1] + 1, dtype=np.int32)
    is_missing = np.ones((len(table), len(index)), np.bool_)
    np.equal(table, TRASH_PAGE, out=is_missing[:, :-1])
    is_missing &= (index >= starts[:, None]) & (index < ends[:, None])
    if is_missing.any():
        row = int(np.flatnonzero(is_missing.any(axis=1))[0])
        raise ValueError(
            f"row {row} (slot {schedule.slots[row]}) reaches {schedule.kv_lens[row]} tokens but "
            f"owns no page at {np.flatnonzero(is_missing[row])[0]} of its table"
        )
    if table.size and (table.min() < 0 or table.max() >= group.num_pages):
        raise ValueError(
            f"pages must lie in [0, {group.num_pages}), got {table.min()} to {table.max()}"
        )


def _check_states(schedule: Schedule, state_ids: np.ndarray, group: GroupConfig) -> None:
    """Every row reads and writes a state of the pool, and no row's state is written by another."""
    if state_ids.shape != (schedule.num_rows, 2):
        raise ValueError(f"{schedule.num_rows} rows need 2 state ids each, got {state_ids.shape}")
    if state_ids.size and (state_ids.min() <= TRASH_PAGE or state_ids.max() >= group.num_pages):
        raise ValueError(
            f"state ids must lie in [1, {group.num_pages}), got {state_ids.min()} to "
            f"{state_ids.max()}"
        )
    rows = np.arange(schedule.num_rows)
    writers = np.full(group.num_pages, -1)
    writers[state_ids[:, 1]] = rows
    found = writers[state_ids]  # [rows, 2], who writes what the row reads or writes
    is_foreign = (found >= 0) & (found != rows[:, None])
    if is_foreign.any():
        owner, writer = int(np.argwhere(is_foreign)[0, 0]), int(found[is_foreign][0])
        raise ValueError(
            f"row {writer} (slot {schedule.slots[writer]}) writes state "
            f"{state_ids[writer, 1]}, which row {owner} (slot {schedule.slots[owner]}) owns"
        )


@flax.struct.dataclass
class Packed:
    """A packed batch taken apart on the device, ids aside."""

    num_decode: jax.Array  # i32[]
    slots: jax.Array  # i32[R], max_slots + 1 for padding rows
    q_lens: jax.Array  # i32[R], 0 for padding rows
    kinds: jax.Array  # i32[R] of RowKind, 0 for padding rows
    page_changes: tuple[jax.Array, ...]  # per paged group i32[3, n], slots, places, pages
    sampling: SamplingRows | None  # None under the greedy sampler
    state_ids: tuple[jax.Array, ...] = ()  # per recurrent group i32[R, 2]
    masks: MaskRows | None = None  # None in a program without masks, and once `sample` has them

    def has(self, kind: RowKind) -> jax.Array:
        """bool[R], True where the row is of the kind."""
        return (self.kinds & jnp.int32(int(kind))) != 0


def unpack(
    key: ProgramKey, num_groups: int, flat: jax.Array, num_recurrent: int = 0
) -> tuple[jax.Array, Packed]:
    """Static slices of the packed array: the host's ids i32[T], and everything else."""
    parts = batch_ranges(key, num_groups, num_recurrent).read(flat)
    sampling = None
    if key.sampler == "full":
        sampling = SamplingRows(
            **{
                name: jax.lax.bitcast_convert_type(parts[name], jnp.dtype(dtype))
                for name, dtype in SAMPLING_COLUMNS
            }
        )
    masks = None
    if key.masked_rows:
        masks = MaskRows(
            is_masked=(parts["kinds"] & jnp.int32(int(RowKind.MASKED))) != 0,
            row_slots=parts["slots"],
            row_generations=parts["generations"],
            slots=parts["mask_slots"],
            generations=parts["mask_generations"],
            words=parts["mask_words"],
        )
    packed = Packed(
        num_decode=parts["num_decode"][0],
        slots=parts["slots"],
        q_lens=parts["q_lens"],
        kinds=parts["kinds"],
        page_changes=tuple(parts[f"page_changes_{g}"] for g in range(num_groups)),
        sampling=sampling,
        state_ids=tuple(parts[f"state_ids_{g}"] for g in range(num_recurrent)),
        masks=masks,
    )
    return parts["prompt_ids"], packed


def pack_output(key: ProgramKey, parts: dict[str, jax.Array]) -> jax.Array:
    """One flat i32 array of a step's outputs, so that one copy brings them to the host."""
    pieces = []
    for name, _, shape in output_ranges(key).places:
        piece = parts[name]
        if name in _FLOAT_OUTPUTS:
            piece = jax.lax.bitcast_convert_type(piece, jnp.int32)
        pieces.append(piece.reshape(shape).reshape(-1))
    return jnp.concatenate(pieces)


def unpack_output(key: ProgramKey, flat: np.ndarray, num_rows: int, num_tokens: int) -> StepResult:
    """The host's view of one settled output, padding cut off."""
    views = output_ranges(key).views(flat)
    parts = {
        name: (view.view(np.float32) if name in _FLOAT_OUTPUTS else view)[
            : num_tokens if name.startswith("prompt_") else num_rows
        ]
        for name, view in views.items()
    }
    return StepResult(**parts)


@dataclasses.dataclass(frozen=True)
class InstallShape:
    """Sizes of one install program."""

    rows: int
    """Slots written at once."""
    max_slots: int
    max_model_len: int
    vocab_size: int
    num_groups: int
    """Paged cache groups."""
    table_width: int
    """Pages of one slot's table."""

    @property
    def page_changes(self) -> int:
        """Page table entries written at once, per group: whole tables of all rows."""
        return self.rows * self.table_width


@functools.cache
def install_ranges(shape: InstallShape) -> Ranges:
    """Ranges of a packed install."""
    n = shape.rows
    return Ranges.of(
        {
            "slots": (n,),
            "num_cached": (n,),
            "num_allowed": (n,),
            "stop_ids": (n, LIMITS.stop_ids),
            "bias_ids": (n, LIMITS.logit_bias),
            "bias_values": (n, LIMITS.logit_bias),
            "bad_words": (n, LIMITS.bad_words, LIMITS.bad_word_ids),
            "allowed_ids": (n, LIMITS.allowed_ids),
            "history": (n, shape.max_model_len),
        }
        | {f"page_changes_{g}": (3, shape.page_changes) for g in range(shape.num_groups)}
    )


def pack_installs(
    installs: tuple[Install, ...], page_changes: tuple[np.ndarray, ...], shape: InstallShape
) -> list[np.ndarray]:
    """Packed arrays of as many runs of the install program as it takes, in order.

    Args:
      installs: slots to install.
      page_changes: per paged group i32[3, n], written once every slot is installed.
      shape: of the program.
    """
    longest = max((changes.shape[1] for changes in page_changes), default=0)
    first = max(1, -(-len(installs) // shape.rows))  # the run with the last slots
    num_runs = first - 1 + max(-(-longest // shape.page_changes), 1)
    if not installs and not longest:
        return []
    packed = []
    for run in range(num_runs):
        begin = max(0, run - first + 1) * shape.page_changes
        end = begin + shape.page_changes if run >= first - 1 else 0
        packed.append(
            pack_install(
                installs[run * shape.rows : (run + 1) * shape.rows],
                tuple(changes[:, begin:end] for changes in page_changes),
                shape,
            )
        )
    return packed


def pack_install(
    installs: tuple[Install, ...], page_changes: tuple[np.ndarray, ...], shape: InstallShape
) -> np.ndarray:
    """Builds the packed array of one install; unused rows name a slot past the end."""
    ranges = install_ranges(shape)
    flat = np.zeros(ranges.size, np.int32)
    views = ranges.views(flat)
    views["slots"][:] = shape.max_slots + 1
    for name in ("stop_ids", "bias_ids", "allowed_ids"):
        views[name][:] = shape.vocab_size  # past the vocabulary: dropped
    views["bad_words"][:] = -1
    for row, install in enumerate(installs):
        views["slots"][row] = install.slot
        views["num_cached"][row] = install.num_cached_tokens
        views["history"][row, : len(install.known_ids)] = install.known_ids
        views["stop_ids"][row, : len(install.stop_ids)] = install.stop_ids
        views["num_allowed"][row] = len(install.allowed_ids)
        views["allowed_ids"][row, : len(install.allowed_ids)] = install.allowed_ids
        for i, (token_id, bias) in enumerate(install.logit_bias):
            views["bias_ids"][row, i] = token_id
            views["bias_values"].view(np.float32)[row, i] = bias
        for i, word in enumerate(install.bad_words):
            views["bad_words"][row, i, LIMITS.bad_word_ids - len(word) :] = word
    for group, changes in enumerate(page_changes):
        _put_changes(views[f"page_changes_{group}"], changes, shape.max_slots)
    return flat
