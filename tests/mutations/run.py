"""Breaks one line at a time in a copy of the tree and compares the tests gone red with the table.

    python tests/mutations/run.py [NAME ...] [--third N] [--touching FILE ...]
    python tests/mutations/run.py --turn --minutes 4 --jobs 2

A mutant that does not import, or whose tests cannot be collected, is void, which is a failure too;
so is a test of a gate that no mutant is expected to turn red.
Ends with 0 when every mutant turned exactly the expected tests red.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import hashlib
import os
import pathlib
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
if __name__ == "__main__":  # as a command, Python looks beside the file and not at the root
    sys.path.insert(0, str(ROOT))

from tests.mutations import turn  # noqa: E402

COPIED = ("engine", "models", "kernels", "proto", "tests")
GATES = "tests/contract/test_*.py"
"""Files of gate tests: each of these tests goes red under some mutant, or is deleted."""
TIMEOUT_S = 600
GRACE_S = 60
"""How long a mutant under way may go on when the time for all of them is over."""
_COMMAND = "python tests/mutations/run.py"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One broken line and the tests that must notice, no more and no fewer."""

    name: str
    breaks: str
    """What the change takes away, in words."""
    file: str
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """What pytest is given."""
    red: tuple[str, ...]
    """Test ids; `*` stands for anything, an id without brackets for all its parameters."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one mutant did."""

    name: str
    verdict: str
    """`red as expected`, or what is wrong."""
    num_run: int
    red: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """The mutant turned exactly the expected tests red."""
        return self.verdict == "red as expected"


