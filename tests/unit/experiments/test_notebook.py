"""The page of rljax.train, executed by a Jupyter kernel."""

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "library.md"
SMALL = """\
from rljax.configs import quickstart

def small(whole=quickstart.get_config):
    config = whole()
    config.allocation_mode, config.total_train_steps, config.warmup.steps = "fake:d1", 2, 0
    config.train_dataset.batch_size = config.gconfig.n_samples = 2
    config.evaluator.freq_steps, config.valid_dataset.path, config.reward.workers = None, "", 1
    return config

quickstart.get_config = small
"""
OUTCOME = "import asyncio; print(outcome.step, outcome.finished, asyncio.get_running_loop().is_running())"


@pytest.mark.slow
def test_the_page_trains_in_a_notebook_with_a_reward_from_its_cell(tmp_path, monkeypatch):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    before, call = block.split("outcome =")
    cells = [SMALL, before, "outcome =" + call, OUTCOME]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    folder = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder)
    client.execute()  # raises what a cell raises
    assert "2 True True" in "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "2").is_dir()
