"""What the documents name exists: settings, limits, architectures, files and the README's code."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks import table
from engine.config import LIMITS, EngineConfig
from models import registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "docs" / "engine.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_setting_has_its_row():
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"limits"}
    rows = [line.split("|")[1] for line in SETTINGS.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    assert named - {"n"} == fields  # `n` is a limit


def test_every_limit_stands_with_its_value():
    section = SETTINGS.split("## Limits of a request")[1].split("\n\n")[2]
    values = [int(text.replace(",", "")) for text in re.findall(r"\| ([\d,]+) (?=\|)", section)]
    assert sorted(values) == sorted(dataclasses.asdict(LIMITS).values())


def test_every_architecture_has_its_row():
    rows = re.findall(r"^\| `(\w+ForCausalLM)`", README, re.M)
    assert sorted(rows) == sorted(registry.architectures())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_named_exists(document):
    text = document.read_text()
    named = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    paths = [document.parent / name for name in named]
    paths += [
        ROOT / name
        for name in re.findall(r"`((?:engine|models|tests|benchmarks|proto)/[\w/.]+)`", text)
    ]
    paths = [path for path in paths if path.name != "NAME.py"]  # the one to be written
    assert paths
    assert [str(path) for path in paths if not path.exists()] == []


def test_the_readmes_python_names_what_is_there():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 2
    for block in blocks:
        imports = [one for one in ast.parse(block).body if isinstance(one, ast.ImportFrom)]
        assert imports
        for one in imports:
            exec(compile(ast.Module([one], []), "README.md", "exec"), {})


def test_the_readme_has_the_block_that_the_table_fills():
    assert "| 1 |" in table.filled(README, "| 1 |")
