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
        for path, table in run.tables.items():
            where = f"{path} {table.dtype}{list(table.shape)} stays on the host"
            report(f"{registration.architecture}: {where}")
        holds = [_check_program(run, key, report) for key in run.programs.steps]
        if not registration.device_token_ids:
            holds.append(_check_undeclared(run, report))
        return all(holds)
    finally:
        run.close()


def _check_program(run: Runner, key: ProgramKey, report: Callable[[str], None]) -> bool:
    findings = contract.prove_program(run, key)
    proofs = {"structural": "structural", "dynamic": "dynamic"}
    if not run.model.registration.device_token_ids:
        proofs = {"structural": "donation and parameters"}
    verdicts = []
    for proof, name in proofs.items():
        reasons = "; ".join(finding.reason for finding in findings if finding.proof == proof)
        verdicts.append(f"{name} FAILED: {reasons}" if reasons else f"{name} holds")
    report(f"{run.model.registration.architecture}: {key}: {', '.join(verdicts)}")
    return not findings


def _check_undeclared(run: Runner, report: Callable[[str], None]) -> bool:
    """An undeclared registration has no proofs, but no row of it may come from the device."""
    num_device, _ = run.device_counters()
    verdict = f"FAILED: {num_device} rows came from the device" if num_device else "not applicable"
    report(f"{run.model.registration.architecture}: sync lane: {verdict}")
    return not num_device


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