def table() -> list[Mutant]:
    """Every mutant of table.toml.

    Raises:
      ValueError: two of one name, or one that expects no test to go red.
    """
    rows = tomllib.loads((HERE / "table.toml").read_text())["mutant"]
    mutants = [
        Mutant(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
        for row in rows
    ]
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        if names.count(mutant.name) > 1 or not mutant.red:
            raise ValueError(f"mutant {mutant.name!r} has a namesake or expects nothing red")
    return mutants


def idle_gate_tests(mutants: Iterable[Mutant], root: pathlib.Path = ROOT) -> list[str]:
    """Tests of the gates that no mutant is expected to turn red."""
    red = {name.partition("[")[0] for mutant in mutants for name in mutant.red}
    tests = [
        f"{path.relative_to(root).as_posix()}::{name}"
        for path in sorted(root.glob(GATES))
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    ]
    return [test for test in tests if test not in red]


def mutated(text: str, mutant: Mutant) -> str:
    """The text with the mutant's change.

    Raises:
      ValueError: the old text does not stand there exactly once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"the old text stands {count} times in {mutant.file}, it must stand once")
    return text.replace(mutant.old, mutant.new)


def compare(ran: Iterable[str], red: Iterable[str], patterns: Sequence[str]) -> str:
    """`red as expected`, or the difference between the red tests and the expected ones."""
    ran, red = set(ran), set(red)
    expected: set[str] = set()
    idle = []
    for pattern in patterns:
        matching = {name for name in ran if _matches(pattern, name)}
        expected |= matching
        if not matching:
            idle.append(f"no test is called {pattern}")
    differences = idle + [f"green but expected red: {name}" for name in sorted(expected - red)]
    differences += [f"red but not expected: {name}" for name in sorted(red - expected)]
    return "; ".join(differences) or "red as expected"


def _matches(pattern: str, name: str) -> bool:
    words = re.escape(pattern).replace(r"\*", ".*")
    return re.fullmatch(words if "[" in pattern else words + r"(\[.*\])?", name) is not None


class Tree:
    """A copy of the working tree in which one file at a time is broken."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def run(self, mutant: Mutant, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Breaks, tests, restores; the restored file is verified by its hash.

        Raises:
          TimeoutExpired: the tests did not end; the file is restored.
        """
        started = time.perf_counter()
        path = self.folder / mutant.file
        source = path.read_bytes()
        before = digest(source)
        try:
            path.write_text(mutated(source.decode(), mutant))
            verdict, num_run, red = self._judge(mutant, timeout_s)
        except ValueError as error:
            verdict, num_run, red = f"void: {error}", 0, ()
        finally:
            path.write_bytes(source)
        if digest(path.read_bytes()) != before:
            raise RuntimeError(f"{path} was not restored")
        return Outcome(mutant.name, verdict, num_run, red, time.perf_counter() - started)

    def _judge(self, mutant: Mutant, timeout_s: float) -> tuple[str, int, tuple[str, ...]]:
        module = mutant.file.removesuffix(".py").replace("/", ".")
        check = f"import {module} as m; print(m.__file__)"
        imported = self._python(timeout_s, "-c", check)
        if imported.returncode or str(self.folder) not in imported.stdout:
            return f"void: {mutant.file} does not import: {_last(imported.stderr)}", 0, ()
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        options = ("-q", "--tb=line", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
        arguments = ("-m", "pytest", *options, f"--junitxml={report}", *mutant.tests)
        tested = self._python(timeout_s, *arguments)
        if tested.returncode not in (0, 1):
            return f"void: pytest ended with {tested.returncode}: {_last(tested.stdout)}", 0, ()
        ran, red = read_report(report)
        return compare(ran, red, mutant.red), len(ran), tuple(red)

    def _python(self, timeout_s: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self.folder),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def read_report(path: pathlib.Path) -> tuple[list[str], list[str]]:
    """Ids of the tests that ran, and of those that failed or whose fixtures did."""
    ran, red = [], []
    for case in ElementTree.parse(path).iter("testcase"):
        file, classname = case.get("file") or "", case.get("classname") or ""
        inner = classname.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        name = "::".join(part for part in (file, inner, case.get("name") or "") if part)
        if case.find("skipped") is None and name not in ran:
            ran.append(name)
        if (case.find("failure") is not None or case.find("error") is not None) and name not in red:
            red.append(name)
    return ran, red


def digest(content: bytes) -> str:
    """Tells whether a file was restored."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def write_results(
    path: pathlib.Path, mutants: Sequence[Mutant], outcomes: Sequence[Outcome]
) -> None:
    """Writes the rows of what ran; rows of other mutants stay as they were."""
    written = path.read_text() if path.exists() else ""
    rows = {name: row for row, name in re.findall(r"^(\| `([^`]+)`.*)$", written, re.M)}
    breaks = {mutant.name: mutant.breaks for mutant in mutants}
    today = datetime.datetime.now(datetime.UTC).date()
    for outcome in outcomes:
        red = "<br>".join(f"`{name}`" for name in grouped(outcome.red)) or "none"
        rows[outcome.name] = (
            f"| `{outcome.name}` | {breaks[outcome.name]} | {outcome.verdict} | "
            f"{len(outcome.red)} of {outcome.num_run} | {red} | {outcome.seconds:.0f} | {today} |"
        )
    lines = [
        "# Mutations and the tests they turn red",
        "",
        f"Made by `{_COMMAND}` from `table.toml`; each row by its own latest run, on "
        f"{platform.machine()} with {os.cpu_count()} cores. The tests run are those the table "
        "names, not the whole suite.",
        "",
        "| mutant | takes away | verdict | red | tests gone red | seconds | run on |",
        "|---|---|---|---|---|---|---|",
        *(rows[mutant.name] for mutant in mutants if mutant.name in rows),
    ]
    path.write_text("\n".join(lines) + "\n")


def grouped(names: Iterable[str]) -> list[str]:
    """One entry for all parameters of a test."""
    counts: dict[str, list[str]] = {}
    for name in names:
        test, _, parameters = name.partition("[")
        counts.setdefault(test, []).append(parameters.removesuffix("]"))
    return [
        test.removeprefix("tests/") + _shortened([name for name in found if name])
        for test, found in counts.items()
    ]


def _shortened(parameters: Sequence[str]) -> str:
    joined = ", ".join(parameters)
    if len(joined) > 120:
        return f" ({len(parameters)} parameters)"
    return f"[{joined}]" if joined else ""


def chosen(
    mutants: Sequence[Mutant], names: Sequence[str], third: int | None, touching: Sequence[str]
) -> list[Mutant]:
    """The mutants to run: all, or those named, of a third, or of files that changed.

    Raises:
      ValueError: a name that the table does not have.
    """
    known = [mutant.name for mutant in mutants]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no mutant is called {', '.join(unknown)}; known: {', '.join(known)}")
    if not names and third is None and not touching:
        return list(mutants)
    return [
        mutant
        for i, mutant in enumerate(mutants)
        if mutant.name in names or i % 3 == third or mutant.file in touching
    ]


