"""Full pages by the ids they hold: found again by every request that begins with the same ids."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from engine.scheduling.cache_events import (
    CacheCleared,
    CacheContent,
    CacheEvent,
    CacheWatch,
    PageRemoved,
    PageStored,
)
from engine.scheduling.config import GroupConfig

_ROOT = bytes(16)


class PageKeys:
    """Keys of one choice's full pages, hashed as far as somebody asked.

    A key is BLAKE2b-128 of the parent's key, the group, what else decides the content (weights
    version and cache salt) and the page's ids; every part has a known length.
    """

    def __init__(self, weights_version: int, cache_salt: bytes, groups: tuple[GroupConfig, ...]):
        self.weights_version = weights_version
        self.cache_salt = cache_salt
        extra = weights_version.to_bytes(8, "little") + len(cache_salt).to_bytes(4, "little")
        self._prefixes = tuple(
            group.to_bytes(4, "little") + extra + cache_salt for group in range(len(groups))
        )
        self._page_sizes = tuple(group.page_size for group in groups)
        self._keys: tuple[list[bytes], ...] = tuple([] for _ in groups)

    def key(self, group: int, place: int, ids: np.ndarray) -> bytes:
        """The key of page `place`.

        Args:
          group: index of the cache group.
          place: index of the page in its row; the page is full.
          ids: i32[known], settled ids from the first on.
        """
        keys = self._keys[group]
        size = self._page_sizes[group]
        while len(keys) <= place:
            at = len(keys)
            digest = hashlib.blake2b(keys[-1] if keys else _ROOT, digest_size=16)
            digest.update(self._prefixes[group])
            digest.update(ids[at * size : (at + 1) * size].tobytes())
            keys.append(digest.digest())
        return keys[place]


@dataclasses.dataclass(frozen=True)
class Hit:
    """What the cache holds of one prefix."""

    num_tokens: int
    pages: tuple[list[int], ...]
    """Per group one page for each full page of the hit; 0 where no later token reads it."""


class PrefixCache:
    """Which page holds which prefix. Owns no page: the pools do."""

    def __init__(self, groups: tuple[GroupConfig, ...]) -> None:
        self._groups = groups
        self._pages: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
        self._contents: tuple[dict[int, PageStored], ...] = tuple({} for _ in groups)
        self._watches: list[CacheWatch] = []

    def watch(self, watch: CacheWatch) -> CacheContent:
        """Begins to tell `watch` of every change; what is cached now is the answer."""
        if watch not in self._watches:
            self._watches.append(watch)
        watch.begin()
        by_place = (
            sorted(contents.values(), key=lambda stored: stored.place)
            for contents in self._contents
        )
        return CacheContent(self._groups, tuple(page for pages in by_place for page in pages))

    def unwatch(self, watch: CacheWatch) -> None:
        """Ends it; one that does not watch is no error."""
        if watch in self._watches:
            self._watches.remove(watch)

    def _tell(self, event: CacheEvent) -> None:
        for watch in self._watches:
            watch.add(event)

    def find(self, keys: PageKeys, ids: np.ndarray, limit: int) -> Hit:
        """The longest prefix of at most `limit` tokens that every group can serve."""
        length = limit
        rows: list[list[int]] = [[] for _ in self._groups]
        while True:
            start = length
            for group in range(len(self._groups)):
                rows[group] = self._find(group, keys, ids, length)
                length = len(rows[group]) * self._groups[group].page_size
            if length == start:
                return Hit(length, tuple(rows))

    def _find(self, group: int, keys: PageKeys, ids: np.ndarray, limit: int) -> list[int]:
        config = self._groups[group]
        count = limit // config.page_size if config.prefix_cacheable else 0
        row: list[int] = []
        if config.first_page_read(count) == 0:
            for place in range(count):
                page = self._lookup(group, keys, ids, place)
                if not page:
                    break
                row.append(page)
            return row
        row = [self._lookup(group, keys, ids, place) for place in range(count)]
        while row:
            first = config.first_page_read(len(row))
            gap = next((p for p in range(len(row) - 1, first - 1, -1) if not row[p]), None)
            if gap is None:
                return [0] * first + row[first:]
            del row[gap:]
        return row

    def _lookup(self, group: int, keys: PageKeys, ids: np.ndarray, place: int) -> int:
        page = self._pages[group].get(keys.key(group, place, ids), 0)
        if not page:
            return 0
        size = self._groups[group].page_size
        # Equal ids are checked, so a collision of 128-bit keys costs a miss and never wrong text.
        wanted = ids[place * size : (place + 1) * size].tobytes()
        return page if self._contents[group][page].token_ids == wanted else 0

    def publish(self, group: int, keys: PageKeys, ids: np.ndarray, place: int, page: int) -> bool:
        """Offers a full page of settled ids; False when its content is known already."""
        key = keys.key(group, place, ids)
        if key in self._pages[group]:
            return False
        size = self._groups[group].page_size
        stored = PageStored(
            group,
            key,
            keys.key(group, place - 1, ids) if place else None,
            place,
            ids[place * size : (place + 1) * size].tobytes(),
            keys.cache_salt,
        )
        self._pages[group][key] = page
        self._contents[group][page] = stored
        self._tell(stored)
        return True

    def evict(self, group: int, page: int) -> None:
        """Forgets one page."""
        stored = self._contents[group].pop(page)
        del self._pages[group][stored.key]
        self._tell(PageRemoved(group, stored.key))

    def clear(self) -> None:
        """Forgets every page."""
        for pages, contents in zip(self._pages, self._contents, strict=True):
            pages.clear()
            contents.clear()
        self._tell(CacheCleared())

    def cached_pages(self, group: int) -> set[int]:
        """Pages of a group whose content is known."""
        return set(self._contents[group])
