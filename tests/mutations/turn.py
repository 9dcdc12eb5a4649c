"""Which mutants are due in a commit: a third that moves on with every commit, and what it touched.

Reads nothing but the repository itself.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import tomllib

TABLE = "tests/mutations/table.toml"
_MAIN = ("origin/main", "main")


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one commit owes."""

    number: int
    """Moves on by one with every commit; number % 3 is the third that is due."""
    files: tuple[str, ...]
    """Files that differ from the base."""
    mutants: tuple[str, ...]
    """Mutants whose row of the table is new or differs."""
    base: str
    """The commit the files are compared with, in words."""


def of(root: pathlib.Path) -> Turn:
    """The turn of the commit checked out at `root`, changes of the working tree included.

    A shallow clone cannot count its commits: there the commit's hash stands in for the number.
    Without any repository the turn is 0 and nothing counts as touched.
    """
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return Turn(0, (), (), "nothing: no repository")
    number = int(head[:8], 16)
    if _git(root, "rev-parse", "--is-shallow-repository") == "false":
        number = int(_git(root, "rev-list", "--count", "HEAD") or 0)
    base = _base(root, head)
    if base is None:
        return Turn(number, (), (), "nothing: the clone has no earlier commit")
    files = tuple((_git(root, "diff", "--name-only", base) or "").splitlines())
    return Turn(number, files, _changed_rows(root, base), base[:12])


def _base(root: pathlib.Path, head: str) -> str | None:
    """Where the branch left main; on main itself the commit before."""
    for main in _MAIN:
        base = _git(root, "merge-base", "HEAD", main)
        if base is not None and base != head:
            return base
    return _git(root, "rev-parse", "--verify", "--quiet", "HEAD~1")


def _changed_rows(root: pathlib.Path, base: str) -> tuple[str, ...]:
    before = _git(root, "show", f"{base}:{TABLE}")
    old = tomllib.loads(before)["mutant"] if before is not None else []
    new = tomllib.loads((root / TABLE).read_text())["mutant"]
    return tuple(row["name"] for row in new if row not in old)


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    """What git prints; None where it refuses or is not installed."""
    try:
        done = subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
