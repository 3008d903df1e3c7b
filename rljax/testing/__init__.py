"""Test suites for engines and backends, of this project and of others: subclass one and say how yours is made.

    sampler_contract.py   what every sampler must do
    learner_contract.py   what every learner must do
    parity_suite.py       a backend's arithmetic against the float64 oracle; parity_cases.py has its inputs
    harness.py            a whole run on the fake engine in milliseconds
    models.py             tiny models and configs
    moving.py             a learner at work on one kind of run, for tests of runs that move

They need pytest and numpy.
"""
