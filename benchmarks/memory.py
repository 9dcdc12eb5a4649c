"""The memory plan beside what the device's allocator says, after a soak at the largest programs.

    python benchmarks/memory.py --model benchmarks/configs/qwen3_30b_a3b.json --json OUT.json

Sampled requests with log-probabilities keep every row busy, scored prompts the whole token budget.
Weights, state, and the most that temporaries and outputs took are measured apart: each is to lie
within 3 % or 64 MiB of the plan. What the process holds outside the allocator (context, code,
graphs) is a line of its own.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core import Core

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

MIB = 2**20
SHARE, LEAST = 0.03, 64 * MIB
"""How far a part may lie from its plan: the larger of the two."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; the exit status is 1 when a part misses its plan."""
    from benchmarks import offline
    from engine.core import Core

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=pathlib.Path, help="where the report goes")
    offline.add_engine_options(parser)
    parser.set_defaults(max_model_len=8192)
    options = parser.parse_args(arguments)
    core = Core.start(offline.engine_config(options))
    try:
        report = measure(core)
    finally:
        core.close()
    print(table(report), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(part["holds"] for part in report["parts"]) else 1


def measure(core: Core) -> dict[str, Any]:
    """Soaks an idle engine and gives its state back for a moment; it is idle and empty after."""
    import jax

    from benchmarks import conditions

    def stats() -> dict[str, int]:
        device = jax.devices()[0]
        found = device.memory_stats()
        if found is None:
            raise RuntimeError(f"{device.device_kind} tells no memory statistics; run it on a GPU")
        return found

    about = conditions.of_machine() | conditions.of_engine(core)
    plan, idle = core.runner.plan, stats()["bytes_in_use"]
    soak = _soak(core)
    peak, in_use, outside = stats()["peak_bytes_in_use"], stats()["bytes_in_use"], _outside()
    reserved = stats().get("pool_bytes", stats()["bytes_limit"])
    for leaf in jax.tree.leaves(core.runner.state):
        leaf.delete()
    weights = stats()["bytes_in_use"]
    allocator = stats()
    core.runner.reset_state()
    return {
        "benchmark": "memory",
        "conditions": about,
        "parts": [
            _part("weights", plan.weights, weights),
            _part("state without pools", plan.small_state, in_use - weights - plan.pools),
            _part("temporaries and outputs", plan.temporaries + plan.outputs, peak - idle),
        ],
        "pools": plan.pools,
        "peak_bytes_in_use": peak,
        "limit": plan.limit,
        "process_bytes": outside,
        "outside_allocator": None if outside is None else outside - reserved,
        "allocator": allocator,
        "soak": soak,
    }


def _part(name: str, planned: int, measured: int) -> dict[str, Any]:
    allowed = max(LEAST, int(SHARE * planned))
    return {
        "name": name,
        "planned": planned,
        "measured": measured,
        "holds": abs(measured - planned) <= allowed,
    }


def _soak(core: Core) -> dict[str, int]:
    """Runs requests of every kind to their end: all rows decode, the whole budget is prefilled."""
    import numpy as np

    from engine.request import Request, SamplingParams

    sampled = SamplingParams(temperature=0.8, top_p=0.9, logprobs=5, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, prompt_logprobs=3, ignore_eos=True)
    rng = np.random.default_rng(0)
    rows, room = core.info.max_rows, core.info.max_model_len
    work = [(sampled, 64, 64)] * rows + [(scored, min(3000, room // 2), 1)] * 4
    for i, (params, length, max_tokens) in enumerate(work):
        prompt = rng.integers(core.info.vocab_size, size=length, dtype=np.int32)
        core.submit(Request(f"soak-{i}", prompt, params, (), (), max_tokens, i))
    num_tokens = 0
    while not core.is_idle:
        core.step()
        for delta in core.poll():
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
            num_tokens += len(delta.token_ids)
    return {"requests": len(work), "tokens": num_tokens}


def _outside() -> int | None:
    """Bytes of this device in use as its driver counts them; None where there is no tool."""
    from benchmarks import conditions

    used = conditions.of_driver("memory.used")
    return int(used) * MIB if used is not None and used.isdigit() else None


def table(report: dict[str, Any]) -> str:
    """The report as lines for a terminal."""
    lines = [f"{'part':<26}{'plan MiB':>12}{'measured':>12}{'apart':>10}"]
    for part in report["parts"]:
        planned, measured = part["planned"] / MIB, part["measured"] / MIB
        verdict = "" if part["holds"] else "  MISSED"
        lines.append(
            f"{part['name']:<26}{planned:12.1f}{measured:12.1f}{measured - planned:10.1f}{verdict}"
        )
    lines.append(f"{'pools':<26}{report['pools'] / MIB:12.1f}")
    lines.append(f"{'peak in the allocator':<26}{'':12}{report['peak_bytes_in_use'] / MIB:12.1f}")
    if report["outside_allocator"] is not None:
        lines.append(
            f"{'outside the allocator':<26}{'':12}{report['outside_allocator'] / MIB:12.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
