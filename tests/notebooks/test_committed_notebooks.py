"""Every notebook of the repository runs from top to bottom in a real kernel."""

import os
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHOWN = {
    "first_steps": ["The class definition is"],
    "finetune_hf": ["parameters were trained", "the adapters came back: 8"],
}
COMPARED = {"peft": "peft and transformers: the same logits", "transformers": "the same logits"}
"""What is shown where these packages are installed."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem == "finetune_hf" else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=250, kernel_name="python3", resources=resources).execute()
    shown = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    expected = SHOWN[path.stem]
    if path.stem == "finetune_hf":
        expected = expected + [text for name, text in COMPARED.items() if find_spec(name)]
    for text in expected:
        assert text in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") for cell in cells)
