"""Parts of experiments.bench.several_gpus.

place.py     the machine and the settings; programs that are started, with their logs
case.py      one thing that is measured, with the cards that it takes and the time it needs
cases.py     all of them
engines.py   cases of learners, samplers and publishing, by the benchmarks beside this folder
runs.py      cases of training runs, and of a run that moves
faults.py    cases of runs in which something is killed or stopped
sevenths.py  a reward for rehearsals
processes.py processes of a run, and the phase that it is in
planned.py   memory that the plan estimates for a learner
results.py   the file of results, which a later call goes on from
checks.py    what must hold of the results
table.py     the results as Markdown
"""
