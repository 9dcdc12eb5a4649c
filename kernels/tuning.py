"""Measured choices of the kernels, kept as data by device and looked up as a call is traced.

What a choice may depend on is what the formula that it replaces depends on: static sizes alone.
Where a choice changes the order of a sum, no more sizes than the formula reads may name it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

FOLDER = pathlib.Path(__file__).parent / "tuned"

Shape = Mapping[str, int]
"""Sizes of one call by name; a number of rows or tokens is rounded up to its `rung`."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation runs first, and its settings."""

    form: str | None = None
    """Its name; None: the op's own order."""
    settings: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, form: str, **settings: int) -> Choice:
        """Settings by name."""
        return cls(form, tuple(sorted(settings.items())))

    def __str__(self) -> str:
        return " ".join([self.form or "formula", *(f"{name}={n}" for name, n in self.settings)])


FORMULA = Choice()
"""Nothing was measured: each kernel computes its own."""


@dataclasses.dataclass(frozen=True)
class Tunable:
    """What an op needs to be tuned."""

    shape: Callable[..., Shape]
    """shape(*args, **kwargs) of a call."""
    candidates: Callable[[Shape], tuple[Choice, ...]]
    """What may be chosen for a shape: the formula's own choice first."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names that an op's entries have in a file."""

    shape: tuple[str, ...]
    forms: Mapping[str, tuple[str, ...]]
    """Settings of each implementation."""


_FIGURES = ("us", "formula_us", "measured")
_PAGED_SIZES = ("rows", "queries", "num_kv_heads", "group",
                "head_dim", "page_size", "pages", "window")  # fmt: skip
