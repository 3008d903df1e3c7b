"""Logs of other trainers as a History.

history = read(Path("export.csv"), form="auto", source="trl")

read.py       reads a log of either
formats.py    W&B exports (CSV), TensorBoard event files, JSON lines: rows of names and numbers
tables.py     names of TRL's and verl's metrics, and the rules' names for them
"""

from rljax.diagnosis.importers.formats import FORMATS
from rljax.diagnosis.importers.read import read
from rljax.diagnosis.importers.tables import SOURCES

__all__ = ["FORMATS", "SOURCES", "read"]
