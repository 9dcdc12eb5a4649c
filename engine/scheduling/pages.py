"""Pages of the cache groups: who owns which, and which may be taken next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from engine.scheduling.config import GroupConfig


class PagePool:
    """Pages 1 .. num_pages - 1 of one group: free, owned (counted), or idle but still cached."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        """Makes a pool with every page free.

        Args:
          num_pages: page 0 included.
          on_evict: told of a cached page right before it is given to a new owner.
        """
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners = [0] * num_pages
        self._cached: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached without owner, oldest first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Cached pages without an owner."""
        return len(self._idle)

    def num_owners(self, page: int) -> int:
        """How many choices hold the page."""
        return self._owners[page]

    def is_cached(self, page: int) -> bool:
        """True when the page's content may be read by choices to come."""
        return page in self._cached

    def allocate(self, count: int) -> list[int]:
        """Gives `count` pages to one owner each, the longest unused cached ones last.

        The caller has checked `num_available`.
        """
        assert count <= self.num_available, "the caller checks num_available"
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self._on_evict(page)
            self._cached.remove(page)
            self._free.append(page)
        split = len(self._free) - count
        pages = self._free[split:]
        del self._free[split:]
        for page in pages:
            self._owners[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds an owner to cached pages."""
        for page in pages:
            assert page in self._cached, "only cached pages are shared"
            self._owners[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Takes an owner away; give a prefix's last page first, so that it is evicted first."""
        for page in pages:
            self._owners[page] -= 1
            assert self._owners[page] >= 0, f"page {page} is released more often than owned"
            if self._owners[page]:
                continue
            if page in self._cached:
                self._idle[page] = None
            else:
                self._free.append(page)

    def cache(self, page: int) -> None:
        """Keeps an owned page's content after its last owner, until it is evicted."""
        assert self._owners[page] > 0, "a page is cached by its owner"
        self._cached.add(page)

    def forget(self) -> None:
        """Drops the content of every cached page; owned ones stay with their owners."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._cached.clear()

    def count_idle(self, pages: Iterable[int]) -> int:
        """How many of the pages have no owner."""
        return sum(page in self._idle for page in pages)

    def audit(self, num_owners: np.ndarray, cached: set[int]) -> None:
        """Checks the pool against the owners counted elsewhere.

        Args:
          num_owners: i64[num_pages], entry 0 ignored.
          cached: pages whose content the prefix cache knows.

        Raises:
          AssertionError: naming the page and what is wrong.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free and 0 not in self._idle, "page 0 is trash and never given"
        for page in range(1, len(self._owners)):
            owners = int(num_owners[page])
            assert owners == self._owners[page], (
                f"page {page} has {owners} owners but counts {self._owners[page]}"
            )
            places = (page in free) + (page in self._idle) + (owners > 0)
            assert places == 1, f"page {page} is in {places} places"
        assert set(self._idle) <= self._cached, "an idle page is not cached"
        assert self._cached == cached, "pool and prefix cache disagree on what is cached"


class PageGroup:
    """Pool and page tables of one paged group, rows indexed by slot."""

    def __init__(
        self,
        config: GroupConfig,
        max_slots: int,
        max_model_len: int,
        on_evict: Callable[[int], None],
    ) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, on_evict)
        width = config.pages_for(max_model_len)
        self.table = np.zeros((max_slots, width), np.int32)
        """Owned pages; 0 where none, or where the window has passed."""
        self.num_pages = np.zeros(max_slots, np.int32)
        """Leading entries of a row that have been filled."""
        self.num_passed = np.zeros(max_slots, np.int32)
        """Leading entries the window has passed."""
        self.num_published = np.zeros(max_slots, np.int32)
        """Leading entries offered to the prefix cache."""

    def has_room(self, cached: list[int], num_tokens: int, num_active: int) -> bool:
        """True when a choice of `num_tokens` fits, and a page for each active row beside it."""
        count = self.config.pages_for(num_tokens) - len(cached)
        return self.pool.num_available - self.pool.count_idle(cached) >= count + num_active

    def occupy(self, slot: int, cached: list[int], num_tokens: int) -> None:
        """Fills a slot's row: pages found in the prefix cache, then new ones."""
        self.pool.retain(page for page in cached if page)
        pages = cached + self.pool.allocate(self.config.pages_for(num_tokens) - len(cached))
        self.table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.num_published[slot] = len(cached)
        passed = next((place for place, page in enumerate(cached) if page), len(cached))
        self.num_passed[slot] = passed

    def rows(self, slots: np.ndarray, num_tokens: int) -> np.ndarray:
        """i32[rows, pages of `num_tokens` tokens], a copy of the slots' tables."""
        return self.table[:, : self.config.pages_for(num_tokens)][slots]

    def publishable(
        self, slots: np.ndarray, num_tokens: np.ndarray
    ) -> Iterator[tuple[int, int, int]]:
        """(slot, place, page) of pages that have become full of settled tokens, each once.

        Args:
          slots: of settled rows.
          num_tokens: i32[rows], leading tokens of each slot that are settled and may be shared.
        """
        full = num_tokens // self.config.page_size
        for row in np.flatnonzero(full > self.num_published[slots]).tolist():
            slot, end = int(slots[row]), int(full[row])
            begin = int(self.num_published[slot])
            for place, page in enumerate(self.table[slot, begin:end].tolist(), begin):
                if page:
                    yield slot, place, page
            self.num_published[slot] = end

    def lacks_page(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """bool[rows]: the slot has no page for the token at position `num_tokens`."""
        return num_tokens // self.config.page_size >= self.num_pages[slots]

    def grow(self, slots: np.ndarray) -> None:
        """Gives each slot one more page."""
        self.table[slots, self.num_pages[slots]] = self.pool.allocate(len(slots))
        self.num_pages[slots] += 1

    def pass_window(self, slot: int, num_settled: int) -> list[int]:
        """Takes pages wholly below the window out of the row; the caller releases them later."""
        assert self.config.window is not None
        end = max(0, num_settled - self.config.window) // self.config.page_size
        begin = int(self.num_passed[slot])
        if end <= begin:
            return []
        pages = self.table[slot, begin:end].tolist()
        self.table[slot, begin:end] = 0
        self.num_passed[slot] = end
        return pages

    def vacate(self, slot: int) -> None:
        """Returns every page of a slot."""
        row = self.table[slot, self.num_passed[slot] : self.num_pages[slot]]
        self.pool.release(row[::-1].tolist())
        self.table[slot, : self.num_pages[slot]] = 0
        self.num_pages[slot] = self.num_passed[slot] = self.num_published[slot] = 0

    def count_owners(self) -> np.ndarray:
        """i64[num_pages], how many slots' rows name each page."""
        return np.bincount(self.table.ravel(), minlength=self.config.num_pages)

    def audit(self, is_owned: np.ndarray, num_settled: np.ndarray) -> None:
        """Checks the tables.

        Args:
          is_owned: bool[slots], the slot has an owner.
          num_settled: i32[slots], tokens with KV in settled steps.

        Raises:
          AssertionError: naming the slot and what is wrong.
        """
        owners = self.count_owners()
        for slot, row in enumerate(self.table):
            used = row[row > 0]
            assert is_owned[slot] or not len(used), f"free slot {slot} owns pages"
            assert len(set(used.tolist())) == len(used), f"slot {slot} owns a page twice"
            for place in np.flatnonzero((owners[row] > 1) & (row > 0)).tolist():
                end = (place + 1) * self.config.page_size
                assert end <= num_settled[slot], (
                    f"slot {slot} shares page {row[place]} before it is settled"
                )
