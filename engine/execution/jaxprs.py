"""Reads jaxprs: equations by name, constants, callbacks, and which inputs an output depends on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.core
import numpy as np


def body(jaxpr: Any) -> Any:
    """The open jaxpr of an open or closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def sub_jaxprs(equation: Any) -> Iterator[Any]:
    """Every jaxpr among an equation's parameters."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


def walk(jaxpr: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The jaxpr and all nested ones, each once."""
    seen = set() if seen is None else seen
    if id(body(jaxpr)) in seen:
        return
    seen.add(id(body(jaxpr)))
    yield jaxpr
    for equation in body(jaxpr).eqns:
        for inner in sub_jaxprs(equation):
            yield from walk(inner, seen)


def integer_constants(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of integer arrays of more than one element closed over anywhere inside.

    A kernel's body names its operands as constants too, but as values still being traced.
    """
    shapes = []
    for inner in walk(jaxpr):
        for constant in getattr(inner, "consts", ()):
            if isinstance(constant, jax.core.Tracer):
                continue
            array = np.asarray(constant) if not hasattr(constant, "dtype") else constant
            if np.issubdtype(array.dtype, np.integer) and np.size(array) > 1:
                shapes.append(tuple(array.shape))
        for equation in body(inner).eqns:
            for value in equation.invars:
                literal = getattr(value, "val", None)
                if literal is None or np.size(literal) <= 1:
                    continue
                if np.issubdtype(np.asarray(literal).dtype, np.integer):
                    shapes.append(tuple(np.shape(literal)))
    return shapes


def callbacks(jaxpr: Any) -> list[str]:
    """Names of primitives that reach back to the host."""
    return [
        equation.primitive.name
        for inner in walk(jaxpr)
        for equation in body(inner).eqns
        if any(word in equation.primitive.name for word in ("callback", "feed", "debug_print"))
    ]


def named_equation(jaxpr: Any, name: str) -> Any:
    """The one inner jit called `name`.

    Raises:
      LookupError: there is none, or more than one.
    """
    found = [e for e in body(jaxpr).eqns if e.params.get("name") == name]
    if len(found) != 1:
        raise LookupError(f"the step has {len(found)} inner functions named {name!r}, needs one")
    return found[0]


def readers(jaxpr: Any, variable: Any) -> list[str]:
    """Names of the equations that read a variable, and "output" when it is returned."""
    names = [
        equation.params.get("name", equation.primitive.name)
        for equation in body(jaxpr).eqns
        if any(value is variable for value in equation.invars)
    ]
    return names + ["output"] * sum(value is variable for value in body(jaxpr).outvars)


def reached_outputs(jaxpr: Any, sources: set[Any]) -> list[bool]:
    """Which outputs the variables in `sources` may flow into; each equation is a whole."""
    inner = body(jaxpr)
    reached = set(sources)
    for equation in inner.eqns:
        if any(_is_var(value) and value in reached for value in equation.invars):
            reached |= set(equation.outvars)
    return [_is_var(value) and value in reached for value in inner.outvars]


def live_inputs(jaxpr: Any, live_outputs: Sequence[bool]) -> list[bool]:
    """Which inputs the live outputs depend on, by dead-code analysis through nested jaxprs.

    A primitive whose bodies are not known here counts as reading all its operands.
    """
    inner = body(jaxpr)
    live = {
        v for v, is_live in zip(inner.outvars, live_outputs, strict=True) if is_live and _is_var(v)
    }
    for equation in reversed(inner.eqns):
        outs = [v in live for v in equation.outvars]
        if not any(outs):
            continue
        ins = _live_operands(equation, outs)
        live |= {
            v for v, is_live in zip(equation.invars, ins, strict=True) if is_live and _is_var(v)
        }
    return [v in live for v in inner.invars]


def _is_var(value: Any) -> bool:
    return not hasattr(value, "val")


def _live_operands(equation: Any, outs: list[bool]) -> list[bool]:
    name = equation.primitive.name
    if name in ("jit", "pjit", "closed_call", "core_call", "remat2"):
        return live_inputs(next(sub_jaxprs(equation)), outs)
    if name == "cond":
        branches = [live_inputs(branch, outs) for branch in equation.params["branches"]]
        return [True, *(any(column) for column in zip(*branches, strict=True))]
    if name == "scan":
        # Every output counts as live: a carry that leads nowhere is left to the dynamic proof.
        inner = next(sub_jaxprs(equation))
        return live_inputs(inner, [True] * len(body(inner).outvars))
    return [True] * len(equation.invars)