def due(mutants: Sequence[Mutant], now: turn.Turn) -> list[Mutant]:
    """What a turn owes: new and changed rows first, then mutants of files it touched, then a third.

    The third starts at another of its mutants each time it comes round, so that a bound on time
    leaves out others.
    """
    touched = [mutant for mutant in mutants if mutant.name in now.mutants]
    touched += [one for one in mutants if one.file in now.files and one not in touched]
    third = chosen(mutants, (), now.number % 3, ())
    # Five is prime to most lengths: consecutive rounds start far from each other.
    start = (now.number // 3 * 5) % len(third) if third else 0
    return touched + [one for one in third[start:] + third[:start] if one not in touched]


def run_all(
    mutants: Sequence[Mutant], folder: pathlib.Path, *, jobs: int, minutes: float | None
) -> Iterator[Outcome]:
    """Runs mutants, each job in a tree of its own.

    None is started after `minutes`, and one still at work GRACE_S later is given up; a mutant that
    no such bound cuts short is void when its tests do not end.
    """
    started = time.perf_counter()
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for job in range(min(jobs, len(mutants))):
        trees.put(Tree(folder / str(job)))

    def run(mutant: Mutant) -> Outcome | None:
        left = TIMEOUT_S
        if minutes is not None:
            left = 60 * minutes - (time.perf_counter() - started) + GRACE_S
        if left < GRACE_S:
            return None
        tree = trees.get()
        try:
            return tree.run(mutant, min(left, TIMEOUT_S))
        except subprocess.TimeoutExpired:
            if left < TIMEOUT_S:
                return None
            return Outcome(mutant.name, f"void: no end within {TIMEOUT_S} s", 0, (), TIMEOUT_S)
        finally:
            trees.put(tree)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(run, mutants):
            if outcome is not None:
                yield outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen mutants and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run; none: all")
    parser.add_argument("--third", type=int, choices=(0, 1, 2), help="every third mutant from N")
    parser.add_argument("--touching", nargs="*", default=(), help="and those of these files")
    parser.add_argument(
        "--turn", action="store_true", help="those due in this commit; RESULTS.md stays as it is"
    )
    parser.add_argument(
        "--minutes", type=float, help="start no mutant after so many; one minute later give up"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="names only")
    given = parser.parse_args(arguments)
    mutants = table()
    picked = chosen(mutants, given.names, given.third, given.touching)
    if given.turn:
        now = turn.of(ROOT)
        picked = due(mutants, now)
        print(f"turn {now.number}: third {now.number % 3}, touched since {now.base}", flush=True)
    if given.list:
        print(*(mutant.name for mutant in picked), sep="\n")
        return 0
    if idle := idle_gate_tests(mutants):
        print("no mutant turns these gate tests red:", *idle, sep="\n    ")
        return 1
    return _run_and_report(mutants, picked, given)


def _run_and_report(
    mutants: Sequence[Mutant], picked: Sequence[Mutant], given: argparse.Namespace
) -> int:
    started = time.perf_counter()
    originals = {mutant.file: digest((ROOT / mutant.file).read_bytes()) for mutant in picked}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        folder = pathlib.Path(name).resolve()
        for last in run_all(picked, folder, jobs=given.jobs, minutes=given.minutes):
            outcomes.append(last)
            counted = f"{len(last.red)} of {last.num_run} red, {last.seconds:.0f} s"
            print(f"{last.name}: {last.verdict.replace('; ', '\n    ')} ({counted})", flush=True)
            if not given.turn:
                write_results(HERE / "RESULTS.md", mutants, outcomes)
    for file, before in originals.items():
        if digest((ROOT / file).read_bytes()) != before:
            print(f"warning: {file} changed while the mutants ran; its rows may be stale")
    ran = {outcome.name for outcome in outcomes}
    if left := [mutant.name for mutant in picked if mutant.name not in ran]:
        print(f"out of time, not run: {', '.join(left)}")
    num_held = sum(outcome.holds for outcome in outcomes)
    minutes = (time.perf_counter() - started) / 60
    print(f"{num_held} of {len(outcomes)} mutants as expected in {minutes:.1f} minutes")
    return 0 if outcomes and num_held == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
