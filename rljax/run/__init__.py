"""Parts of a run that the loop holds, and what each of them does between two steps.

parts.py          engine, prompts, workflow and sinks that a run is made of; how it ended
requirements.py   what a run needs before anything is loaded, which a check asks for too
announcement.py   what is said of a run before its first step
sampling.py       the producer: generates here, or leases prompts to rollout workers
evaluator.py      evaluations on the validation sets, one at a time
reporting.py      metrics, samples and status of each step
oversight.py      what guardrails and doctor say of a step
verdicts.py       the doctor while the run goes on: its verdict, and actions for its findings
interventions.py  what guardrails do: warn, lower the learning rate, roll back, end the run
ending.py         exports, last words, and whether the run did what it was asked to
"""
