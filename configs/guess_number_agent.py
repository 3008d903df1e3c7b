"""Guess-the-number, played by an agent over the OpenAI endpoint, with the official client.

python -m experiments.train --config=configs/guess_number_agent.py --workdir=runs/guess_number_agent

The game and the model are those of configs/guess_number.py, in half as large batches. The agent,
rljax.environments.agent:play, knows a base URL and a key (docs/agents.md).
"""

from ml_collections import ConfigDict

from rljax.configs import guess_number


def get_config() -> ConfigDict:
    config = guess_number.get_config()
    config.rollout.workflow = "agent"
    config.rollout.workflow_args.agent = "rljax.environments.agent:play"
    config.train_dataset.batch_size = 16
    config.total_train_steps = 60
    config.valid_dataset.batch_size = 32
    config.evaluator.max_prompts = 128
    return config
