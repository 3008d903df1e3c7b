"""Test suites for engines and backends, of this project and of others: subclass one and say how
yours is made.

    sampler_contract.py   what every sampler must do
    learner_contract.py   what every learner must do
    parity_suite.py       a backend's arithmetic against the float64 oracle: losses and the objective;
                          parity_logprobs.py: log-probs, and the fused form; parity_backend.py: what a subclass fills in;
                          parity_cases.py: the inputs
    harness.py            a whole run on the fake engine in milliseconds
    models.py             tiny models and configs
    moving.py             a learner at work on one kind of run, for tests of runs that move

Put the subclass into a test file of your package, called `Test...`, and run pytest on it:

    class TestMySampler(SamplerContract):
        def make(self, model): ...
        def source(self, model): ...

The suites bring their own fixtures and need no conftest. What an engine leaves out is skipped,
with the reason. Few cases, that take long, have the marker `slow`: register it among the `markers`
of your pytest settings. docs/engines.md has a package with such a file. They need pytest and
hypothesis: the extra [test] has them, and the rest of what rljax's own tests need.
"""

import importlib.util

for _needed in ("pytest", "hypothesis"):
    if importlib.util.find_spec(_needed) is None:
        raise ModuleNotFoundError(
            f"rljax.testing: {_needed} is not installed (pip install {_needed}, or all that rljax's tests need: 'rljax[test]')",
            name=_needed,
        )
