"""absl binaries, one per job: README.md has a table of them. The other files are parts of these.

cli.py                the command `rljax`, whose words are the binaries
main.py               what all of them share: flags that name a config, errors as one line
command_help.py       what --help shows; error_lines.py, the lines
recording.py          status and log of a run that ends
library.py            `rljax.train`, for programs and notebooks
worker.py             rollout.py with --attach
replay_step.py        replay.py with --step; recorded_run.py opens the run
doctor_learner.py     doctor.py with --rescore or --critic
evaluated_policy.py   the policy that evaluate.py evaluates
certificate/          parts of parity.py
comparison/           parts of compare.py
plan_compile.py       plan.py with --compile; plan_lengths.py checks its lengths
bench/                benchmarks
"""

import sys

from rljax.process.first_signals import end_at_once_on_signals

if sys.argv[:1] == ["-m"]:  # as long as `python -m experiments.train` imports the packages above the module that it runs
    end_at_once_on_signals()
