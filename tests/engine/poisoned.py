"""Lets one request of several turn NaN, or fills pages that nobody owns with NaN."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from engine.core import Core
from engine.request import Request
from tests.engine import loop


@contextlib.contextmanager
def embedding(core: Core, token_id: int) -> Iterator[None]:
    """The embedding of one id is NaN meanwhile: of a model whose head has a matrix of its own."""
    clean = core.params
    assert "head" in clean, "a tied head would be NaN for every row"

    def poisoned(table: jax.Array) -> jax.Array:
        return jax.device_put(table.at[token_id].set(jnp.nan), table.sharding)

    core.runner.replace_params({**clean, "embed": jax.tree.map(poisoned, clean["embed"])})
    try:
        yield
    finally:
        core.runner.replace_params(clean)


def in_prompt(requests: Sequence[Request], victim: str, token_id: int) -> list[Request]:
    """The same requests; the middle of the victim's prompt is `token_id`."""
    changed = []
    for one in requests:
        prompt = one.prompt_ids.copy()
        if one.request_id == victim:
            prompt[len(prompt) // 2] = token_id
        changed.append(dataclasses.replace(one, prompt_ids=prompt))
    return changed


def unsaid_id(requests: Sequence[Request], clean: loop.Outputs, vocab_size: int) -> int:
    """An id in no prompt and no answer."""
    return min(set(range(vocab_size)) - _ids(requests, clean))


def said_by_one(requests: Sequence[Request], clean: loop.Outputs) -> tuple[str, int]:
    """A request, and an id that it alone says, with more behind it."""
    for one in requests:
        others = [other for other in requests if other is not one]
        barred = _ids(others, clean) | set(one.prompt_ids.tolist())
        found = [id for id in clean[one.request_id, 0].token_ids[:-2] if id not in barred]
        if found:
            return one.request_id, found[-1]
    raise AssertionError("every id of an answer stands in another one too")


def _ids(requests: Sequence[Request], clean: loop.Outputs) -> set[int]:
    prompts = [one.prompt_ids.tolist() for one in requests]
    return set().union(*prompts, *(clean[one.request_id, 0].token_ids for one in requests))


def assert_flagged_alone(
    core: Core,
    requests: Sequence[Request],
    clean: loop.Outputs,
    victim: str,
    token_id: int,
    poisoned_requests: Sequence[Request],
) -> loop.Output:
    """The victim ends, the others and all of them afterwards say what they said; returns its end.

    Bit-equal: ids, and log-probabilities where they are asked for.
    """
    with embedding(core, token_id):
        found = loop.run(core, poisoned_requests)
    failed = found.pop((victim, 0))
    assert_failed(failed, victim, clean[victim, 0])
    again = loop.run(core, requests)
    for outputs, count in ((found, len(clean) - 1), (again, len(clean))):
        loop.assert_same(outputs, clean)
        assert len(outputs) == count
    return failed


def assert_failed(output: loop.Output, victim: str, clean: loop.Output) -> None:
    """Ended by name, with nothing said that a clean run would not have said."""
    assert output.finish_reason == "error" and output.error is not None
    assert repr(victim) in output.error and "not finite" in output.error
    assert output.token_ids == clean.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < len(clean.token_ids)


def pages_from(core: Core, first: int) -> int:
    """Writes NaN over all pages from `first` on, which no request may own; returns their number."""
    runner = core.runner
    assert first >= core.scheduler._config.groups[0].num_pages

    def poisoned(pool: jax.Array) -> jax.Array:
        values = np.array(pool)
        values[first:] = np.nan
        return jax.device_put(values, pool.sharding)

    runner.state = runner.state.replace(pools=jax.tree.map(poisoned, runner.state.pools))
    num_pages = min(pool.shape[0] for pool in jax.tree.leaves(runner.state.pools)) - first
    assert num_pages > 0
    return num_pages
