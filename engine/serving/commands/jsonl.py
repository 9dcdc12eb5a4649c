"""JSON-lines files of a batch command: requests read whole, records appended and resumed."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from engine.config import EngineConfig
from engine.serving import versions

STANDARD = pathlib.Path("-")
"""Standard input or output in place of a file."""

_FIXED = ("command", "model", "settings", "options", "version", "versions")
"""Conditions that must not differ between the runs that fill one output file."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One request of an input file."""

    number: int
    """Counted from 1."""
    record_id: str | int
    """The line's own `id`, else its number."""
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Input:
    """All requests of an input file."""

    name: str
    lines: tuple[Line, ...]
    digest: str
    """SHA-256 of the file's bytes."""


def read_input(path: pathlib.Path, allowed: Sequence[str]) -> Input:
    """Reads and checks a whole file of JSON objects; empty lines are skipped.

    Args:
      path: the file, or `STANDARD`.
      allowed: names a line may carry besides `id`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: naming the line and what is wrong with it.
    """
    data = sys.stdin.buffer.read() if path == STANDARD else path.read_bytes()
    lines: list[Line] = []
    seen: dict[str | int, int] = {}
    for number, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        line = _parse(path, number, text, allowed)
        if line.record_id in seen:
            raise ValueError(
                f"{path}:{number}: id {line.record_id!r} is that of line {seen[line.record_id]} "
                "too; ids must differ, because a resumed run goes by them"
            )
        seen[line.record_id] = number
        lines.append(line)
    return Input(str(path), tuple(lines), hashlib.sha256(data).hexdigest())


def given_input(records: Sequence[Mapping[str, Any]]) -> Input:
    """Requests that came as options, as if they were lines of a file."""
    lines = tuple(Line(number, number, record) for number, record in enumerate(records, start=1))
    digest = hashlib.sha256(json.dumps(list(records)).encode()).hexdigest()
    return Input("options", lines, digest)


def _parse(path: pathlib.Path, number: int, text: bytes, allowed: Sequence[str]) -> Line:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: not a JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}:{number}: holds {type(fields).__name__}, it must be an object")
    unknown = sorted(set(fields) - {"id", *allowed})
    if unknown:
        raise ValueError(
            f"{path}:{number}: has unknown field {unknown[0]!r}; known are id, {', '.join(allowed)}"
        )
    record_id = fields.pop("id", number)
    if isinstance(record_id, bool) or not isinstance(record_id, str | int):
        raise ValueError(f"{path}:{number}: id is {record_id!r}, it must be a string or an integer")
    return Line(number, record_id, fields)


class Output:
    """Appends one JSON line per record and keeps the conditions beside the file.

    What an interrupted run wrote is kept, except a torn last line. Standard output is neither
    resumed nor described.

    Raises:
      ValueError: the file was begun under other conditions; names the first that differs.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        source: Input,
        conditions: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        self._path = path
        self._conditions = {
            **conditions,
            "input": source.name,
            "input_sha256": source.digest,
            "started": _now(),
            "finished": None,
        }
        self.num_errors = 0
        self.done: frozenset[str | int] = frozenset()
        """Ids whose records the file already holds."""
        if path == STANDARD:
            self._file: TextIO = sys.stdout
            return
        if overwrite:
            path.unlink(missing_ok=True)
        elif path.exists():
            self._resume(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    @property
    def conditions_path(self) -> pathlib.Path:
        """Where the conditions stand: the output's name with `.conditions.json` after it."""
        return self._path.with_name(self._path.name + ".conditions.json")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record and hands it to the operating system."""
        self.num_errors += "error" in record
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def describe(self, **facts: Any) -> None:
        """Writes the conditions with more facts; called at start and at the end."""
        self._conditions.update(facts)
        if self._path != STANDARD:
            text = json.dumps(self._conditions, indent=2, ensure_ascii=False, default=str)
            self.conditions_path.write_text(text + "\n", encoding="utf-8")

    def close(self, *, finished: bool) -> None:
        """Closes the file; `finished` dates the conditions."""
        if finished:
            self.describe(finished=_now())
        if self._path != STANDARD:
            self._file.close()

    def _resume(self, source: Input) -> None:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._path.write_bytes(whole)
        try:
            self.done = frozenset(json.loads(text)["id"] for text in whole.splitlines())
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self._path} exists and is not an output of this command; give another --output "
                "or --overwrite"
            ) from None
        if self.done:
            self._check_conditions(source)

    def _check_conditions(self, source: Input) -> None:
        if not self.conditions_path.exists():
            raise ValueError(
                f"{self._path} has records but {self.conditions_path} is missing, so that nobody "
                "knows how they were made; give another --output or --overwrite"
            )
        before = json.loads(self.conditions_path.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(self._conditions, default=str))
        keys: list[str] = [*_FIXED]
        if any(line.record_id == line.number for line in source.lines):
            # Records of lines without an id belong to places in this very file.
            keys.append("input_sha256")
        for key in keys:
            difference = _difference(key, before.get(key), now.get(key))
            if difference:
                raise ValueError(
                    f"{self._path} was begun with {difference}; "
                    "give another --output or --overwrite"
                )


def _difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        parts = (
            _difference(f"{name}.{key}", before.get(key), now.get(key))
            for key in sorted({*before, *now})
        )
        return next(filter(None, parts), "")
    return "" if before == now else f"{name} = {before!r}, now it is {now!r}"


def base_conditions(
    command: str, config: EngineConfig, command_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Conditions known before the engine starts: command, model, settings, options, versions."""
    settings = dataclasses.asdict(config)
    model = settings.pop("model")
    return {
        "command": command,
        "model": model,
        "settings": settings,
        "options": dict(command_options),
        "version": versions.own_version(),
        "versions": versions.versions(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
