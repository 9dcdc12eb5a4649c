"""Turns the words of `llguidance` about a grammar into ones about the caller's own text."""

from __future__ import annotations

import re

from engine.request import StructuredOutput

_LARK = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_SHOWN_LINES = re.compile(r"\n +1 \| .*", re.DOTALL)
_REGEX = re.compile(
    r"(?:invalid regex \".*\" \(in regex\): )?regex parse error:\n"
    r"    (?P<pattern>.*)\n    (?P<space> *)\^+\nerror: (?P<what>.*)"
)
_INNER_JSON = re.compile(
    r'(?P<what>failed to parse "?(?P<directive>%\w+)"?: .*)'
    r" at line (?P<line>\d+) column (?P<column>\d+)"
)
_SCHEMA = re.compile(r"(.*) at line (\d+) column (\d+)")
_BEFORE_SCHEMA = '{ "grammars": [{ "json_schema": '
"""What the package puts before a schema, on its first line."""


def place(text: str, offset: int) -> str:
    """Line and column of a character, both from 1."""
    before = text[:offset]
    return f"line {before.count(chr(10)) + 1}, column {offset - before.rfind(chr(10))}"


def reason(structured: StructuredOutput, error: str, *, is_rewritten: bool = False) -> str:
    """One line: where in the caller's text, and what is wrong there.

    Args:
      structured: the form that was compiled.
      error: what the package says of it.
      is_rewritten: the package rewrote the grammar from another notation, and counts in the result.
    """
    error = error.split("<state>")[0].strip()
    match structured.kind:
        case "grammar":
            found = _of_lark(structured.text, error, is_rewritten=is_rewritten)
        case "regex":
            found = _of_regex(structured.text, error)
        case "json_schema":
            found = _of_schema(structured.text, error)
        case _:
            found = _without_place(error)
    return " ".join(found.split())


def _of_lark(text: str, error: str, *, is_rewritten: bool) -> str:
    if (inner := _INNER_JSON.match(error)) is not None:
        return _of_inner_json(text, inner)
    if (found := _LARK.match(error)) is None:
        return error
    what = _SHOWN_LINES.sub("", found[3])
    regex = _REGEX.match(what)
    # The place is that of the rule's body, and a regular expression is somewhere in it.
    offset = 0 if is_rewritten else _offset(text, int(found[1]), int(found[2]))
    start = -1 if regex is None else text.find(regex["pattern"], offset)
    if regex is not None and start >= 0:
        return f"{place(text, start + len(regex['space']))}: {regex['what']}"
    what = what if regex is None else _in_pattern(regex)
    return what if is_rewritten else f"{place(text, offset)}: {what}"


def _of_inner_json(text: str, found: re.Match[str]) -> str:
    """Of what follows a directive such as %json, from whose end the package counts."""
    if text.count(found["directive"]) != 1:
        return found["what"]
    start = text.index(found["directive"]) + len(found["directive"])
    offset = start + _offset(text[start:], int(found["line"]), int(found["column"]))
    return f"{place(text, offset)}: {found['what']}"


def _of_regex(text: str, error: str) -> str:
    error = _without_place(error)
    if (found := _REGEX.match(error)) is None:
        return error
    return (
        f"{place(text, _unescaped(text, found['pattern'], len(found['space'])))}: {found['what']}"
    )


def _of_schema(text: str, error: str) -> str:
    if (found := _REGEX.match(error)) is not None:
        return _in_pattern(found)
    if (found := _SCHEMA.match(error)) is None:
        return error
    line, column = int(found[2]), int(found[3])
    column -= len(_BEFORE_SCHEMA) if line == 1 else 0
    return f"{place(text, _offset(text, line, column))}: {found[1]}"


def _in_pattern(found: re.Match[str]) -> str:
    column = len(found["space"]) + 1
    return f"in the regular expression {found['pattern']}, column {column}: {found['what']}"


def _without_place(error: str) -> str:
    """Without the place, which is one of the wrapper around the caller's text."""
    found = _LARK.match(error)
    return error if found is None else _SHOWN_LINES.sub("", found[3])


def _offset(text: str, line: int, column: int) -> int:
    """Place of a character by its line and its byte in it, both from 1."""
    lines = text.split("\n")
    if line > len(lines):
        return len(text)
    before = lines[line - 1].encode()[: column - 1].decode("utf-8", "ignore")
    return sum(len(one) + 1 for one in lines[: line - 1]) + len(before)


def _unescaped(text: str, escaped: str, column: int) -> int:
    """The character of `text` that stands at `column` of `escaped`, where some became two."""
    at = 0
    for offset, character in enumerate(text):
        if at >= column:
            return offset
        at += 1 if escaped.startswith(character, at) else 2
    return len(text)
