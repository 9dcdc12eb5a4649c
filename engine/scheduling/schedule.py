"""What runs in one step, as plain arrays from which every host of a mesh builds the same batch."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

POISON_ID = 0
"""Stands in the packed ids where the truth exists only on the device; never read there."""


class RowKind(enum.IntFlag):
    """Facts about one row of a step."""

    DEVICE_ID = 1
    """The first id of the row is `last_tokens[slot]`; the packed one is poison."""
    SAMPLES = 2
    """The row's sample counts: a decode row or the last chunk of a prompt."""
    DECODE = 4
    """A decode row (its query length is the program's), else a prefill chunk."""
    SCORES = 8
    """Prompt log-probabilities of this chunk are wanted."""
    MASKED = 16
    """The row's sample is bounded by a mask of its own slot and generation, or the row fails."""


SAMPLING_COLUMNS: tuple[tuple[str, type], ...] = (
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("presence_penalty", np.float32),
    ("frequency_penalty", np.float32),
    ("repetition_penalty", np.float32),
    ("top_k", np.int32),
    ("seed_low", np.uint32),
    ("seed_high", np.uint32),
    ("choice", np.int32),
    ("output_index", np.int32),
    ("min_tokens", np.int32),
    ("prompt_len", np.int32),
    ("num_logprobs", np.int32),
    ("processed_logprobs", np.int32),
)
"""Per-row sampling columns in packed order. `num_logprobs`: -1 none, else alternatives wanted.

`output_index`: outputs of this choice sampled before the row's first sample.
"""


@dataclasses.dataclass(frozen=True)
class Install:
    """What the device must know of a slot before its first row: known ids and bounded tables."""

    slot: int
    known_ids: np.ndarray
    """i32[known]: prompt, and outputs after a preemption."""
    num_cached_tokens: int
    """Tokens whose pages and states come from the prefix cache."""
    stop_ids: tuple[int, ...]
    """Masked until min_tokens."""
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    allowed_ids: tuple[int, ...]
    """Empty: every id is allowed."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """Which ids the masked rows of a step may sample: one entry per row, in any order."""

    slots: np.ndarray
    """i32[masks]."""
    generations: np.ndarray
    """i64[masks], of the slot's owner whom the entry is for."""
    words: np.ndarray
    """i32[masks, ceil(vocab_size / 32)]: id i is allowed when bit i % 32 of word i // 32 is."""

    @property
    def num_masks(self) -> int:
        """Entries."""
        return len(self.slots)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One step. Rows stand in batch order: decode rows first, then chunks."""

    step: int
    is_decode: bool
    """True: every row is a decode row of equal query length (a `decode` program)."""
    is_full_sampler: bool
    """False: every row is satisfied by argmax and its log-probability."""
    scores_prompt: bool
    """True: some chunk wants prompt log-probabilities (the `score` head)."""
    slots: np.ndarray
    """i32[rows], unique."""
    generations: np.ndarray
    """i64[rows], counter of the slot's owners."""
    kinds: np.ndarray
    """i32[rows] of RowKind."""
    q_lens: np.ndarray
    """i32[rows], new tokens of each row, >= 1."""
    token_ids: np.ndarray
    """i32[sum(q_lens)], host ids in row order; POISON_ID where the row is DEVICE_ID."""
    kv_lens: np.ndarray
    """i32[rows], tokens with KV after this step (upper bound; pages are owned up to it)."""
    page_tables: tuple[np.ndarray, ...]
    """Per paged group i32[rows, width >= pages of the longest row]; unused entries are 0."""
    sampling: dict[str, np.ndarray]
    """SAMPLING_COLUMNS by name, each [rows]."""
    installs: tuple[Install, ...] = ()
    """Slots to install before this step runs."""
    state_ids: tuple[np.ndarray, ...] = ()
    """Per recurrent group i32[rows, 2]: the state a row goes on from and the one it writes."""
    masks: Masks | None = None
    """Of the MASKED rows; None where there are none."""

    @property
    def num_rows(self) -> int:
        """Rows that are not padding."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return len(self.token_ids)

    @property
    def num_decode(self) -> int:
        """Leading decode rows."""
        return int(np.count_nonzero(self.kinds & RowKind.DECODE))


class RowFault(enum.IntFlag):
    """Why the device flagged a row."""

    BAD_ID = 1
    """The id to embed lay outside the vocabulary: it was never written or was corrupted."""
    NONFINITE_KV = 2
    """A key, a value or a recurrent state was not finite; 0 was stored."""
    NONFINITE_LOGITS = 4
    """A logit was NaN or infinite."""
    MISSING_MASK = 8
    """A masked row found no mask of its own slot and generation."""
    NOTHING_ALLOWED = 16
    """Mask, allowed ids, bad words and min_tokens left a masked row no id to choose."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of one settled launch, rows as in its schedule."""

    sampled: np.ndarray
    """i32[rows, q]."""
    num_new: np.ndarray
    """i32[rows], ids accepted of each row: 1 today, up to q with drafts, 0 without SAMPLES."""
    faults: np.ndarray
    """i32[rows] of RowFault."""
    logprobs: np.ndarray
    """f32[rows, q], of the sampled id."""
    ranks: np.ndarray
    """i32[rows, q], 1 is the likeliest."""
    top_ids: np.ndarray | None = None
    """i32[rows, q, N] for the full sampler."""
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    """f32[tokens]: log-probability of the id that follows token t in its row (score head)."""
    prompt_ranks: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    """i32[tokens, N]."""
    prompt_top_logprobs: np.ndarray | None = None
