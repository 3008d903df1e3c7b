"""docs/data.md runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"


def test_the_pages_examples_run_and_name_what_there_is():
    from rljax.data.formats import FORMATS
    from rljax.data.tasks import TASKS
    from rljax.rewards import REWARDS
    from rljax.workflows import FILTERS, WORKFLOWS

    text = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    for name in (*FORMATS, *REWARDS, *WORKFLOWS, *FILTERS, *(f"task:{task}" for task in TASKS)):
        assert f"`{name}`" in text, name
