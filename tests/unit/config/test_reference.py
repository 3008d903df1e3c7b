"""docs/config.md is what the schema says."""

from importlib import metadata
from pathlib import Path

from rljax import entry_points
from rljax.config import io as config_io
from rljax.config import reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def test_the_page_is_of_this_schema():
    assert PAGE.read_text() == reference.page(), "stale: python -m rljax.config.reference > docs/config.md"


def test_every_key_has_one_row_of_six_cells_that_says_what_it_means():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert sorted(name.strip("`") for name, *_ in cells) == sorted(config_io.leaves())
    assert all(len(row) == 6 and row[5].endswith(".") for row in cells)


def test_engines_of_other_packages_are_not_in_it(monkeypatch):
    own, theirs = entry_points.installed(), metadata.EntryPoint("other", "no_such_module:PLUGIN", entry_points.GROUP)
    monkeypatch.setattr(entry_points, "installed", lambda: (*own, theirs))
    assert reference.page() == PAGE.read_text()