_ONE_TOKEN = {"mosaic": ("depth",), "registers": ("depth",)}
_PREFETCHED = dict.fromkeys(("prefetched", "registers_prefetched"), ("depth", "prefetch"))
_MOE_SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size")
OPS: Mapping[str, Fields] = {
    "attention.decode": Fields(_PAGED_SIZES, {"mosaic": ("splits",)}),
    "attention.decode_times": Fields((*_PAGED_SIZES, "outputs"), _ONE_TOKEN | _PREFETCHED),
    "mla.decode": Fields(
        ("rows", "queries", "num_heads", "latent", "page_size", "pages"), {"mosaic": ("splits",)}
    ),
    "linear.product": Fields(("tokens", "inputs", "outputs"), {"mosaic": ("depth",)}),
    # Splits add up in another order: as in the formula, the weight alone decides them.
    "linear.parts": Fields(("inputs", "outputs"), {"mosaic": ("depth", "splits")}),
    "linear.gated": Fields(("inputs", "outputs"), {"mosaic": ("depth",)}),
    "linear.normed": Fields(("tokens", "halves", "inputs", "outputs"), _ONE_TOKEN),
    "moe.experts": Fields(
        ("tokens", *_MOE_SIZES),
        {"unpermuted": ("down_rows", "splits"), "permuted": ("columns", "tail")},
    ),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured choice."""

    op: str
    shape: Shape
    choice: Choice
    us: float
    formula_us: float
    """What the formula's choice took beside it."""
    measured: str
    """When, and with which versions."""


class Table:
    """The choices of one device. Tables of equal choices are equal: calls are traced alike."""

    def __init__(self, device: str, entries: tuple[Entry, ...] = (), file: str = "") -> None:
        self.device = device
        self.entries = entries
        self._file = file or device
        self._choices = {_key(one.op, one.shape): one.choice for one in entries}
        self._hash = hash(frozenset(self._choices.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._choices == other._choices

    def __hash__(self) -> int:
        return self._hash

    def choice(
        self, op: str, shape: Shape, candidates: Callable[[Shape], tuple[Choice, ...]]
    ) -> Choice:
        """What was measured for a shape, or else `FORMULA`.

        Raises:
          ValueError: it is no candidate.
        """
        found = self._choices.get(_key(op, shape))
        if found is None:
            return FORMULA
        if found not in (known := candidates(shape)):
            names = ", ".join(map(str, known))
            raise ValueError(
                f"{self._file}: {op} {dict(shape)} has choice {found}, it must be one of {names}; "
                "measure it anew with `treadle tune` or delete the entry"
            )
        return found

    def replaced(self, op: str, shape: Shape, entry: Entry | None) -> Table:
        """The same with this entry for a shape, or with none."""
        others = [one for one in self.entries if _key(one.op, one.shape) != _key(op, shape)]
        entries = [*others, entry] if entry else others
        entries.sort(key=lambda one: (one.op, [one.shape[name] for name in OPS[one.op].shape]))
        return Table(self.device, tuple(entries), self._file)

    def text(self) -> str:
        """The file, an entry a line."""
        ops = []
        for op in dict.fromkeys(one.op for one in self.entries):
            lines = [f"   {json.dumps(_plain(one))}" for one in self.entries if one.op == op]
            ops.append(f"  {json.dumps(op)}: [\n" + ",\n".join(lines) + "\n  ]")
        inner = "{\n" + ",\n".join(ops) + "\n }" if ops else "{}"
        return f'{{\n "device": {json.dumps(self.device)},\n "ops": {inner}\n}}\n'


def rung(count: int, least: int = 1) -> int:
    """The power of two that rows or tokens are tuned at: never below them."""
    return max(least, 1 << (count - 1).bit_length())


def file_of(device: str) -> pathlib.Path:
    """Where a device's choices lie or would lie."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"


def read(file: pathlib.Path) -> Table:
    """Reads a device's choices.

    Raises:
      ValueError: naming the file and the field that is wrong.
      OSError: the file cannot be read.
    """
    return parsed(file.read_bytes(), str(file))


def parsed(content: str | bytes, file: str) -> Table:
    """The choices that a file holds.

    Raises:
      ValueError: as `read` does.
    """
    try:
        data = json.loads(content)
        _names("the file", data, ("device", "ops"))
        _must("device", data["device"], isinstance(data["device"], str), "text")
        _must("ops", data["ops"], isinstance(data["ops"], dict), "entries by op")
        found: dict[Any, Entry] = {}
        for op, items in data["ops"].items():
            _must("ops", op, op in OPS, f"one of {', '.join(OPS)}")
            _must(f"ops.{op}", items, isinstance(items, list), "a list")
            for number, item in enumerate(items):
                where = f"ops.{op}[{number}]"
                entry = _entry(where, op, item)
                is_new = _key(op, entry.shape) not in found
                _must(f"{where}.shape", item["shape"], is_new, "there once")
                found[_key(op, entry.shape)] = entry
    except ValueError as error:
        message = f"{file}: {error}; measure anew with `treadle tune`, or take it away"
        raise ValueError(message) from None
    return Table(data["device"], tuple(found.values()), file)


def _entry(where: str, op: str, item: Any) -> Entry:
    fields = OPS[op]
    _names(where, item, ("shape", "choice", *_FIGURES))
    shape, choice = item["shape"], item["choice"]
    _names(f"{where}.shape", shape, fields.shape)
    form: Any = choice.get("form") if isinstance(choice, dict) else None
    _must(f"{where}.choice.form", form, form in fields.forms, f"one of {', '.join(fields.forms)}")
    _names(f"{where}.choice", choice, ("form", *fields.forms[form]))
    settings = {name: value for name, value in choice.items() if name != "form"}
    for part, numbers, least in (("shape", shape, 0), ("choice", settings, 1)):
        for name, value in numbers.items():
            is_size = type(value) is int and value >= least
            _must(f"{where}.{part}.{name}", value, is_size, f"a whole number from {least}")
    for name in ("us", "formula_us"):
        is_time = type(item[name]) in (int, float) and item[name] > 0
        _must(f"{where}.{name}", item[name], is_time, "a time above 0")
    _must(f"{where}.measured", item["measured"], isinstance(item["measured"], str), "text")
    return Entry(op, shape, Choice.of(form, **settings), *(item[name] for name in _FIGURES))


def _names(where: str, item: Any, names: tuple[str, ...]) -> None:
    has = sorted(item) if isinstance(item, dict) else item
    _must(where, has, has == sorted(names), f"an object of {', '.join(sorted(names))}")


def _must(where: str, value: Any, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{where} is {value!r}, it must be {what}")


def _key(op: str, shape: Shape) -> Any:
    return op, frozenset(shape.items())


def _plain(entry: Entry) -> dict[str, Any]:
    choice = {"form": entry.choice.form, **dict(entry.choice.settings)}
    shape = {name: entry.shape[name] for name in OPS[entry.op].shape}
    return {
        "shape": shape,
        "choice": choice,
        **{name: getattr(entry, name) for name in _FIGURES},
    }


class Tuning:
    """The table in force: that of the first device, or the one a run was given in its place."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}
        self._given: Table | None = None

    def in_force(self) -> Table:
        """The table that calls are traced with; an empty one where nothing was measured.

        Raises:
          ValueError: the device's file is not as it must be.
        """
        if self._given is not None:
            return self._given
        device = jax.devices()[0].device_kind
        if device not in self._tables:
            file = file_of(device)
            self._tables[device] = read(file) if file.exists() else Table(device)
        return self._tables[device]

    @contextlib.contextmanager
    def using(self, table: Table) -> Iterator[None]:
        """Another table for what is traced inside, in every thread.

        For a benchmark, and to lower for a device that is not there.
        """
        before, self._given = self._given, table
        try:
            yield
        finally:
            self._given = before

    def fingerprint(self) -> bytes:
        """Differs where a program could, were it traced with another table."""
        return hashlib.blake2b(self.in_force().text().encode(), digest_size=16).digest()


TUNING = Tuning()
"""Of this process."""
