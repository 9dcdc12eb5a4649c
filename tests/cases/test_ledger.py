"""The ledger of public bug reports: complete, every row decided, every named test collected."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEDGER = tomllib.loads((Path(__file__).parent / "ledger.toml").read_text(encoding="utf-8"))
MIN_TESTED = 90

# The reports that were chosen, by area: (first, last) of each run of numbers.
KNOWN: dict[str, tuple[tuple[int, int], ...]] = {
    "STOP": ((1, 5), (9, 14), (17, 18), (21, 21)),
    "DETOK": ((1, 2), (4, 5), (7, 7), (11, 12)),
    "LOGP": ((1, 2), (4, 4), (7, 10), (12, 12), (14, 15), (18, 19)),
    "SAMP": (
        *((2, 7), (9, 10), (12, 12), (18, 19), (22, 23), (25, 25)),
        *((27, 30), (32, 33)),
    ),
    "LIM": ((3, 4), (7, 11)),
    "STRUCT": ((2, 6), (8, 8), (10, 11)),
    "SCHED": (
        *((2, 6), (10, 11), (14, 17), (20, 20), (22, 24), (27, 27)),
        *((31, 35),),
    ),
    "MODEL": (
        *((1, 3), (5, 6), (10, 10), (12, 13), (15, 15), (18, 19), (21, 25)),
        *((27, 27), (30, 32), (36, 38)),
    ),
}
IDS = {
    f"{area}-{number:02}"
    for area, runs in KNOWN.items()
    for first, last in runs
    for number in range(first, last + 1)
}
TESTED = {name: row["tests"] for name, row in LEDGER.items() if "tests" in row}


def collected(session: pytest.Session) -> set[str]:
    """Tests without their parameters: those of this run, or all where this run lacks one."""
    names = {item.nodeid.partition("[")[0] for item in session.items}
    if names.issuperset(one for tests in TESTED.values() for one in tests):
        return names
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def test_ledger_holds_each_of_the_112_reports_once():
    # A table that stands twice is an error of the file, so that its ids are unique.
    assert len(IDS) == 112
    assert LEDGER.keys() == IDS


@pytest.mark.parametrize("name", sorted(LEDGER))
def test_row_says_what_must_hold_and_has_tests_or_a_missing_feature(name):
    row = LEDGER[name]
    assert row["title"].endswith(".") and len(row["title"]) > 20
    assert row.keys() in ({"title", "tests"}, {"title", "missing"})
    if "missing" in row:
        assert len(row["missing"]) > 3
    else:
        assert row["tests"] and len(set(row["tests"])) == len(row["tests"])


def test_titles_differ():
    assert len({row["title"] for row in LEDGER.values()}) == len(LEDGER)


def test_at_least_ninety_rows_have_a_test():
    assert len(TESTED) >= MIN_TESTED


def test_every_named_test_is_collected(request):
    known = collected(request.session)
    missing = [(name, one) for name, tests in TESTED.items() for one in tests if one not in known]
    assert not missing
