"""A library of runs with one fault each, to judge the doctor by, and of healthy ones beside them.

    python -m experiments.bench.broken_runs --list
    python -m experiments.bench.broken_runs --run=lr_x100 --seed=1 --workdir=runs/lr_x100
    python -m experiments.bench.broken_runs --all --jobs=32 --out=runs/library
    python -m experiments.bench.broken_runs --judge=tests/data/runs

    recipes.py    the runs by name: a fault's link, its settings, what is planted
    plants.py     stand-ins for parts of a run, each with one bug
    rewards.py    rewards with a hole, and workflows that misuse one
    commands.py   the command that makes a run, and the model that runs start from
    pool.py       all runs, many at once
    kept.py       what is kept of a run, as a line of an .xz file
    judge.py      the doctor's verdicts on kept runs as a table

Every run is made with seeds 1 and 2. Thresholds of the doctor's rules are set on the runs of seed 1
(tuning.jsonl.xz), and judged on those of seed 2 (judging.jsonl.xz).
"""
