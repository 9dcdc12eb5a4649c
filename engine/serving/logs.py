"""Log lines of a server, as text or as JSON, each with the call it belongs to."""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import json
import logging
import re
import secrets
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_UNPLAIN = re.compile(r"[^ -~]")
_WORD = re.compile(r"[A-Za-z0-9._:/+=@,-]+")
_CALL_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# W3C Trace Context, level 1. Of a traceparent: version, trace id, parent id, flags; later versions
# may append. Of a tracestate: an entry's key and value.
_MAX_TRACE_STATES = 32
_TRACE_STATE = re.compile(r"([a-z0-9][a-z0-9_*/@-]{0,255})=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclasses.dataclass(frozen=True)
class Call:
    """What every log line of one call carries."""

    method: str
    """Full name, as /treadle.v1.GenerationService/Generate."""
    call_id: str
    """The caller's x-request-id, or a drawn one."""
    trace_id: str = ""
    """32 hex digits of the caller's traceparent; empty without a valid one."""
    parent_id: str = ""
    """16 hex digits, the caller's span."""
    is_sampled: bool = True
    """False when the caller's trace is not recorded."""
    trace_state: str = ""
    """The caller's tracestate, for spans alone; empty without a trace or a valid one."""


_OURS = ("engine", "models", "kernels", "treadle")
_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


def call_of(method: str, metadata: Mapping[str, str]) -> Call:
    """Names a call after its metadata; what does not suit of an id or a trace counts as absent."""
    given = metadata.get("x-request-id", "")
    call_id = given if _CALL_ID.fullmatch(given) else secrets.token_hex(8)
    trace_id, parent_id, is_sampled = read_traceparent(metadata.get("traceparent", ""))
    state = read_tracestate(metadata.get("tracestate", "")) if trace_id else ""
    return Call(method, call_id, trace_id, parent_id, is_sampled, state)


def read_traceparent(text: str) -> tuple[str, str, bool]:
    """Trace id, parent id and whether it is recorded; two empty strings when it is not valid."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return "", "", True
    version, trace_id, parent_id, flags, rest = match.groups()
    is_valid = version != "ff" and (version != "00" or rest is None)
    if not is_valid or not trace_id.strip("0") or not parent_id.strip("0"):
        return "", "", True
    return trace_id, parent_id, bool(int(flags, 16) & 1)


def read_tracestate(text: str) -> str:
    """The entries of a tracestate without spaces around them; empty when one is not valid."""
    entries = [entry for one in text.split(",") if (entry := one.strip(" \t"))]
    keys = {match[1] for entry in entries if (match := _TRACE_STATE.fullmatch(entry))}
    is_valid = len(keys) == len(entries) <= _MAX_TRACE_STATES
    return ",".join(entries) if is_valid else ""


def enter(call: Call) -> None:
    """Log lines of this task, and of tasks it starts, belong to `call` from now on."""
    _CALL.set(call)


def configure(log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Sends the log of the whole process to `stream`, standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OURS:  # what other packages say below a warning is their affair
        logging.getLogger(name).setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """`time level logger: message`, then what is known of the call as key=value.

    What a caller sent can end no line and pass for no other fact: what cannot be printed is
    escaped, facts of more than one word are quoted, and lines of a traceback are indented.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        facts = " ".join(f"{name}={_word(value)}" for name, value in _facts(record).items())
        line = _UNPLAIN.sub(_escaped, super().formatMessage(record))
        return f"{line} [{facts}]" if facts else line

    def formatException(self, ei: Any) -> str:
        """The traceback, each line behind a margin."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {_UNPLAIN.sub(_escaped, line)}" for line in lines)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the call, extra facts, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _escaped(text: re.Match[str]) -> str:
    found = text.group()
    return found if found.isprintable() else found.encode("unicode_escape").decode()


def _word(value: object) -> str:
    """A value as it stands in a line of text: plain or as a JSON string."""
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    """The call of the running task, and what the line was given as `extra={"facts": ...}`."""
    call = _CALL.get()
    names = ("method", "call_id", "trace_id", "parent_id")
    known = {} if call is None else {name: getattr(call, name) for name in names}
    facts: dict[str, object] = {name: value for name, value in known.items() if value}
    return facts | getattr(record, "facts", {})
