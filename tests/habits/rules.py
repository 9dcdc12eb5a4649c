"""Rules about source text: each reads one file's syntax tree and names what breaks the rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "models", "kernels", "proto")

_DEVICES = {"gpu", "cuda", "cpu", "nvidia"}
_HOST = {"cpu_count", "process_cpu_count"}
"""Python's names for the host's own threads."""
_UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_UNSAFE_CALLS = {"eval", "exec"}

# In pieces, so that this file keeps its own rule.
_ADDRESSES = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:root|work|" + "home)/",
            r"\.py" + r"env/",
            "py" + r"pi\.org",
            "python" + r"hosted\.org",
            r"--(?:extra-)?index-" + r"url[ =]\S",
            r"https?://(?:localhost|\d+\.\d+\.\d+\.\d+)[^ ]*/" + "simple",
            "arti" + "factory",
        )
    )
)


def sources(*folders: str) -> dict[str, str]:
    """Text of every Python file below the folders, by path from the root."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def module_of(path: str) -> str:
    """engine/text/stop.py -> engine.text.stop; a package's file is the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def device_names(source: str) -> Iterator[str]:
    """Names and strings of code that speak of a kind of device; prose has spaces and may."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        for word in _words(node):
            if word not in _HOST and _DEVICES & set(
                re.split(r"[^a-z]+|(?<=[a-z])(?=[A-Z])", word.lower())
            ):
                yield f"line {node.lineno}: {word}"


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str() as text) if not re.search(r"\s", text):
            yield text
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str() as name):
            yield name
        case ast.alias(name=name):
            yield name


def unsafe_code(source: str) -> Iterator[str]:
    """Ways to run what was read: pickle and its kin, `eval`, `exec`, arrays of objects."""
    for node in ast.walk(ast.parse(source)):
        for name in _imported(node):
            if name.partition(".")[0] in _UNSAFE_MODULES:
                yield f"line {node.lineno}: import of {name}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _UNSAFE_CALLS:
                yield f"line {node.lineno}: {node.func.id}"
            if any(word.arg == "allow_pickle" for word in node.keywords):
                yield f"line {node.lineno}: allow_pickle"


def imports(source: str) -> set[str]:
    """Modules a file imports when it runs, and names that may be modules; not for types alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        found |= set(_imported(node))
        pending += ast.iter_child_nodes(node)
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reachable(starts: Iterable[str], files: Mapping[str, str]) -> set[str]:
    """Every module that importing `starts` may import, packages above them included.

    Args:
      starts: modules or packages; a package stands for all its modules.
      files: sources by path.
    """
    modules = {module_of(path): source for path, source in files.items()}
    starts = tuple(starts)
    pending = [
        name for name in modules if any(name == one or name.startswith(f"{one}.") for one in starts)
    ]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        pending += [name.rpartition(".")[0]] if "." in name else []
        pending += imports(modules[name]) if name in modules else ()
    return seen


def public_functions(source: str) -> Iterator[str]:
    """Functions and methods of a file whose names are for others."""
    for node in ast.parse(source).body:
        for one in (node, *node.body) if isinstance(node, ast.ClassDef) else (node,):
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
                yield one.name


def mentioned(source: str) -> set[str]:
    """Names that a file's code uses; a definition alone is no use."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    return used


def unread_processes(source: str) -> Iterator[str]:
    """`subprocess.run` whose exit status nobody reads; output alone proves nothing."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        reads = "'returncode'" in ast.dump(function)
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.run"):
                continue
            checks = any(
                word.arg == "check" and ast.unparse(word.value) == "True" for word in node.keywords
            )
            returns = any(
                isinstance(one, ast.Return) and one.value is node for one in ast.walk(function)
            )
            if not (reads or checks or (returns and "returncode" in source)):
                yield f"line {node.lineno}: the exit status is not read"


def addresses(text: str) -> Iterator[str]:
    """Paths of one machine and addresses of package registries."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _ADDRESSES.finditer(line):
            yield f"line {number}: {match.group()}"
