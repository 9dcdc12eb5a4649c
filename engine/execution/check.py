"""`treadle check`: makes and prints the two proofs of the id contract for every registration."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.execution import contract, startup
from engine.execution.buckets import ProgramKey
from engine.execution.runner import Runner
from models import registry
from models.registry import Registration


def check(architectures: Sequence[str], report: Callable[[str], None]) -> bool:
    """Proves every named registration (all, when none is named) on its example configuration.

    Args:
      architectures: registered names.
      report: prints one line.

    Returns:
      True when every proof held.

    Raises:
      ValueError: a name is not registered.
    """
    registrations = [registry.get(name) for name in architectures or registry.architectures()]
    return all([check_registration(registration, report) for registration in registrations])


def check_registration(registration: Registration, report: Callable[[str], None]) -> bool:
    """Both proofs of each program of one registration, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        run = _start(registration, pathlib.Path(folder))
    try:
        if not registration.device_token_ids:
            report(f"{registration.architecture}: sync lane: not applicable")
        holds = [_check_program(run, key, report) for key in run.programs.steps]
        return all(holds)
    finally:
        run.close()


def _check_program(run: Runner, key: ProgramKey, report: Callable[[str], None]) -> bool:
    findings = contract.prove_program(run, key)
    failed = {finding.proof: finding.reason for finding in findings}
    verdicts = [
        f"{proof} {'FAILED: ' + failed[proof] if proof in failed else 'holds'}"
        for proof in ("structural", "dynamic")
    ]
    report(f"{run.model.registration.architecture}: {key}: {', '.join(verdicts)}")
    return not findings


def _start(registration: Registration, folder: pathlib.Path) -> Runner:
    """A runner of the example configuration on a small ladder."""
    described = dict(registration.example) | {"architectures": [registration.architecture]}
    path = folder / "config.json"
    path.write_text(json.dumps(described))
    config = EngineConfig(
        model=str(path),
        load_format="dummy",
        dtype="float32",
        max_model_len=64,
        max_rows=4,
        row_rungs=(2, 4),
        token_budget=32,
        token_rungs=(32,),
        num_pages=24,
    )
    model, source, _, _ = startup.open_model(config)
    return startup.start(config, model, source, lambda *_: None)
