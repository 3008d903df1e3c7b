"""Asynchronous GRPO of a character-level model on guess-the-number, an environment of several
turns.

python -m experiments.train --config=configs/guess_number.py --workdir=runs/guess_number

2 CPU cores (Intel Xeon with AMX), 2.6 minutes, nothing downloaded; eval-rollout/reward
0.36 -> 0.74, 0.42 -> 0.74 and 0.39 -> 0.82 (seeds 1 to 3; a policy whose first guess is the middle
wins all games).

The model has three guesses for a number from 1 to 7 and is told "higher" or "lower" after each.
Supervised warm-up teaches it to name numbers, one in ten of them sensible; reinforcement on whether
the number was found teaches it to halve. Prompts to train on begin at any turn of a game,
which the doctor notes as a difference between training and evaluation (evaluation.protocol);
eval-rollout/reward is the share of whole games that are won, sampled as in training.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.total_train_steps = 150

    # Games such as "1-7?" 2, ">" 6, "<" 4; each guess ends with a newline
    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.path = "task:guess_number"
        dataset.task = ConfigDict()
        dataset.task.size = 7
        dataset.task.guesses = 3
        dataset.task.question = "1-{size}?"
        dataset.task.higher = ">"
        dataset.task.lower = "<"
        dataset.task.illegal = "!"
        dataset.task.ending = "\n"
        dataset.task.n = 2000
    config.valid_dataset.task.n = 256
    config.rollout.workflow = "environment"
    config.gconfig.stop_token_ids = (4,)  # the newline
    config.gconfig.max_new_tokens = 3

    # Supervised warm-up: legal guesses, of which few are sensible, in games joined at any turn
    config.train_dataset.task.earlier = True
    config.train_dataset.task.sensible = 0.1
    config.warmup.steps = 300

    # A quarter of the quickstart's parameters
    config.actor.init.hidden_size = 96
    config.actor.init.intermediate_size = 256
    config.actor.init.num_heads = 3
    config.actor.init.num_kv_heads = 3

    # All samples of a group have the same secret: divided by its own spread, a lucky guess would count too much
    config.actor.reward_norm.std_level = "batch"
    config.actor.entropy_coef = 0.02  # a first guess that is always the same, and not the middle one, is hard to leave
    config.actor.optimizer.lr = 6e-4
    return config
