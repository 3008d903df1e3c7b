"""The doctor: which link of the loop broke first, with the evidence.

history = History.load(Path("runs/quickstart"))
diagnosis = diagnose(history)
diagnosis.first_break                 # a Finding, or None

history.py      a run's metrics by step, histograms, samples, config and context
run_files.py    reads the files of a run directory
series.py       series of one metric; robust statistics
rule.py         what a rule is; thresholds.py, the numbers of rules and where these come from
rules/          the rules, a file per link; names.py, progress.py, evidence.py, text.py and
                planned.py serve them
registry.py     rules of this package and of others, by entry point
finding.py      findings, their order, the diagnosis
doctor.py       judges a run by all rules; live.py, while it goes on
reference.py    writes docs/doctor.md
report/         the HTML report
summaries/      the verdict as text, audits, checklists, two runs compared, several seeds together
importers/      logs of TRL and verl as a History; advice.py has causes in their words
"""

from rljax.diagnosis.doctor import diagnose
from rljax.diagnosis.finding import Diagnosis, Finding, Link, Severity, Standing
from rljax.diagnosis.history import History
from rljax.diagnosis.registry import all_rules
from rljax.diagnosis.rule import Rule, Sign
from rljax.diagnosis.rules import OWN as RULES
from rljax.diagnosis.run_files import Bins
from rljax.diagnosis.series import Series

__all__ = [
    "RULES",
    "Bins",
    "Diagnosis",
    "Finding",
    "History",
    "Link",
    "Rule",
    "Series",
    "Severity",
    "Sign",
    "Standing",
    "all_rules",
    "diagnose",
]
