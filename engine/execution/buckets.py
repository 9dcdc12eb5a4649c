"""The ladder of padded shapes: which programs exist, and which one a schedule runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from engine.scheduling.schedule import Schedule

Sampler = Literal["greedy", "full"]
Head = Literal["sample", "score"]


@dataclasses.dataclass(frozen=True, order=True)
class ProgramKey:
    """Everything that tells one compiled step from another. Two equal keys are one program."""

    is_decode: bool
    head: Head
    rows: int
    """Padded rows."""
    tokens: int
    """Padded tokens; rows x query_len for a decode program."""
    query_len: int
    """Tokens of one decode row."""
    width: int
    """Pages in one row's table."""
    sampler: Sampler
    max_chunk_rows: int
    """Chunks a mixed program holds; 0 for a decode program."""
    masked_rows: int = 0
    """Masks a step brings at most; 0 for a program without the feature."""
    mask_words: int = 0
    """32-bit words of one mask."""

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "mixed"
        head = "+score" if self.head == "score" else ""
        masks = f" masks {self.masked_rows}" if self.masked_rows else ""
        return (
            f"{kind}{head} rows {self.rows} tokens {self.tokens} query {self.query_len} "
            f"pages {self.width} {self.sampler}{masks}"
        )


@dataclasses.dataclass(frozen=True)
class Ladder:
    """All rungs of one engine."""

    rows: tuple[int, ...]
    """Padded rows of decode programs, rising."""
    tokens: tuple[int, ...]
    """Padded tokens of mixed programs, rising."""
    widths: tuple[int, ...]
    """Padded page-table widths of decode programs, rising; mixed ones take the last."""
    query_lens: tuple[int, ...]
    """Query lengths of decode programs."""
    max_chunk_rows: int
    deterministic: bool
    """One decode and one mixed program, both with the full sampler."""
    masked_rows: int = 0
    """Masks one step brings at most. 0: no program takes masks.

    Otherwise three more programs do, of the last rungs: a decode one of either sampler and a mixed
    one with the score head, which holds every mixed step. A deterministic ladder gets no more
    programs: all of its own take masks, so that a masked row moves no other row to another program.
    """
    mask_words: int = 0
    """32-bit words of one mask."""

    def keys(self) -> tuple[ProgramKey, ...]:
        """Every program of the ladder, the ones a first request needs first."""
        samplers: tuple[Sampler, ...] = ("full",) if self.deterministic else ("greedy", "full")
        keys = [
            self._decode(rows, query_len, width, sampler)
            for sampler in samplers
            for query_len in self.query_lens
            for width in (self.widths[-1:] if self.deterministic else self.widths)
            for rows in (self.rows[-1:] if self.deterministic else self.rows)
        ]
        token_rungs = self.tokens[-1:] if self.deterministic else self.tokens
        keys += [self._mixed(t, sampler, "sample") for t in token_rungs for sampler in samplers]
        keys += [self._mixed(t, "full", "score") for t in token_rungs]
        if not self.masked_rows:
            return tuple(keys)
        if self.deterministic:
            return tuple(self._masked(key) for key in keys)
        masked_decodes = (
            self._decode(self.rows[-1], query_len, self.widths[-1], sampler)
            for sampler in samplers
            for query_len in self.query_lens
        )
        masked = (*masked_decodes, self._mixed(self.tokens[-1], "full", "score"))
        return (*keys, *(self._masked(key) for key in masked))

    def key_of(self, schedule: Schedule) -> ProgramKey:
        """The smallest program that holds a schedule.

        Raises:
          ValueError: the schedule exceeds every rung, with its shape.
        """
        masks = schedule.masks
        if masks is not None and not self.masked_rows:
            raise ValueError(
                f"{masks.num_masks} rows are masked but no program takes masks; "
                "start the engine with masked_rows"
            )
        if self.masked_rows and self.deterministic:
            return self._masked(self._unmasked_key_of(schedule))
        if masks is None:
            return self._unmasked_key_of(schedule)
        last = dataclasses.replace(
            self, rows=self.rows[-1:], widths=self.widths[-1:], tokens=self.tokens[-1:]
        )
        if not schedule.is_decode:
            schedule = dataclasses.replace(schedule, scores_prompt=True)
        return self._masked(last._unmasked_key_of(schedule))

    def _masked(self, key: ProgramKey) -> ProgramKey:
        return dataclasses.replace(key, masked_rows=self.masked_rows, mask_words=self.mask_words)

    def _unmasked_key_of(self, schedule: Schedule) -> ProgramKey:
        sampler: Sampler = "full" if self.deterministic or schedule.is_full_sampler else "greedy"
        num_pages = max(table.shape[1] for table in schedule.page_tables)
        if schedule.is_decode:
            rows = self.rows[-1:] if self.deterministic else self.rows
            widths = self.widths[-1:] if self.deterministic else self.widths
            return self._decode(
                _rung(rows, schedule.num_rows, "rows"),
                int(schedule.q_lens[0]),
                _rung(widths, num_pages, "pages in a row's table"),
                sampler,
            )
        _rung(self.rows, schedule.num_rows, "rows")
        _rung(self.widths, num_pages, "pages in a row's table")
        tokens = self.tokens[-1:] if self.deterministic else self.tokens
        head: Head = "score" if schedule.scores_prompt else "sample"
        sampler = "full" if head == "score" else sampler
        return self._mixed(_rung(tokens, schedule.num_tokens, "tokens"), sampler, head)

    def _decode(self, rows: int, query_len: int, width: int, sampler: Sampler) -> ProgramKey:
        return ProgramKey(
            is_decode=True,
            head="sample",
            rows=rows,
            tokens=rows * query_len,
            query_len=query_len,
            width=width,
            sampler=sampler,
            max_chunk_rows=0,
        )

    def _mixed(self, tokens: int, sampler: Sampler, head: Head) -> ProgramKey:
        return ProgramKey(
            is_decode=False,
            head=head,
            rows=self.rows[-1],
            tokens=tokens,
            query_len=1,
            width=self.widths[-1],
            sampler=sampler,
            max_chunk_rows=self.max_chunk_rows,
        )


def _rung(rungs: Iterable[int], size: int, what: str) -> int:
    rungs = tuple(rungs)
    for rung in rungs:
        if size <= rung:
            return rung
    raise ValueError(f"a step of {size} {what} exceeds the largest rung {rungs[-1]}")


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, ... and last, which need not be a power."""
    rungs = []
    rung = first
    while rung < last:
        rungs.append(rung)
        rung *= 2
    return (*rungs, last)
