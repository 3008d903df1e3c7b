import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gsm8k_dir():
    """The real GSM8K files, in data/gsm8k of the folder RLJAX_SHARED, or of `shared` beside the
    repository.
    """
    shared = Path(os.environ.get("RLJAX_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    directory = shared / "data" / "gsm8k"
    if not (directory / "train.jsonl").is_file():
        pytest.skip("left out: the real GSM8K files are not here (set RLJAX_SHARED to a folder with data/gsm8k)")
    return directory
