"""Comparison of experiments.compare: the same prompts through several engines.

case.py                  the prompts, and what a subject has to do with them
subjects.py              runs the subjects, each compared with the first one
transformers_subject.py  transformers; jax_subject.py and sglang_subject.py, the other two
sampling.py              greedy completions from a sampler of this project
report.py                where completions part, how far log-probs are apart, a verdict
"""
