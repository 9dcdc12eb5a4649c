from __future__ import annotations

import numpy as np
import pytest

from engine.scheduling.config import GroupConfig
from engine.scheduling.pages import PagePool
from engine.scheduling.prefix_cache import PageKeys, PrefixCache
from tests.scheduling.driver import Driver, config, request

IDS = np.arange(40, dtype=np.int32)


def test_page_zero_is_never_given_and_the_longest_unused_page_goes_first():
    evicted: list[int] = []
    pool = PagePool(5, evicted.append)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4] and pool.num_available == 0
    for page in pages[:3]:
        pool.cache(page)
    pool.release([pages[1], pages[0], pages[2], pages[3]])
    assert (pool.num_free, pool.num_idle) == (1, 3)
    pool.retain([pages[1]])
    assert set(pool.allocate(2)) == {pages[3], pages[0]}
    assert evicted == [pages[0]] and pool.num_owners(pages[1]) == 1


def test_pool_refuses_what_only_a_bug_can_ask():
    pool = PagePool(3, lambda page: None)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="only cached pages are shared"):
        pool.retain([page])
    pool.release([page])
    with pytest.raises(AssertionError, match="released more often than owned"):
        pool.release([page])
    with pytest.raises(AssertionError, match="the caller checks num_available"):
        pool.allocate(9)


def test_key_depends_on_every_part():
    # Ledger row SCHED-16 with the test below.
    groups = (GroupConfig(9, 4), GroupConfig(9, 4))
    base = PageKeys(0, b"", groups).key(0, 1, IDS)
    other_start = IDS.copy()
    other_start[0] = 9
    assert len(base) == 16
    assert base == PageKeys(0, b"", groups).key(0, 1, IDS)
    others = [
        PageKeys(0, b"", groups).key(0, 1, other_start),
        PageKeys(0, b"", groups).key(1, 1, IDS),
        PageKeys(1, b"", groups).key(0, 1, IDS),
        PageKeys(0, b"a", groups).key(0, 1, IDS),
        PageKeys(0, b"", groups).key(0, 0, IDS),
    ]
    assert len({base, *others}) == 6


def test_equal_keys_of_different_ids_miss(monkeypatch):
    groups = (GroupConfig(9, 4),)
    cache, keys = PrefixCache(groups), PageKeys(0, b"", groups)
    monkeypatch.setattr(PageKeys, "key", lambda self, group, place, ids: b"same")
    assert cache.publish(0, keys, IDS, 0, 3)
    assert cache.find(keys, IDS, 4).num_tokens == 4
    assert cache.find(keys, IDS + 1, 4).num_tokens == 0


def test_second_page_of_the_same_content_stays_private():
    groups = (GroupConfig(9, 4),)
    cache, keys = PrefixCache(groups), PageKeys(0, b"", groups)
    assert cache.publish(0, keys, IDS, 0, 3) and not cache.publish(0, keys, IDS, 0, 5)
    assert cache.find(keys, IDS, 9).pages == ([3],) and cache.cached_pages(0) == {3}


def test_hit_is_the_longest_that_every_group_serves():
    # Ledger row SCHED-14.
    groups = (GroupConfig(99, 4), GroupConfig(99, 6), GroupConfig(99, 4, window=5))
    cache, keys = PrefixCache(groups), PageKeys(0, b"", groups)
    for place in range(8):
        cache.publish(0, keys, IDS, place, 10 + place)
    for place in range(5):
        cache.publish(1, keys, IDS, place, 20 + place)
    assert cache.find(keys, IDS, 39).num_tokens == 0, "the window group holds nothing"
    for place in (4, 5, 6):
        cache.publish(2, keys, IDS, place, 30 + place)
    hit = cache.find(keys, IDS, 39)
    assert hit.num_tokens == 24
    assert hit.pages == ([10, 11, 12, 13, 14, 15], [20, 21, 22, 23], [0, 0, 0, 0, 34, 35])
    plain = PrefixCache((GroupConfig(9, 4, prefix_cacheable=False),))
    keys = PageKeys(0, b"", (GroupConfig(9, 4),))
    plain.publish(0, keys, IDS, 0, 1)
    assert plain.find(keys, IDS, 9).num_tokens == 0


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompt_around_a_page_border_is_equal_cold_and_warm(length, deterministic):
    # Ledger row SCHED-10: a hit leaves at least one token to compute.
    driver = Driver(config(deterministic=deterministic))
    for name in "abc":
        driver.submit(request(name, list(range(length)), 6))
        driver.run()
    cached = [driver.finished[name, 0].num_cached_tokens for name in "abc"]
    assert cached == [0, (length - 1) // 4 * 4, (length - 1) // 4 * 4]


def test_pages_are_not_shared_between_salts():
    driver = Driver(config())
    for name, salt in [("a", b""), ("b", b"x"), ("c", b"y"), ("d", b"x")]:
        driver.submit(request(name, list(range(9)), 2, salt=salt))
        driver.run()
    assert [driver.finished[name, 0].num_cached_tokens for name in "abcd"] == [0, 0, 0, 8]


def test_new_weights_and_a_reset_miss():
    driver = Driver(config())

    def cached(name):
        driver.submit(request(name, list(range(9)), 2))
        driver.run()
        return driver.finished[name, 0].num_cached_tokens

    assert [cached("a"), cached("b")] == [0, 8]
    driver.scheduler.reset_prefix_cache()
    assert [cached("c"), cached("d")] == [0, 8]
    driver.scheduler.reset_prefix_cache(weights_version=1)
    assert [cached("e"), cached("f")] == [0, 8]


def test_reset_while_requests_run_keeps_their_pages_and_hides_old_weights():
    driver = Driver(config(max_chunk=4, groups=(GroupConfig(6, 4),)))
    for name in "ab":
        driver.submit(request(name, list(range(13)), 3))
    driver.launch()
    assert driver.scheduler.num_waiting == 1, "b has no room but knows its keys"
    driver.scheduler.reset_prefix_cache(weights_version=1)
    driver.scheduler.audit()
    driver.run()
    assert driver.finished["b", 0].num_cached_tokens == 0, "b read what old weights made"


def test_next_turn_reads_the_pages_of_outputs_except_in_deterministic_mode():
    for deterministic, expected in [(False, 12), (True, 4)]:
        driver = Driver(config(deterministic=deterministic))
        driver.submit(request("a", list(range(5)), 8))
        driver.run()
        driver.submit(request("b", [*range(5), *driver.ids["a", 0], 1, 2, 3], 4))
        driver.run()
        assert driver.finished["b", 0].num_cached_tokens == expected


def test_running_request_shares_only_what_is_settled():
    driver = Driver(config(max_chunk=4))
    driver.submit(request("a", list(range(9)), 2))
    driver.launch()
    driver.launch()
    driver.settle()
    driver.submit(request("b", list(range(9)), 2))
    driver.launch()
    driver.run()
    assert driver.finished["b", 0].num_cached_tokens == 4


def test_window_group_returns_pages_after_the_last_launch_that_names_them():
    window = GroupConfig(num_pages=17, page_size=4, window=5)
    driver = Driver(config(groups=(window,), prefix_cache=False))
    driver.submit(request("a", list(range(4)), 40))
    lowest = 16
    while not driver.scheduler.is_idle:
        driver.step(depth=3)
        lowest = min(lowest, driver.scheduler.stats.num_free_pages[0])
    assert lowest >= 11, "a window of 5 tokens never needs more than a few pages"
