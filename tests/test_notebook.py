"""The example notebook runs from its first cell to its last as a reader would run it."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
# The first run on a fresh machine compiles; later ones read the compilation cache.
SECONDS_PER_CELL = 300
# The reader's JAX is not as strict as that of the tests.
READERS_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("JAX_")
} | {"JAX_PLATFORMS": "cpu"}


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs every cell in a kernel of its own; an error in a cell is raised."""
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        allow_errors=False,
        force_raise_errors=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    return client.execute(env=READERS_ENVIRONMENT)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def executed() -> nbformat.NotebookNode:
    return execute(nbformat.read(NOTEBOOK, as_version=4))


def test_every_cell_runs_in_order_and_none_fails(executed):
    counts = [cell.execution_count for cell in code_cells(executed)]
    assert counts == list(range(1, len(counts) + 1)) and len(counts) >= 10
    kinds = {output.output_type for cell in code_cells(executed) for output in cell.outputs}
    assert "error" not in kinds and "stream" in kinds


def test_the_answers_are_right_and_the_lens_ends_at_the_answer(executed):
    text = "".join(
        output.text
        for cell in code_cells(executed)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert text.count("The capital of France is Paris.") == 2  # chat and stream
    assert "layer 29  best ' Paris'" in text


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))


def test_an_error_in_a_cell_fails_the_run():
    cells = [nbformat.v4.new_code_cell("1 / 0"), nbformat.v4.new_code_cell("2 + 2")]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(nbformat.v4.new_notebook(cells=cells))
