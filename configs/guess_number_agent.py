"""Guess-the-number, played by an agent over the OpenAI endpoint, with the official client.

python -m experiments.train --config=configs/guess_number_agent.py --workdir=runs/guess_number_agent

The agent, rljax.environments.agent:play, knows a base URL and a key (docs/agents.md). It has four
guesses for a number from 1 to 15. Supervised warm-up teaches the model to name numbers, three in
ten of them sensible; eval-rollout/reward is the share of whole games that are won. 2 CPU cores
(Intel Xeon), 7 minutes: 0.21 -> 0.51, 0.29 -> 0.65 and 0.27 -> 0.38 (seeds 1 to 3, 128 games each).
"""

from ml_collections import ConfigDict

from rljax.configs import guess_number


def get_config() -> ConfigDict:
    config = guess_number.get_config()
    config.total_train_steps = 150
    config.rollout.workflow = "agent"
    config.rollout.workflow_args.agent = "rljax.environments.agent:play"

    # Games such as "1-15?" 9, "<" 3, ">" 5
    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.task.size = 15
        dataset.task.guesses = 4
    config.train_dataset.task.sensible = 0.3
    config.warmup.steps = 600
    config.gconfig.max_new_tokens = 4
    config.jax.context_length = 32

    # A request of an agent costs more than one of a workflow: half of the batch, half of the games
    config.train_dataset.batch_size = 16
    config.valid_dataset.batch_size = 32
    config.evaluator.max_prompts = 128

    config.actor.reward_norm.std_level = "group"
    config.actor.entropy_coef = 0.0
    config.actor.optimizer.lr = 1e-3
    return config
