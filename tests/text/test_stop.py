"""Stop strings: which match wins, what is held back, and that each character is emitted once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopAutomaton, StopFeed, StopMatch, StopStrings


def run(stops, pieces, include_stop=False):
    """Texts emitted per piece and at the end, and the match."""
    watcher = StopStrings(stops, include_stop=include_stop)
    texts = [watcher.feed(piece).text for piece in pieces]
    return [*texts, watcher.flush().text], watcher.match


def expected(stops, text, include_stop):
    """The definition: the earliest end, then the earliest start, found by trying all."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[:end] if include_stop else text[: end - len(stop)], stop, end
    return text, None, None


@pytest.mark.parametrize(
    ("stops", "text", "before", "stop"),
    [
        (["aba"], "ababa", "", "aba"),
        (["aa"], "aaa", "", "aa"),
        (["abab"], "aababab", "a", "abab"),
        (["later", "early"], "x early later", "x ", "early"),
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["bc", "abc"], "xabc", "x", "abc"),
        (["ababc", "babb"], "ababb", "a", "babb"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_match_that_completes_first_wins(stops, text, before, stop, size):  # STOP-05
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for order in (stops, stops[::-1]):
        texts, match = run(order, pieces)
        assert "".join(texts) == before
        assert match is not None and match.stop == stop


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab\n.", min_size=1, max_size=5), min_size=1, max_size=5),
    pieces=st.lists(st.text("ab\n.", max_size=4), max_size=12),
    include_stop=st.booleans(),
)
def test_any_cutting_gives_the_unary_text(stops, pieces, include_stop):  # STOP-04, DETOK-11
    texts, match = run(stops, pieces, include_stop)
    text, stop, end = expected(stops, "".join(pieces), include_stop)
    assert "".join(texts) == text
    if stop is None:
        assert match is None
    else:
        ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
        num_tokens = next(i + 1 for i, reached in enumerate(ends) if reached >= end)
        assert match == StopMatch(stop, num_tokens)


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1),
    text=st.text("ab", max_size=20),
)
def test_nothing_is_held_that_cannot_become_a_match(stops, text):
    watcher = StopStrings(stops)
    emitted = watcher.feed(text)
    if emitted.match is None:
        starts = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) for s in stops)]
        assert emitted.text == text[: starts[0]]


@pytest.mark.parametrize("stop", ["\n", ".*", "(", "\\", "\\n", "[a-z]", "$"])
def test_metacharacters_match_themselves_only(stop):  # STOP-13
    innocent = "plain words 123"
    assert run([stop], [innocent]) == ([innocent, ""], None)
    texts, match = run([stop], list(f"one{stop}two"))
    assert "".join(texts) == "one" and match is not None and match.stop == stop


def test_prefix_that_diverges_is_emitted_once():  # DETOK-11
    texts, match = run(["</end>"], ["see ", "</", "en", "ding"])
    assert texts == ["see ", "", "", "</ending", ""] and match is None


def test_text_held_at_the_end_is_flushed_once():  # STOP-04
    watcher = StopStrings(["stop"])
    assert watcher.feed("so sto") == StopFeed("so ")
    assert watcher.flush() == StopFeed("sto")
    assert watcher.flush() == StopFeed("")


def test_what_the_detokenizer_still_held_is_searched_too_and_counts_no_token():
    watcher = StopStrings(["b!"])
    watcher.feed("ab")
    assert watcher.flush("!") == StopFeed("", StopMatch("b!", 1))


def test_rows_do_not_see_each_others_stops():  # STOP-12
    shared = StopAutomaton(["x"])
    rows = [
        StopStrings(["b"]),
        StopStrings(["c"]),
        StopStrings([]),
        StopStrings(shared),
        StopStrings(shared),
    ]
    assert [row.feed("abcd").text for row in rows] == ["a", "ab", "abcd", "abcd", "abcd"]
    assert rows[3].feed("x").match and rows[4].match is None


def test_tokens_after_the_match_change_nothing():
    watcher = StopStrings(["\n"])
    assert watcher.feed("a\nb") == StopFeed("a", StopMatch("\n", 1))
    assert watcher.feed("c\n") == StopFeed("", StopMatch("\n", 1))
    assert watcher.flush("d") == StopFeed("", StopMatch("\n", 1))


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a", ""], r"stop\[1\] is empty"),
        ([5], r"stop\[0\] must be a string, got int"),
        ("ab", r"stop is the string 'ab'; give a list"),
    ],
)
def test_malformed_stops_are_named(stops, message):
    with pytest.raises(ValueError, match=message):
        StopStrings(stops)
