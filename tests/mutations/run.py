"""Breaks one line at a time in a copy of the tree and compares the tests gone red with the table.

    python tests/mutations/run.py [NAME ...] [--third N] [--touching FILE ...]

A mutant that does not import, or whose tests cannot be collected, is void, which is a failure too.
Ends with 0 when every mutant turned exactly the expected tests red.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ("engine", "models", "kernels", "proto", "tests")
TIMEOUT_S = 600
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

    def run(self, mutant: Mutant) -> Outcome:
        """Breaks, tests, restores; the restored file is verified by its hash."""
        started = time.perf_counter()
        path = self.folder / mutant.file
        source = path.read_bytes()
        before = digest(source)
        try:
            path.write_text(mutated(source.decode(), mutant))
            verdict, num_run, red = self._judge(mutant)
        except ValueError as error:
            verdict, num_run, red = f"void: {error}", 0, ()
        finally:
            path.write_bytes(source)
        if digest(path.read_bytes()) != before:
            raise RuntimeError(f"{path} was not restored")
        return Outcome(mutant.name, verdict, num_run, red, time.perf_counter() - started)

    def _judge(self, mutant: Mutant) -> tuple[str, int, tuple[str, ...]]:
        module = mutant.file.removesuffix(".py").replace("/", ".")
        check = f"import {module} as m; print(m.__file__)"
        imported = self._python("-c", check)
        if imported.returncode or str(self.folder) not in imported.stdout:
            return f"void: {mutant.file} does not import: {_last(imported.stderr)}", 0, ()
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        options = ("-q", "--tb=line", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
        tested = self._python("-m", "pytest", *options, f"--junitxml={report}", *mutant.tests)
        if tested.returncode not in (0, 1):
            return f"void: pytest ended with {tested.returncode}: {_last(tested.stdout)}", 0, ()
        ran, red = read_report(report)
        return compare(ran, red, mutant.red), len(ran), tuple(red)

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
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
            timeout=TIMEOUT_S,
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen mutants and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run; none: all")
    parser.add_argument("--third", type=int, choices=(0, 1, 2), help="every third mutant from N")
    parser.add_argument("--touching", nargs="*", default=(), help="and those of these files")
    parser.add_argument("--list", action="store_true", help="names only")
    given = parser.parse_args(arguments)
    mutants = table()
    if given.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    picked = chosen(mutants, given.names, given.third, given.touching)
    originals = {mutant.file: digest((ROOT / mutant.file).read_bytes()) for mutant in picked}
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Tree(pathlib.Path(folder).resolve())
        for mutant in picked:
            outcomes.append(tree.run(mutant))
            last = outcomes[-1]
            counted = f"{len(last.red)} of {last.num_run} red, {last.seconds:.0f} s"
            print(f"{last.name}: {last.verdict.replace('; ', '\n    ')} ({counted})", flush=True)
            write_results(HERE / "RESULTS.md", mutants, outcomes)
    for file, before in originals.items():
        if digest((ROOT / file).read_bytes()) != before:
            print(f"warning: {file} changed while the mutants ran; its rows may be stale")
    num_held = sum(outcome.holds for outcome in outcomes)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    print(f"{num_held} of {len(outcomes)} mutants as expected in {minutes:.1f} minutes")
    return 0 if outcomes and num_held == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
