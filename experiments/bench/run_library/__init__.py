"""The library of broken and healthy runs that the doctor is judged by.

experiments.bench.broken_runs is its command.

    recipes.py    the runs by name
    healthy.py    those without a fault
    faulty.py     those with one: its link, its settings, what is planted
    recipe.py     how a run is described, and settings that several share
    plants.py     stand-ins for parts of a run, each with one bug
    rewards.py    rewards with a hole, and a workflow that misuses one
    planted.py    experiments.train with a plant
    commands.py   the commands that make a run, and the model that runs start from
    pool.py       all runs, many at once
    demonstrations.py, environments.py  data and an environment of some runs
    live.py       verdicts on a run while it goes on
    kept.py       what is kept of a run, as a line of an .xz file
    judge.py      the doctor's verdicts on kept runs as a table

Every run is made with seeds 1 and 2. Thresholds of the doctor's rules are set on the runs of seed 1
(tuning.jsonl.xz), and judged on those of seed 2 (judging.jsonl.xz).
"""
