"""The repository keeps its own rules; each rule is shown to see what breaks it."""

from __future__ import annotations

import ast
import collections
import json
import subprocess
from pathlib import Path

import pytest

from models import registry
from tests.habits import rules

ROOT = rules.ROOT
PRODUCT = rules.sources(*rules.PACKAGES)
TESTS = rules.sources("tests")

STEP_PATH = tuple(
    f"engine/execution/{name}.py" for name in ("packing", "step", "runner", "programs", "buckets")
)
NO_CALLER = {
    "replace_params": "the owner of the weights calls it, in a notebook or a trainer",
}
"""Public functions of the step path that nothing in the product calls, with their reasons."""

DEVICE_FILES = ("engine/execution/runner.py", "kernels/")
SERVICE_FILES = {
    f"engine/serving/{name}.py"
    for name in ("admin", "client", "grpc_server", "grpc_service", "load", "messages")
}
HOST_ONLY = ("engine.scheduling", "engine.text", "engine.request", "engine.config")
FLOORS = {"kernels": {"models", "engine", "proto"}, "models": {"engine", "proto"}}


def offences(found: dict[str, list[str]]) -> str:
    return "\n".join(f"{path}: {one}" for path, many in found.items() for one in many)


# Tests.


def test_every_file_with_tests_is_collected():
    for path, source in TESTS.items():
        holds_tests = any(
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and node.name.lower().startswith("test")
            for node in ast.parse(source).body
        )
        assert Path(path).name.startswith("test_") == holds_tests, path
    assert not any("collect_ignore" in text for text in TESTS.values() if "rules" not in text)


def test_no_two_test_files_share_a_name():
    names = collections.Counter(Path(path).name for path in TESTS if "/test_" in path)
    assert len(names) > 20 and max(names.values()) == 1, names.most_common(1)


def test_the_exit_status_of_every_process_is_read():
    found = {path: list(rules.unread_processes(source)) for path, source in TESTS.items()}
    assert not offences(found)


# Registrations.


@pytest.mark.parametrize("architecture", registry.architectures())
def test_every_registration_has_a_row_a_fixture_and_a_golden(architecture):
    documents = (ROOT / "README.md", ROOT / "docs" / "contract.md")
    assert any(f"| `{architecture}`" in path.read_text() for path in documents), "no row"
    stems = [
        path.stem
        for path in sorted((ROOT / "tests" / "families").glob("*.json"))
        if json.loads(path.read_text()).get("architectures") == [architecture]
    ]
    assert stems, "no fixture in tests/families"
    for stem in stems:
        assert (ROOT / "tests" / "goldens" / f"{stem}.npz").exists(), f"no golden of {stem}"


# The product.


def test_every_public_function_of_the_step_path_has_a_caller():
    callers = PRODUCT | rules.sources("benchmarks")
    used = set().union(*(rules.mentioned(source) for source in callers.values()))
    public = {name for path in STEP_PATH for name in rules.public_functions(PRODUCT[path])}
    assert {"pack", "launch", "settle", "resolve_ids", "key_of"} <= public
    assert sorted(public - used - NO_CALLER.keys()) == []
    assert sorted(NO_CALLER.keys() - (public - used)) == [], "called, or gone: take its row away"


def test_no_device_is_named_outside_runner_and_kernels():
    found = {
        path: list(rules.device_names(source))
        for path, source in PRODUCT.items()
        if not path.startswith(DEVICE_FILES) and not path.startswith("proto/")
    }
    assert not offences(found)
    assert list(rules.device_names(PRODUCT["engine/execution/runner.py"]))


def test_nothing_that_was_read_is_run():
    found = {path: list(rules.unsafe_code(source)) for path, source in PRODUCT.items()}
    assert not offences(found)


@pytest.mark.parametrize("start", HOST_ONLY)
def test_host_modules_do_not_reach_jax(start):
    seen = rules.reachable([start], PRODUCT)
    assert start in seen and not {"jax", "jaxlib", "flax"} & {name.split(".")[0] for name in seen}


def test_the_loop_reaches_jax():
    assert "jax" in rules.reachable(["engine.core"], PRODUCT)


def test_files_import_only_from_floors_below():
    for path, source in PRODUCT.items():
        floor = path.split("/")[0]
        tops = {name.split(".")[0] for name in rules.imports(source)}
        assert not tops & FLOORS.get(floor, set()), path
        assert not tops & {"tests", "benchmarks", "examples"}, path
        if floor != "proto":
            assert "proto" not in tops or path in SERVICE_FILES, path
    assert PRODUCT.keys() >= SERVICE_FILES


def test_no_file_speaks_of_a_machine_or_a_registry():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(paths) > 100
    found = {}
    for path in paths:
        try:
            found[path.relative_to(ROOT).as_posix()] = list(rules.addresses(path.read_text()))
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # an array file, or one that is being removed
    assert not offences(found)


# The rules themselves.


@pytest.mark.parametrize(
    "source",
    [
        'if backend == "gpu": pass',
        "x = jax.devices('cpu')",
        "cuda_graph = 1",
        "options['xla_gpu_autotune_level'] = 0",
        "def on_gpu(): pass",
        "f(use_cuda=True)",
        'x = f"nvidia{n}"',
    ],
)
def test_a_device_name_in_code_is_seen(source):
    assert list(rules.device_names(source))


@pytest.mark.parametrize("source", ['"""On a GPU."""', "help = 'Default: 8 on a CPU.'", "gput = 1"])
def test_a_device_name_in_prose_is_not(source):
    assert not list(rules.device_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "eval('1')",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_code_is_seen(source):
    assert list(rules.unsafe_code(source))


def test_imports_are_followed_through_functions_and_packages_but_not_types():
    files = {
        "a/__init__.py": "",
        "a/b.py": "def f():\n    from c import d",
        "c/__init__.py": "import numpy",
        "c/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    }
    seen = rules.reachable(["a"], files)
    assert {"a.b", "c.d", "numpy"} <= seen and "torch" not in seen


def test_a_function_nobody_calls_is_seen():
    source = "def one(): two()\ndef two(): pass\nclass Three:\n    def four(self): pass"
    assert set(rules.public_functions(source)) - rules.mentioned(source) == {"one", "four"}


def test_an_unread_exit_status_is_seen():
    call = "subprocess.run(['x'])"
    assert list(rules.unread_processes(f"def f():\n    assert 'passed' in {call}.stdout"))
    assert not list(rules.unread_processes(f"def f():\n    assert {call}.returncode == 0"))
    assert not list(rules.unread_processes("def f():\n    subprocess.run(['x'], check=True)"))


@pytest.mark.parametrize(
    "parts",
    [
        ("see /ro", "ot/x"),
        ("/ho", "me/someone/x"),
        ("https://py", "pi.org/x"),
        ("--index-", "url=x"),
    ],
)
def test_an_address_is_seen(parts):
    assert list(rules.addresses("".join(parts)))
    assert not list(rules.addresses("engine/wor" + "k/x and --no-emit-index-" + "url --no"))
