"""The report: one self-contained HTML page of a run, or of several compared.

    history = History.load(Path("runs/quickstart"))
    html = run_page(history, diagnose(history), all_rules())

    curves.py     thins metrics to curves; heatmaps.py, histograms to cells
    charts.py     draws them as Vega-Lite specifications
    plans.py      which metrics are drawn, how and where; figures.py draws them
    samples.py    samples by token; tables.py, config, context and metrics as rows
    compare.py    groups of seeds, intervals, differences
    page.py       puts it all into templates/

Needs the extra `report` (Altair, and Vega as a script).
"""

from rljax.diagnosis.report.compare import short_names
from rljax.diagnosis.report.page import comparison_page, run_page

__all__ = ["comparison_page", "run_page", "short_names"]
