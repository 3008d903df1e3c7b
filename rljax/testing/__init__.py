"""Test suites for engines and backends, of this project and of others.

    sampler_contract.py        required behavior of every sampler
    learner_contract.py        required behavior of every learner
    learner_batches.py         batches and configs for its tests
    distillation_contract.py   the same with a teacher
    attention_suite.py         required results of every attention over packed rows
    parity_suite.py            a backend's losses and objective against the float64 oracle
    parity_logprobs.py         the same for log-probs, also fused with the objective
    parity_backend.py          methods that a subclass of these fills in
    parity_cases.py            their inputs
    harness.py                 a whole run on the fake engine in milliseconds
    models.py                  tiny models and configs
    moving.py                  steps of a learner, for tests that move runs between engines

Subclass one and say how yours is made. Put the subclass into a test file of your package, called
`Test...`, and run pytest on it:

    class TestMySampler(SamplerContract):
        def make(self, model): ...
        def source(self, model): ...

The suites bring their own fixtures and need no conftest. What an engine leaves out is skipped, with
the reason. A few slow cases have the marker `slow`: register it among the `markers` of your pytest
settings. docs/engines.md has a package with such a file. They need pytest and hypothesis: the extra
[test] has them, and the rest of what rljax's own tests need.
"""

import importlib.util

for _needed in ("pytest", "hypothesis"):
    if importlib.util.find_spec(_needed) is None:
        raise ModuleNotFoundError(
            f"rljax.testing: {_needed} is not installed (pip install {_needed}; for rljax's own tests 'rljax[test]>=0.1')",
            name=_needed,
        )
