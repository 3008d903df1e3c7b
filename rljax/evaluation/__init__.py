"""Results of evaluations: protocols that make them comparable, estimates with intervals, records.

    protocol.py     everything but the policy that decides a result; its digest
    estimates.py    pass@k, majority vote, means, and their confidence intervals
    results.py      the result of one policy on one set, as a file
    comparison.py   paired difference of two results
    text.py         a result as text
    uses.py         record of every use of a split, and what it was used for

Episodes are run by rljax/rollout/evaluation.py, in training and by experiments.evaluate alike.
"""
