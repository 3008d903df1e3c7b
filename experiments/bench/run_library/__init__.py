"""The library of broken and healthy runs that the doctor is judged by.

experiments.bench.broken_runs is its command.

    recipes.py    the runs by name: a fault's link, its settings, what is planted
    plants.py     stand-ins for parts of a run, each with one bug
    rewards.py    rewards with a hole, and a workflow that misuses one
    planted.py    experiments.train with a plant
    commands.py   the commands that make a run, and the model that runs start from
    pool.py       all runs, many at once
    kept.py       what is kept of a run, as a line of an .xz file
    judge.py      the doctor's verdicts on kept runs as a table

Every run is made with seeds 1 and 2. Thresholds of the doctor's rules are set on the runs of seed 1
(tuning.jsonl.xz), and judged on those of seed 2 (judging.jsonl.xz).
"""
