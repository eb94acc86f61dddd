# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of examples/ from top to bottom, and checks their outputs."""

import pathlib

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = pathlib.Path(__file__).resolve().parents[4]


def shown(cell):
    """MIME types of the outputs of a cell, such as text/html."""
    return {kind for output in cell.outputs for kind in output.get("data", {})}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.ipynb")), ids=lambda path: path.name)
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    assert not any(cell.outputs or cell.execution_count for cell in code.values()), "outputs are not kept in the repository"
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    if path.name == "first_steps.ipynb":
        for name, kind in (("fit", "text/html"), ("wrap", "text/html"), ("curve", "image/svg+xml"), ("report", "text/html")):
            assert kind in shown(code[name]), name
        assert "recomputed" in code["report"].outputs[0]["data"]["text/html"]
