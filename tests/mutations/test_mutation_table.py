"""The table fits the tree as it is, and its command tells an exact set of red tests from others."""

from __future__ import annotations

import re

import pytest

from tests.mutations import run

MUTANTS = run.table()
GATES = ("tests/contract/test_three_runs.py", "tests/contract/test_opt_in.py")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_old_text_stands_once_and_the_mutant_differs(mutant):
    source = (run.ROOT / mutant.file).read_text()
    assert run.mutated(source, mutant) != source


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_test_goes_red_under_some_mutant(gate):
    tests = re.findall(r"^def (test_\w+)", (run.ROOT / gate).read_text(), re.M)
    red = {name.partition("[")[0] for mutant in MUTANTS for name in mutant.red}
    assert tests
    assert [name for name in tests if f"{gate}::{name}" not in red] == []


RAN = ["t.py::a", "t.py::b[x-1]", "t.py::b[y-1]", "t.py::bb"]


@pytest.mark.parametrize(
    ("red", "patterns", "verdict"),
    [
        (["t.py::a"], ["t.py::a"], "red as expected"),
        (["t.py::b[x-1]", "t.py::b[y-1]"], ["t.py::b"], "red as expected"),
        (["t.py::b[x-1]"], ["t.py::b[x*]"], "red as expected"),
        (["t.py::b[x-1]"], ["t.py::b"], "green but expected red: t.py::b[y-1]"),
        (["t.py::a", "t.py::bb"], ["t.py::a"], "red but not expected: t.py::bb"),
        ([], ["t.py::a"], "green but expected red: t.py::a"),
        (["t.py::a"], ["t.py::a", "t.py::c"], "no test is called t.py::c"),
    ],
)
def test_only_the_exact_set_of_red_tests_is_as_expected(red, patterns, verdict):
    assert run.compare(RAN, red, patterns) == verdict


def test_old_text_that_is_gone_or_doubled_is_refused():
    with pytest.raises(ValueError, match=r"the old text stands 0 times in .*, it must stand once"):
        run.mutated("", MUTANTS[0])
    with pytest.raises(ValueError, match="the old text stands 2 times in "):
        run.mutated(MUTANTS[0].old * 2, MUTANTS[0])


def test_thirds_share_no_mutant_and_leave_none_out():
    thirds = [run.chosen(MUTANTS, (), third, ()) for third in range(3)]
    assert sorted(m.name for third in thirds for m in third) == sorted(m.name for m in MUTANTS)
    files = {m.file for m in run.chosen(MUTANTS, (), None, ("models/llama.py",))}
    assert files == {"models/llama.py"}
    with pytest.raises(ValueError, match="no mutant is called nobody; known: "):
        run.chosen(MUTANTS, ("nobody",), None, ())
