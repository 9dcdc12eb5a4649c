from __future__ import annotations

import random

import numpy as np
import pytest

from engine.scheduling.cache_events import (
    CacheCleared,
    CacheContent,
    CacheWatch,
    PageRemoved,
    PageStored,
)
from engine.scheduling.config import GroupConfig
from engine.scheduling.prefix_cache import PageKeys, PrefixCache
from tests.scheduling.driver import Driver, config, request

GROUPS = (GroupConfig(num_pages=13, page_size=4), GroupConfig(num_pages=13, page_size=4, window=6))


class Reader:
    """Adds up what a watch tells, from the content it began with."""

    def __init__(self, content: CacheContent, watch: CacheWatch) -> None:
        self.pages = {(page.group, page.key): page for page in content.pages}
        self.num_removed = self.num_cleared = 0
        self._watch = watch

    def read(self) -> None:
        events = self._watch.take()
        assert events is not None
        for event in events:
            match event:
                case PageStored():
                    assert (event.group, event.key) not in self.pages
                    self.pages[event.group, event.key] = event
                case PageRemoved(group, key):
                    del self.pages[group, key]
                    self.num_removed += 1
                case CacheCleared():
                    self.pages.clear()
                    self.num_cleared += 1


def held(driver: Driver) -> dict[tuple[int, bytes], PageStored]:
    """The cache's own book: key to page of each group, and what each page holds."""
    cache = driver.scheduler._cache
    return {
        (group, key): cache._contents[group][page]
        for group, pages in enumerate(cache._pages)
        for key, page in pages.items()
    }


@pytest.mark.parametrize("seed", range(4))
def test_events_of_a_random_workload_add_up_to_the_cache(seed: int) -> None:
    generator = random.Random(seed)
    driver = Driver(config(groups=GROUPS))
    watch = CacheWatch(lambda: None)
    reader = None
    for number in range(60):
        prompt = [generator.randrange(3)] * generator.randrange(1, 17)
        prompt += [generator.randrange(50) for _ in range(generator.randrange(6))]
        salt = generator.choice([b"", b"", b"salt"])
        driver.submit(request(f"r{number}", prompt, generator.randrange(1, 9), salt=salt))
        for _ in range(generator.randrange(8)):
            driver.step()
        if number == 20:
            reader = Reader(driver.scheduler.watch_prefix_cache(watch), watch)
        if number > 20 and generator.random() < 0.1:
            driver.scheduler.reset_prefix_cache(generator.randrange(3))
        if reader is not None:
            reader.read()
            assert reader.pages == held(driver)
    driver.run()
    assert reader is not None
    reader.read()
    assert reader.pages == held(driver) and reader.pages
    assert reader.num_removed > 5 and reader.num_cleared


def test_records_are_what_was_asked_for_and_name_their_parents() -> None:
    driver = Driver(config())
    watch = CacheWatch(lambda: None)
    assert driver.scheduler.watch_prefix_cache(watch) == CacheContent(driver.config.groups, ())
    driver.submit(request("a", list(range(10)), 4, salt=b"s"))
    driver.run()
    stored = watch.take()
    assert stored is not None and all(isinstance(one, PageStored) for one in stored)
    keys = PageKeys(0, b"s", driver.config.groups)
    ids = np.array([*range(10), *driver.ids["a", 0]], np.int32)
    assert [one.key for one in stored] == [keys.key(0, place, ids) for place in range(3)]
    assert [one.parent for one in stored] == [None, stored[0].key, stored[1].key]
    assert [one.place for one in stored] == [0, 1, 2]
    assert b"".join(one.token_ids for one in stored) == ids[:12].tobytes()
    assert {one.cache_salt for one in stored} == {b"s"}


def test_content_lists_a_page_behind_its_parent_whatever_the_order_of_publishing() -> None:
    cache, ids = PrefixCache(GROUPS), np.arange(16, dtype=np.int32)
    keys = PageKeys(0, b"", GROUPS)
    for page, place in enumerate((2, 0, 1), start=1):
        cache.publish(0, keys, ids, place, page)
    content = cache.watch(CacheWatch(lambda: None))
    assert [page.place for page in content.pages] == [0, 1, 2]


def test_reader_is_woken_once_for_many_events() -> None:
    wakes: list[int] = []
    watch = CacheWatch(lambda: wakes.append(1))
    for _ in range(3):
        watch.add(CacheCleared())
    assert len(wakes) == 1
    assert watch.take() == [CacheCleared()] * 3 and watch.take() == []
    watch.add(CacheCleared())
    assert len(wakes) == 2


def test_reader_that_falls_behind_is_told_and_begins_anew() -> None:
    wakes: list[int] = []
    cache, ids = PrefixCache(GROUPS), np.arange(16, dtype=np.int32)
    watch = CacheWatch(lambda: wakes.append(1), max_events=2)
    keys = PageKeys(0, b"", GROUPS)
    cache.watch(watch)
    for place in range(4):
        cache.publish(0, keys, ids, place, 1 + place)
    assert watch.take() is None and watch.take() is None and len(wakes) == 2
    content = cache.watch(watch)
    assert len(content.pages) == 4 and watch.take() == []
    cache.evict(0, 1)
    assert watch.take() == [PageRemoved(0, content.pages[0].key)]


def test_nothing_is_kept_for_a_reader_that_left() -> None:
    cache, watch = PrefixCache(GROUPS), CacheWatch(lambda: None)
    cache.watch(watch)
    cache.unwatch(watch)
    cache.unwatch(watch)
    cache.clear()
    assert watch.take() == [] and not cache._watches
