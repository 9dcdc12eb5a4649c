"""Runs the GPU suite, a process for each file, and keeps what every test saw as text.

    python tests/gpu/run.py [--smollm2 PATH] [--out FILE] [WORDS OF PYTEST]

Needs an NVIDIA GPU, jax with CUDA, pytest and what the engine needs; nothing is installed. Without
SmolLM2's file its tests are named as not run and the run fails, unless --without-smollm2 is given.
`--device cpu` is for work on the suite: tests that need no kernel run on the references.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a machine that only borrows the tree has nothing installed

from benchmarks import conditions  # noqa: E402

FOLDER = pathlib.Path(__file__).parent
FILES = ("test_gpu_dispatch.py", "test_gpu_tokens.py", "test_gpu_goldens.py")
"""The most telling first."""
RESULTS = ROOT / "benchmarks" / "results"
_FIND = "import jax; print(jax.devices()[0].device_kind)"
_NO_GPU = (
    "error: jax finds no NVIDIA GPU here ({reason}); run the GPU suite on a GPU machine "
    "(--device cpu works on it without one)"
)

Report = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every file and writes the report; the exit status is 1 when anything failed."""
    options, words = _parser().parse_known_args(arguments)
    platforms = os.environ | {"JAX_PLATFORMS": options.device}
    device = _device(platforms)
    if not device[0]:
        print(_NO_GPU.format(reason=device[1]), file=sys.stderr)
        return 1
    out = options.out or RESULTS / f"gpu_suite_{conditions.tag(device[1])}.txt"
    began, reports, failed = time.monotonic(), {}, False
    with tempfile.TemporaryDirectory() as scratch:
        for file in FILES:
            path = pathlib.Path(scratch) / f"{file}.json"
            status = subprocess.run(
                command(options, file, path, words), cwd=ROOT, env=_environment(platforms)
            ).returncode
            # 5: the words choose no test of this file.
            failed |= status not in (0, 5)
            if path.exists():
                reports[file] = json.loads(path.read_text(encoding="utf-8"))
            elif status != 5:
                reports[file] = {"died": f"ended with status {status} and left no report"}
    tests = [test for report in reports.values() for test in report.get("tests", {}).values()]
    if not any(test["outcome"] == "passed" for test in tests):
        failed = True  # nothing ran
    text = page(reports, time.monotonic() - began)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {out.name}")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--smollm2", type=pathlib.Path, help="SmolLM2's GGUF file; default: its wheel's")
    add("--without-smollm2", action="store_true", help="its absence is no failure")
    add("--out", type=pathlib.Path, help="default: benchmarks/results/gpu_suite_DEVICE.txt")
    return parser


def _device(env: Mapping[str, str]) -> tuple[bool, str]:
    """Whether there is one, and its name or why not. Not asked here: jax would keep its memory."""
    found = subprocess.run(
        [sys.executable, "-c", _FIND], env=env, capture_output=True, text=True, check=False
    )
    lines = (found.stderr if found.returncode else found.stdout).strip().splitlines()
    return not found.returncode, lines[-1] if lines else "no answer"


def _environment(platforms: Mapping[str, str]) -> dict[str, str]:
    # Other plugins of a borrowed machine have no part in this.
    path = os.pathsep.join([str(ROOT), *filter(None, [platforms.get("PYTHONPATH")])])
    return {**platforms, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}


def command(
    options: argparse.Namespace, file: str, report: pathlib.Path, words: Sequence[str]
) -> list[str]:
    """One file's pytest."""
    given = ["--device", options.device, "--report", str(report)]
    given += ["--smollm2", str(options.smollm2.resolve())] if options.smollm2 else []
    given += ["--without-smollm2"] if options.without_smollm2 else []
    # A warning of a driver or of another jax is no failure of the kernels.
    pytest = (sys.executable, "-m", "pytest", str(FOLDER / file), "-q", "-s", "-W", "default")
    return [*pytest, "-p", "no:cacheprovider", *given, *words]


def page(reports: Mapping[str, Report], seconds: float) -> str:
    """The verdict, the conditions, and every test with what it saw."""
    tests = {
        name: test for report in reports.values() for name, test in report.get("tests", {}).items()
    }
    counts = {
        outcome: sum(test["outcome"] == outcome for test in tests.values())
        for outcome in ("passed", "failed", "skipped")
    }
    lines = [f"GPU suite: {', '.join(f'{n} {name}' for name, n in counts.items())}"]
    lines += [f"{file}: {report['died']}" for file, report in reports.items() if "died" in report]
    conditions = next((one["conditions"] for one in reports.values() if "conditions" in one), None)
    if conditions is not None:
        versions = ", ".join(
            f"{name} {version}" for name, version in conditions["versions"].items()
        )
        lines += [
            f"{conditions['device']}, driver {conditions['driver']}, {conditions['cpu_cores']} "
            f"cores, commit {conditions['commit']}, {conditions['date']}, {seconds:.0f} s",
            versions,
        ]
    for name, test in tests.items():
        lines += ["", f"{test['outcome']:<8} {test['seconds']:6.1f} s  {name}"]
        if test["why"]:
            lines.append(f"    {test['why']}")
        lines += [f"    {line}" for saw in test["saw"] for line in saw.splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
