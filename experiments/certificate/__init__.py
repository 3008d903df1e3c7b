"""Certificate of experiments.parity: both paths against a float64 oracle.

case.py             the minibatch and the policies that everything is computed on
oracle.py           transformers' model in float64 and the numpy definitions: what is right
engines.py          the same by learners and samplers, made as a run makes them
jax_optimizer.py    two steps of the JAX learner's optimizer; torch_optimizer.py, of the other's
bounds.py           the difference that is allowed for each quantity
report.py           checks, and the certificate as text and JSON
"""
