"""absl binaries, one per job; `cli.py` has them as commands of `rljax`."""

import sys

from rljax.process.first_signals import end_at_once_on_signals

if sys.argv[:1] == ["-m"]:  # as long as `python -m experiments.train` imports the packages above the module that it runs
    end_at_once_on_signals()
