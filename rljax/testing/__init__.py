"""Test suites for engines and backends, of this project and of others: subclass one and say how yours is made.

    sampler_contract.py   what every sampler must do
    learner_contract.py   what every learner must do
    parity_suite.py       a backend's arithmetic against the float64 oracle; parity_cases.py has its inputs
    harness.py            a whole run on the fake engine in milliseconds
    models.py             tiny models and configs
    moving.py             a learner at work on one kind of run, for tests of runs that move

They need pytest and hypothesis: the extra [test] has them, and the rest of what rljax's own tests need.
"""

import importlib.util

for _needed in ("pytest", "hypothesis"):
    if importlib.util.find_spec(_needed) is None:
        raise ModuleNotFoundError(
            f"rljax.testing: {_needed} is not installed (pip install {_needed}, or all that rljax's tests need: 'rljax[test]')",
            name=_needed,
        )
