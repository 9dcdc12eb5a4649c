"""The table fits the tree as it is, and its command tells an exact set of red tests from others."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests.mutations import run, turn

MUTANTS = run.table()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_old_text_stands_once_and_the_mutant_differs(mutant):
    source = (run.ROOT / mutant.file).read_text()
    assert run.mutated(source, mutant) != source


def test_every_gate_test_goes_red_under_some_mutant():
    assert run.idle_gate_tests([])
    assert run.idle_gate_tests(MUTANTS) == []


def test_command_refuses_a_gate_test_that_no_mutant_turns_red(monkeypatch, capsys):
    gate = "tests/contract/test_three_runs.py::test_every_registration_has_a_row_of_its_own"
    lacking = [one for one in MUTANTS if gate not in one.red]
    assert 0 < len(lacking) < len(MUTANTS)
    monkeypatch.setattr(run, "table", lambda: lacking)
    assert run.main(["drop-scatter"]) == 1
    assert capsys.readouterr().out == f"no mutant turns these gate tests red:\n    {gate}\n"


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ("import (", "void: engine/request.py does not import: SyntaxError: "),
        ("raise ImportError('gone')", "void: engine/request.py does not import: ImportError: gone"),
    ],
)
def test_mutant_that_does_not_import_is_void_and_fails_the_command(
    new, verdict, monkeypatch, capsys
):
    old, file = "from __future__ import annotations", "engine/request.py"
    broken = dataclasses.replace(MUTANTS[0], name="broken", file=file, old=old, new=new)
    monkeypatch.setattr(run, "table", lambda: [broken, *MUTANTS])
    monkeypatch.setattr(run, "write_results", lambda *_: None)
    assert run.main(["broken"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"broken: {verdict}")
    assert "\n0 of 1 mutants as expected" in out


def test_no_mutant_starts_out_of_time_and_a_run_of_none_fails(monkeypatch, capsys):
    monkeypatch.setattr(run, "write_results", lambda *_: None)
    assert run.main(["drop-scatter", "--minutes", "-1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("out of time, not run: drop-scatter\n0 of 0 mutants as expected")


@pytest.mark.parametrize(
    ("minutes", "said"),
    [
        ([], "slow: void: no end within 600 s (0 of 0 red, 600 s)\n0 of 1 mutants as expected"),
        (["--minutes", "0.5"], "out of time, not run: slow\n0 of 0 mutants as expected"),
    ],
)
def test_mutant_that_does_not_end_is_void_unless_the_time_for_all_is_over(
    minutes, said, monkeypatch, capsys
):
    limits = []

    def endless(tree, mutant, timeout_s):
        limits.append(timeout_s)
        raise subprocess.TimeoutExpired("pytest", timeout_s)

    slow = dataclasses.replace(MUTANTS[0], name="slow")
    monkeypatch.setattr(run, "table", lambda: [slow, *MUTANTS])
    monkeypatch.setattr(run, "write_results", lambda *_: None)
    monkeypatch.setattr(run.Tree, "run", endless)
    assert run.main(["slow", *minutes]) == 1
    assert capsys.readouterr().out.startswith(said)
    assert limits == [600] if not minutes else 80 < limits[0] <= 90


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


class TestTurn:
    """Repositories made for the test: three commits on main, the table's one row in the last."""

    @pytest.fixture
    def repository(self, tmp_path) -> Path:
        root = tmp_path / "origin"
        table = root / turn.TABLE
        table.parent.mkdir(parents=True)
        git(root, "init", "--quiet", "--initial-branch=main")
        table.write_text("mutant = []")
        commit(root, "first")
        (root / "one.py").write_text("1")
        commit(root, "second")
        table.write_text('[[mutant]]\nname = "new"')
        (root / "two.py").write_text("2")
        commit(root, "third")
        return root

    def test_on_main_is_the_number_of_commits_and_the_last_ones_files(self, repository):
        now = turn.of(repository)
        assert now.number == 3
        assert now.files == (turn.TABLE, "two.py") and now.mutants == ("new",)
        assert git(repository, "rev-parse", "HEAD~1").startswith(now.base)

    def test_on_a_branch_counts_what_differs_from_main_uncommitted_lines_too(self, repository):
        git(repository, "checkout", "--quiet", "-b", "work")
        (repository / "two.py").write_text("3")
        commit(repository, "fourth")
        (repository / "one.py").write_text("4")
        now = turn.of(repository)
        assert (now.number, now.files, now.mutants) == (4, ("one.py", "two.py"), ())

    def test_in_a_shallow_clone_comes_from_the_commits_hash(self, repository, tmp_path):
        origin = f"file://{repository}"
        git(tmp_path, "clone", "--quiet", "--depth=1", origin, str(tmp_path / "clone"))
        now = turn.of(tmp_path / "clone")
        assert now.number == int(git(repository, "rev-parse", "HEAD")[:8], 16)
        assert (now.files, now.mutants) == ((), ())
        assert now.base == "nothing: the clone has no earlier commit"

    def test_without_a_repository_is_the_first(self, tmp_path):
        assert turn.of(tmp_path) == turn.Turn(0, (), (), "nothing: no repository")


def git(root: Path, *arguments: str) -> str:
    """What git prints, whatever the settings of the one who runs the test."""
    settings = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ("git", *settings, *arguments)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--no-gpg-sign", "--message", message)


def test_turn_owes_what_it_touched_and_then_its_third():
    now = turn.Turn(7, ("models/llama.py",), ("ignore-faults",), "base")
    names = [mutant.name for mutant in run.due(MUTANTS, now)]
    llama = [mutant.name for mutant in MUTANTS if mutant.file == "models/llama.py"]
    touched = ["ignore-faults", *llama]
    assert names[: len(touched)] == touched and len(touched) >= 3
    third = {mutant.name for mutant in MUTANTS[1::3]}
    assert set(names) == third | set(touched) and len(names) == len(set(names))


def test_third_that_comes_round_again_starts_elsewhere():
    rounds = [run.due(MUTANTS, turn.Turn(number, (), (), "base")) for number in (2, 5, 8)]
    assert {frozenset(m.name for m in one) for one in rounds} == {
        frozenset(m.name for m in MUTANTS[2::3])
    }
    assert len({one[0].name for one in rounds}) == 3
